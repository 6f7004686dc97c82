//! What a server says of the commands that its scripts call: `MONITOR`.

use std::sync::{Arc, Mutex};

use conformance_tests::servers::Server;
use futures_util::StreamExt;
use lock_redis::redis::{AsyncConnectionConfig, Client, cmd};
use tokio::sync::watch;

/// A command that a client sent, or that a script called.
pub(crate) struct Command {
    pub(crate) by_script: bool,
    pub(crate) words: Vec<String>,
}

/// The commands of one server, in the order in which they were carried out.
#[derive(Clone, Default)]
pub(crate) struct Monitor {
    commands: Arc<Mutex<Vec<Command>>>,
    /// How many markers have been seen.
    marks: watch::Sender<usize>,
}

impl Monitor {
    /// Listens to a server that has just been started.
    pub(crate) async fn listen(&self, server: &Server) {
        let client = Client::open(server.url()).unwrap();
        let monitor = client.get_async_monitor().await.unwrap();
        let this = self.clone();
        tokio::spawn(async move {
            let mut lines = monitor.into_on_message::<String>();
            while let Some(line) = lines.next().await {
                let command = read(&line);
                let is_mark = command.words[0] == "ECHO";
                this.commands.lock().unwrap().push(command);
                if is_mark {
                    this.marks.send_modify(|marks| *marks += 1);
                }
            }
        });
    }

    /// Waits until everything has been seen that the server has done until now.
    pub(crate) async fn catch_up(&self, server: &Server) {
        let mut marks = self.marks.subscribe();
        let seen = *marks.borrow_and_update();
        let client = Client::open(server.url()).unwrap();
        // However long it takes.
        let patient = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None);
        let connecting = client.get_multiplexed_async_connection_with_config(&patient);
        let mut connection = connecting.await.unwrap();
        let echo: String = cmd("ECHO").arg("mark").query_async(&mut connection).await.unwrap();
        assert_eq!(echo, "mark");
        marks.wait_for(|marks| *marks > seen).await.unwrap();
    }

    pub(crate) fn take(&self) -> Vec<Command> {
        std::mem::take(&mut self.commands.lock().unwrap())
    }
}

/// Reads a line such as `1700000000.123456 [0 lua] "GET" "key"`.
fn read(line: &str) -> Command {
    let (from, rest) = line.split_once("] ").unwrap();
    let mut words = vec![String::new()];
    let (mut quoted, mut characters) = (false, rest.chars());
    while let Some(character) = characters.next() {
        let word = words.last_mut().unwrap();
        match character {
            '"' => quoted = !quoted,
            // What is written so is never compared.
            '\\' => word.extend(characters.next()),
            ' ' if !quoted => words.push(String::new()),
            character => word.push(character),
        }
    }
    Command {
        by_script: from.ends_with(" lua"),
        words,
    }
}
