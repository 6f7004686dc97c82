//! What the locker and the supervisor tell each other.
//!
//! A pair of connected sockets, one end in each process and none anywhere else: the end of the one process is the end
//! of the channel for the other, however it ended.

use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::str::{FromStr, SplitAsciiWhitespace};
use std::time::Duration;

use fencelock::OwnerId;
use rustix::io::{Errno, Result};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

use crate::timing::{Instant, Timing};

/// What the locker tells the supervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Should the locker be killed, that acquisition is to be released once all has ended.
    Claim(Claim),
    /// Start the command; its stdin comes along. The lease ends at `deadline`.
    Start { deadline: Instant, timing: Timing },
    /// The lease was renewed and ends then.
    Deadline(Instant),
    /// Pass that signal on.
    Signal(i32),
    /// The lock is lost: end everything.
    End,
    /// The locker has released the lock, or has given that up: nothing is left to do.
    Over,
}

/// What it takes to release one acquisition, and no later one, from another process.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) owner: OwnerId,
    /// Where the locks are kept, if the environment does not tell. It may be secret.
    pub(crate) url: Option<String>,
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim")
            .field("owner", &self.owner)
            .finish_non_exhaustive()
    }
}

/// What the supervisor tells the locker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// The command runs, in a process group of that number.
    Started(i32),
    /// The command was stopped by that signal.
    Stopped(i32),
    /// The command ended, and everything that had to end with it.
    Ended { how: End, why: Why },
}

/// How the command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Exited(u8),
    Killed(i32),
}

/// Why it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// By itself.
    Itself,
    /// By itself, but it left processes behind, which were ended.
    Leftovers,
    /// The locker said that the lock is lost.
    Lost,
    /// The lease was about to end.
    Deadline,
    /// The locker is gone.
    Orphaned,
}

const WHYS: [(Why, &str); 5] = [
    (Why::Itself, "itself"),
    (Why::Leftovers, "leftovers"),
    (Why::Lost, "lost"),
    (Why::Deadline, "deadline"),
    (Why::Orphaned, "orphaned"),
];

/// The longest message: a claim with an address.
const BUFFER: usize = 8_192;

/// The two ends. Neither is inherited by a process that is started.
pub(crate) fn pair() -> Result<(OwnedFd, OwnedFd)> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Sends one message, with a file descriptor if there is one. Never waits: a peer that does not read is no obstacle. Fails with
/// `MSGSIZE` if the message is too long.
pub(crate) fn send(channel: impl AsFd, message: impl fmt::Display, fd: Option<BorrowedFd<'_>>) -> Result<()> {
    let text = message.to_string();
    if text.len() > BUFFER {
        return Err(Errno::MSGSIZE);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        rights.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        match sendmsg(&channel, &[IoSlice::new(text.as_bytes())], &mut rights, flags) {
            Err(Errno::INTR) => {}
            sent => return sent.map(|_| ()),
        }
    }
}

/// The next message, with the file descriptor that came along; `None` once the other process is gone. Fails with
/// `AGAIN` if there is none yet.
pub(crate) fn receive<M: FromStr<Err = Errno>>(channel: impl AsFd) -> Result<Option<(M, Option<OwnedFd>)>> {
    let mut text = [0; BUFFER];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let length = loop {
        match recvmsg(&channel, &mut [IoSliceMut::new(&mut text)], &mut rights, flags) {
            // A peer that ends with messages unread resets the channel, which is told once. What it has sent is still
            // there.
            Err(Errno::INTR | Errno::CONNRESET) => {}
            received => break received?.bytes,
        }
    };
    if length == 0 {
        return Ok(None);
    }
    let fd = rights.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let text = std::str::from_utf8(&text[..length]).map_err(|_| Errno::PROTO)?;
    Ok(Some((text.parse()?, fd)))
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Claim(Claim { owner, url: None }) => write!(f, "claim {owner}"),
            Self::Claim(Claim { owner, url: Some(url) }) => write!(f, "claim {owner} {url}"),
            Self::Start { deadline, timing } => {
                write!(
                    f,
                    "start {} {} {}",
                    deadline.0,
                    timing.grace.as_nanos(),
                    timing.margin.as_nanos()
                )
            }
            Self::Deadline(deadline) => write!(f, "deadline {}", deadline.0),
            Self::Signal(signal) => write!(f, "signal {signal}"),
            Self::End => f.write_str("end"),
            Self::Over => f.write_str("over"),
        }
    }
}

impl FromStr for Order {
    type Err = Errno;

    fn from_str(text: &str) -> Result<Self> {
        if let Some(claim) = text.strip_prefix("claim ") {
            // An address may hold blanks.
            let (owner, url) = claim
                .split_once(' ')
                .map_or((claim, None), |(owner, url)| (owner, Some(url)));
            return Ok(Self::Claim(Claim {
                owner: owner.parse().map_err(|_| Errno::PROTO)?,
                url: url.map(str::to_owned),
            }));
        }
        let mut words = text.split_ascii_whitespace();
        Ok(match words.next() {
            Some("start") => Self::Start {
                deadline: Instant(number(&mut words)?),
                timing: Timing {
                    grace: Duration::from_nanos(number(&mut words)?),
                    margin: Duration::from_nanos(number(&mut words)?),
                },
            },
            Some("deadline") => Self::Deadline(Instant(number(&mut words)?)),
            Some("signal") => Self::Signal(number(&mut words)?),
            Some("end") => Self::End,
            Some("over") => Self::Over,
            _ => return Err(Errno::PROTO),
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Started(pid) => write!(f, "started {pid}"),
            Self::Stopped(signal) => write!(f, "stopped {signal}"),
            Self::Ended { how, why } => {
                let why = WHYS.iter().find(|(known, _)| known == why).map_or("", |(_, word)| word);
                match how {
                    End::Exited(code) => write!(f, "exited {code} {why}"),
                    End::Killed(signal) => write!(f, "killed {signal} {why}"),
                }
            }
        }
    }
}

impl FromStr for Report {
    type Err = Errno;

    fn from_str(text: &str) -> Result<Self> {
        let mut words = text.split_ascii_whitespace();
        let how = match words.next() {
            Some("started") => return Ok(Self::Started(number(&mut words)?)),
            Some("stopped") => return Ok(Self::Stopped(number(&mut words)?)),
            Some("exited") => End::Exited(number(&mut words)?),
            Some("killed") => End::Killed(number(&mut words)?),
            _ => return Err(Errno::PROTO),
        };
        let word = words.next();
        let why = WHYS
            .iter()
            .find(|(_, known)| Some(*known) == word)
            .ok_or(Errno::PROTO)?
            .0;
        Ok(Self::Ended { how, why })
    }
}

fn number<N: FromStr>(words: &mut SplitAsciiWhitespace<'_>) -> Result<N> {
    words.next().and_then(|word| word.parse().ok()).ok_or(Errno::PROTO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let (locker, supervisor) = pair().unwrap();
        let timing = Timing {
            grace: Duration::from_secs(u64::MAX / 1_000_000_000),
            margin: Duration::from_millis(20),
        };
        let claim = |url: Option<&str>| {
            let url = url.map(str::to_owned);
            Order::Claim(Claim {
                owner: OwnerId::random(),
                url,
            })
        };
        let orders = [
            claim(None),
            claim(Some("sqlite:/srv/two words.db")),
            claim(Some(&format!("redis://joe:{}@host", "x".repeat(8_000)))),
            Order::Start {
                deadline: Instant(u64::MAX),
                timing,
            },
            Order::Deadline(Instant(17)),
            Order::Signal(15),
            Order::End,
            Order::Over,
        ];
        for order in orders {
            send(&locker, &order, None).unwrap();
            assert_eq!(receive::<Order>(&supervisor).unwrap().unwrap().0, order);
        }
        assert_eq!(
            send(&locker, claim(Some(&"x".repeat(8_192))), None),
            Err(Errno::MSGSIZE)
        );
        let mut reports = vec![Report::Started(42), Report::Stopped(20)];
        for (why, _) in WHYS {
            reports.extend([
                Report::Ended {
                    how: End::Exited(255),
                    why,
                },
                Report::Ended {
                    how: End::Killed(9),
                    why,
                },
            ]);
        }
        for report in reports {
            send(&supervisor, report, None).unwrap();
            assert_eq!(receive::<Report>(&locker).unwrap().unwrap().0, report);
        }
        assert_eq!(receive::<Report>(&locker).unwrap_err(), Errno::AGAIN);
    }

    #[test]
    fn a_file_descriptor_comes_along() {
        use std::io::{Read, Write, pipe};

        let (locker, supervisor) = pair().unwrap();
        let (reader, mut writer) = pipe().unwrap();
        send(&locker, Order::End, Some(reader.as_fd())).unwrap();
        drop(reader);
        let (_, fd) = receive::<Order>(&supervisor).unwrap().unwrap();
        writer.write_all(b"x").unwrap();
        drop(writer);
        let mut text = String::new();
        std::fs::File::from(fd.unwrap()).read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
    }

    #[test]
    fn the_end_of_the_other_process_is_the_end_of_the_channel() {
        let (locker, supervisor) = pair().unwrap();
        send(&supervisor, Report::Started(1), None).unwrap();
        send(&locker, Order::End, None).unwrap();
        drop(supervisor);
        // What was said before is still heard, although something was not listened to.
        assert_eq!(receive::<Report>(&locker).unwrap().unwrap().0, Report::Started(1));
        assert!(receive::<Report>(&locker).unwrap().is_none());
        assert!(send(&locker, Order::End, None).is_err());
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            "claim",
            "claim 7",
            "start 1 2",
            "signal x",
            "exited 256 itself",
            "killed 9 because",
        ] {
            assert!(text.parse::<Order>().is_err(), "{text}");
            assert!(text.parse::<Report>().is_err(), "{text}");
        }
    }
}
