//! How a process talks with the one that started it: in lines.

use std::fmt::{Arguments, Display};
use std::io::{self, BufRead, Write};

use crate::Outcome;

/// Input that ends tells a process that is awake; one that is stopped could stay for ever if its parent were killed.
pub(crate) fn end_with_parent() {
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
}

pub(crate) fn say(line: Arguments<'_>) -> io::Result<()> {
    writeln!(io::stdout(), "{line}")
}

/// The last words of a process. If nobody hears them there is nobody to tell.
pub(crate) fn say_failed(why: &dyn Display) {
    let _ = say(format_args!("failed {}", why.to_string().replace('\n', "; ")));
}

/// The next line. The end of the input means that nobody is there to say it any more.
pub(crate) fn listen() -> Outcome<String> {
    match io::stdin().lock().lines().next() {
        Some(line) => Ok(line?),
        None => Err("the one that started this process has ended".into()),
    }
}
