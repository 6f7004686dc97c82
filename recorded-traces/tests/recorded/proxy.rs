//! A proxy between the clients and one server that records the scripts and their answers.
//!
//! What the server has been sent is always answered and recorded, also if the client is cut off meanwhile: only on its way between client and
//! proxy is anything lost. So nothing that a script did is missing in the record.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lock_redis::redis::{PushKind, Value};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::sleep;

use crate::frames::{Frames, fields, text};

/// A script that a server has run, or refused.
pub(crate) struct Exchange {
    pub(crate) request: Vec<String>,
    pub(crate) answer: Value,
}

/// A message that a server pushed to a client.
pub(crate) struct Pushed {
    pub(crate) message: String,
    pub(crate) delivered: bool,
}

/// What has passed.
#[derive(Default)]
pub(crate) struct Record {
    pub(crate) exchanges: Vec<Exchange>,
    pub(crate) pushes: Vec<Pushed>,
    /// What the proxy did: requests lost, answers lost, messages delayed.
    pub(crate) faults: [usize; 3],
}

/// How often something happens to a request or an answer, of 1.
#[derive(Clone, Copy, Default)]
pub(crate) struct Faults {
    pub(crate) loses_request: f64,
    pub(crate) loses_answer: f64,
    pub(crate) delays: f64,
    /// The longest delay.
    pub(crate) longest: Duration,
}

pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    accepting: AbortHandle,
}

struct Shared {
    server: String,
    record: Mutex<Record>,
    faults: Mutex<(Faults, fastrand::Rng)>,
    traffic: watch::Sender<Traffic>,
    /// Counts the cuts.
    cuts: watch::Sender<u64>,
}

#[derive(Default)]
struct Traffic {
    /// Whether nothing is sent on to the server.
    is_held: bool,
    /// How many requests the server has not answered.
    unanswered: usize,
    connections: usize,
}

enum Fate {
    Passes,
    Lost,
    Delayed(Duration),
}

impl Proxy {
    pub(crate) async fn start(server: &str, seed: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            server: server.to_owned(),
            record: Mutex::default(),
            faults: Mutex::new((Faults::default(), fastrand::Rng::with_seed(seed))),
            traffic: watch::Sender::default(),
            cuts: watch::Sender::default(),
        });
        let accepted = Arc::clone(&shared);
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let shared = Arc::clone(&accepted);
                shared.traffic.send_modify(|traffic| traffic.connections += 1);
                tokio::spawn(async move {
                    shared.carry(client).await;
                    shared.traffic.send_modify(|traffic| traffic.connections -= 1);
                });
            }
        });
        Self {
            address,
            shared,
            accepting: accepting.abort_handle(),
        }
    }

    pub(crate) fn set(&self, faults: Faults) {
        self.shared.faults.lock().unwrap().0 = faults;
    }

    /// Ends every connection on the clients' side.
    pub(crate) fn cut(&self) {
        self.shared.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Sends nothing on to the server any more, and waits until it has answered what it has.
    pub(crate) async fn hold(&self) {
        self.shared.traffic.send_modify(|traffic| traffic.is_held = true);
        let mut traffic = self.shared.traffic.subscribe();
        traffic.wait_for(|traffic| traffic.unanswered == 0).await.unwrap();
    }

    /// Sends on again.
    pub(crate) fn pass(&self) {
        self.shared.traffic.send_modify(|traffic| traffic.is_held = false);
    }

    /// Ends every connection, and returns what has passed.
    pub(crate) async fn end(&self) -> Record {
        self.accepting.abort();
        self.set(Faults::default());
        self.cut();
        let mut traffic = self.shared.traffic.subscribe();
        traffic.wait_for(|traffic| traffic.connections == 0).await.unwrap();
        std::mem::take(&mut self.shared.record.lock().unwrap())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Shared {
    async fn carry(&self, client: TcpStream) {
        let mut cuts = self.cuts.subscribe();
        let mut traffic = self.traffic.subscribe();
        tokio::select! {
            _ = traffic.wait_for(|traffic| !traffic.is_held) => {}
            _ = cuts.changed() => return,
        }
        let Ok(server) = TcpStream::connect(&self.server).await else {
            return;
        };
        let (from_client, to_client) = client.into_split();
        let (from_server, mut to_server) = server.into_split();
        let over = watch::Sender::new(false);
        // Whether nothing more is sent on to the server.
        let sent = watch::Sender::new(false);
        let pending = Mutex::<VecDeque<Vec<String>>>::default();
        let requests = async {
            let mut frames = Frames::new(from_client);
            let mut is_over = over.subscribe();
            loop {
                let frame = tokio::select! {
                    frame = frames.next() => frame,
                    _ = is_over.wait_for(|over| *over) => None,
                    _ = cuts.changed() => None,
                };
                let Some(frame) = frame else { break };
                let words: Vec<_> = fields(&frame.value).unwrap().iter().map(text).collect();
                if is_script(&words) {
                    match self.fate(0, |faults| faults.loses_request) {
                        Fate::Passes => {}
                        Fate::Lost => break,
                        // It arrives, whatever becomes of the client.
                        Fate::Delayed(delay) => sleep(delay).await,
                    }
                }
                self.admit(&words).await;
                if !is_subscription(&words) {
                    pending.lock().unwrap().push_back(words);
                }
                if to_server.write_all(&frame.bytes).await.is_err() {
                    break;
                }
            }
            over.send_replace(true);
            sent.send_replace(true);
            // The server would not answer what has been sent if this were closed.
            to_server
        };
        let answers = async {
            let mut frames = Frames::new(from_server);
            let mut to_client = Some(to_client);
            let (mut is_over, mut all_sent) = (over.subscribe(), sent.subscribe());
            loop {
                let all_answered = pending.lock().unwrap().is_empty();
                let frame = tokio::select! {
                    frame = frames.next() => frame,
                    _ = is_over.wait_for(|over| *over), if to_client.is_some() => {
                        to_client = None;
                        continue;
                    }
                    // What was sent since is answered yet.
                    _ = all_sent.wait_for(|sent| *sent), if all_answered => match pending.lock().unwrap().is_empty() {
                        true => None,
                        false => continue,
                    },
                };
                let Some(frame) = frame else { break };
                let push = pushed(&frame.value);
                let request = match &frame.value {
                    Value::Push { .. } => None,
                    _ => {
                        self.traffic.send_modify(|traffic| traffic.unanswered -= 1);
                        pending.lock().unwrap().pop_front()
                    }
                };
                let request = request.filter(|words| is_script(words));
                if push.is_some() || request.is_some() {
                    match self.fate(1, |faults| faults.loses_answer) {
                        Fate::Passes => {}
                        Fate::Lost => {
                            to_client = None;
                            over.send_replace(true);
                        }
                        Fate::Delayed(delay) => sleep(delay).await,
                    }
                }
                let delivered = match &mut to_client {
                    Some(to_client) => to_client.write_all(&frame.bytes).await.is_ok(),
                    None => false,
                };
                let mut record = self.record.lock().unwrap();
                if let Some(message) = push {
                    record.pushes.push(Pushed { message, delivered });
                }
                if let Some(request) = request {
                    let answer = frame.value;
                    record.exchanges.push(Exchange { request, answer });
                }
            }
            over.send_replace(true);
        };
        let (to_server, ()) = tokio::join!(requests, answers);
        drop(to_server);
        // A server that was killed answers nothing more.
        let left = pending.into_inner().unwrap().len();
        self.traffic.send_modify(|traffic| traffic.unanswered -= left);
    }

    /// Waits until requests may be sent on.
    async fn admit(&self, words: &[String]) {
        let mut traffic = self.traffic.subscribe();
        loop {
            let admitted = self.traffic.send_if_modified(|traffic| {
                let admitted = !traffic.is_held;
                traffic.unanswered += usize::from(admitted && !is_subscription(words));
                admitted
            });
            if admitted {
                return;
            }
            traffic.wait_for(|traffic| !traffic.is_held).await.unwrap();
        }
    }

    fn fate(&self, direction: usize, loses: impl Fn(&Faults) -> f64) -> Fate {
        let mut faults = self.faults.lock().unwrap();
        let (faults, random) = &mut *faults;
        let chance = random.f64();
        let (kind, fate) = if chance < loses(faults) {
            (direction, Fate::Lost)
        } else if chance < loses(faults) + faults.delays {
            (2, Fate::Delayed(faults.longest.mul_f64(random.f64())))
        } else {
            return Fate::Passes;
        };
        self.record.lock().unwrap().faults[kind] += 1;
        fate
    }
}

fn is_script(words: &[String]) -> bool {
    words[0].starts_with("EVAL")
}

/// Such requests are answered by a push.
fn is_subscription(words: &[String]) -> bool {
    words[0].to_uppercase().ends_with("SUBSCRIBE")
}

/// The message, if it is one of a channel.
fn pushed(value: &Value) -> Option<String> {
    match value {
        Value::Push {
            kind: PushKind::Message,
            data,
        } => data.last().map(text),
        _ => None,
    }
}
