//! Waiting for a lock, and telling a person at a terminal what for.

use std::future::IntoFuture;
use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, SystemTime};

use fencelock::{Holder, LockError, LockGuard, LockName, LockRequest, Locks};
use tokio::time::{Instant, sleep_until};

use crate::place::Place;
use crate::say::{is_quiet, say};
use crate::signals::Signals;
use crate::terminal::{Terminal, width};

/// Between two looks at who holds the lock.
const TURN: Duration = Duration::from_secs(1);

/// How a wait ended.
pub(crate) enum Waited {
    Got(LockGuard),
    /// A signal came first.
    Left(i32),
}

/// Waits for the lock, or for a signal.
pub(crate) async fn acquire(
    locks: &Locks,
    name: &LockName,
    place: &Place,
    request: LockRequest,
    signals: &mut Signals,
) -> Result<Waited, LockError> {
    let mut line = Line::new(locks, name, place);
    let mut request = request.into_future();
    loop {
        tokio::select! {
            biased;
            signal = signals.next() => {
                line.clear();
                return Ok(Waited::Left(signal));
            }
            answer = &mut request => {
                line.clear();
                return answer.map(Waited::Got);
            }
            () = line.turn() => {}
        }
    }
}

/// `, held by host:pid (label) for 12 s`, or `, reserved by host:pid (label) for 5 min 0 s more`, as much of it as is known.
pub(crate) fn held_by(holder: &Holder) -> String {
    let by = visible(&holder.to_string());
    if holder.is_reserved {
        let left = holder.remaining.map(|left| format!(" for {} more", spelt(left)));
        return format!(", reserved by {by}{}", left.unwrap_or_default());
    }
    let since = holder
        .acquired_at
        .and_then(|at| SystemTime::now().duration_since(at).ok());
    let time = since.map(|time| format!(" for {}", spelt(time))).unwrap_or_default();
    format!(", held by {by}{time}")
}

/// A time as a person reads it, in its two largest units.
pub(crate) fn spelt(time: Duration) -> String {
    let seconds = time.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3_600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, _, _) => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

/// What others wrote, without what a terminal would obey.
pub(crate) fn visible(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

/// The line that says what is waited for, on a terminal, from the first second on.
struct Line<'a> {
    locks: &'a Locks,
    name: &'a LockName,
    place: &'a Place,
    terminal: Option<Terminal>,
    /// Whether the terminal can write a line anew.
    in_place: bool,
    next: Instant,
    shown: Option<String>,
}

impl<'a> Line<'a> {
    fn new(locks: &'a Locks, name: &'a LockName, place: &'a Place) -> Self {
        let kind = std::env::var_os("TERM").unwrap_or_default();
        Self {
            locks,
            name,
            place,
            terminal: (stderr().is_terminal() && !is_quiet()).then(Terminal::own).flatten(),
            in_place: !kind.is_empty() && kind != "dumb",
            next: Instant::now() + TURN,
            shown: None,
        }
    }

    /// Waits until the line is due, and shows it. Never ends where there is nobody to show it to.
    async fn turn(&mut self) {
        if self.terminal.is_none() {
            return std::future::pending().await;
        }
        sleep_until(self.next).await;
        let held = match self.locks.holder(self.name.as_str()).await {
            Ok(Some(holder)) => held_by(&holder),
            Ok(None) | Err(_) => String::new(),
        };
        self.next = Instant::now() + TURN;
        // Another job has the terminal if not.
        if self.terminal.as_ref().is_some_and(Terminal::is_home) {
            self.show(&held);
        }
    }

    fn show(&mut self, held: &str) {
        if self.shown.is_none() {
            say(format_args!("the locks are kept in {}", self.place));
        }
        let text = format!("fencelock: waiting for {}{held}", self.name);
        if self.in_place {
            let _ = write!(stderr(), "\r{}\x1b[K", cut(&text, width().saturating_sub(1)));
            self.shown = Some(text);
        } else if self.shown.is_none() {
            let _ = writeln!(stderr(), "{text}");
            self.shown = Some(text);
        }
    }

    /// Takes the line away.
    fn clear(&mut self) {
        if self.in_place && self.shown.take().is_some() {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}

/// As much as fits. Beyond ASCII a character may be two columns wide.
pub(crate) fn cut(text: &str, width: usize) -> String {
    let columns = |c: char| if c.is_ascii() { 1 } else { 2 };
    if text.chars().map(columns).sum::<usize>() <= width {
        return text.to_owned();
    }
    let mut left = width.saturating_sub(3);
    let fits = |c: &char| {
        let fits = columns(*c) <= left;
        left = left.saturating_sub(columns(*c));
        fits
    };
    let start: String = text.chars().take_while(fits).collect();
    start + "..."
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_spelt_in_its_two_largest_units() {
        for (seconds, text) in [
            (0, "0 s"),
            (59, "59 s"),
            (61, "1 min 1 s"),
            (3_661, "1 h 1 min"),
            (90_000, "1 d 1 h"),
        ] {
            assert_eq!(spelt(Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn a_holder_is_told_with_what_is_known_and_obeyed_by_no_terminal() {
        let mut holder = Holder::new();
        assert_eq!(held_by(&holder), ", held by an unknown holder");
        holder.host = Some("db1".into());
        holder.pid = Some(7);
        holder.label = Some("\x1b[2Jnightly".into());
        holder.acquired_at = Some(SystemTime::now() - Duration::from_secs(12));
        assert_eq!(held_by(&holder), ", held by db1:7 (\u{fffd}[2Jnightly) for 12 s");
    }

    #[test]
    fn a_line_is_cut_to_the_width_of_the_terminal() {
        assert_eq!(cut("waiting", 7), "waiting");
        assert_eq!(cut("waiting", 6), "wai...");
        assert_eq!(cut("äöü", 6), "äöü");
        assert_eq!(cut("äöüß", 6), "ä...");
        assert_eq!(cut("waiting", 0), "...");
    }
}
