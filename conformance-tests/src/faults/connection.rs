//! One connection through the proxy.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::proxy::{Direction, Shared, Traffic};
use super::trap::{Kind, Swallowing, Then};

/// How much is read at a time: more than any request or reply of a test.
const PIECE: usize = 64 * 1024;
/// How many pieces may be under way: what is delayed must not hold up its sender.
const UNDER_WAY: usize = 1024;

/// A reply that is not to arrive.
type Unheard = Mutex<Option<(Swallowing, watch::Sender<bool>)>>;

/// How the way ended.
enum End {
    /// Its sender sends no more, and its receiver was told.
    Closed,
    /// Both ways end, at once.
    Reset,
    /// The same, and what has passed is still to arrive.
    Cut,
}

/// Carries what the two send each other, until both ways have ended.
pub(super) async fn carry(mut client: TcpStream, shared: Arc<Shared>) {
    let mut cuts = shared.cut.subscribe();
    let cuts_before = *cuts.borrow();
    shared.counts.send_modify(|counts| {
        counts.connections += 1;
        counts.open += 1;
    });
    let connected = TcpStream::connect(&shared.target).await;
    if let Ok(mut server) = connected {
        // Else small pieces would wait for each other here, and not where they would without a proxy.
        let _ = client.set_nodelay(true).and_then(|()| server.set_nodelay(true));
        let unheard = Unheard::default();
        let end = {
            let (from_client, to_client) = client.split();
            let (from_server, to_server) = server.split();
            let requests = carry_one_way(Direction::ToServer, from_client, to_server, &shared, &unheard);
            let replies = carry_one_way(Direction::ToClient, from_server, to_client, &shared, &unheard);
            let both = async {
                tokio::pin!(requests, replies);
                tokio::select! {
                    end = &mut requests => if let End::Closed = end { replies.await } else { end },
                    end = &mut replies => if let End::Closed = end { requests.await } else { end },
                }
            };
            let cut = async {
                // The sender is in `shared`.
                let _ = cuts.wait_for(|cuts| *cuts != cuts_before).await;
            };
            tokio::select! {
                end = both => end,
                () = cut => End::Reset,
            }
        };
        if let End::Reset = end {
            // A socket that is gone already cannot be reset, nor need it be.
            let _ = client.set_zero_linger();
            let _ = server.set_zero_linger();
        }
    } else {
        let _ = client.set_zero_linger();
    }
    drop(client);
    shared.counts.send_modify(|counts| counts.open -= 1);
}

/// What was read, and when.
enum Piece {
    Bytes(Instant, Vec<u8>),
    Closed,
    Reset,
    /// It came while the traffic was lost, whatever the traffic is by now.
    Lost,
}

async fn carry_one_way(
    way: Direction,
    mut from: ReadHalf<'_>,
    to: WriteHalf<'_>,
    shared: &Shared,
    unheard: &Unheard,
) -> End {
    let (pieces, under_way) = mpsc::channel(UNDER_WAY);
    let traffic = match way {
        Direction::ToServer => shared.to_server.subscribe(),
        _ => shared.to_client.subscribe(),
    };
    let traffic_read = traffic.clone();
    let reading = async move {
        let mut buffer = vec![0; PIECE];
        loop {
            let read = from.read(&mut buffer).await;
            let length = *read.as_ref().unwrap_or(&0);
            // Decided before the bytes are counted: a test that has seen the count may heal the traffic.
            let is_lost = *traffic_read.borrow() == Traffic::Lost;
            if length > 0 {
                count(shared, way, length as u64);
            }
            let piece = match read {
                _ if is_lost => Piece::Lost,
                Ok(0) => Piece::Closed,
                Ok(_) => Piece::Bytes(Instant::now(), buffer[..length].to_vec()),
                Err(_) => Piece::Reset,
            };
            if pieces.send(piece).await.is_err() || length == 0 {
                // What was read is still to be written.
                return std::future::pending().await;
            }
        }
    };
    let mut writer = Writer {
        way,
        to,
        shared,
        unheard,
        traffic,
        lost: false,
        is_gone: false,
    };
    tokio::select! {
        end = reading => end,
        end = writer.write(under_way) => end,
    }
}

fn count(shared: &Shared, way: Direction, length: u64) {
    shared.counts.send_modify(|counts| {
        let (bytes, sends) = match way {
            Direction::ToServer => (&mut counts.bytes_to_server, &mut counts.sends_to_server),
            _ => (&mut counts.bytes_to_client, &mut counts.sends_to_client),
        };
        *bytes += length;
        *sends += 1;
    });
}

/// The end of a way: here it is decided what arrives.
struct Writer<'a> {
    way: Direction,
    to: WriteHalf<'a>,
    shared: &'a Shared,
    unheard: &'a Unheard,
    traffic: watch::Receiver<Traffic>,
    lost: bool,
    /// The receiver takes no more. The other way tells of its end, behind what it has sent before; a reset may arrive as an orderly end then.
    is_gone: bool,
}

impl Writer<'_> {
    async fn write(&mut self, mut under_way: mpsc::Receiver<Piece>) -> End {
        while let Some(piece) = under_way.recv().await {
            let read = if let Piece::Bytes(read, _) = &piece {
                Some(*read)
            } else {
                None
            };
            self.clears_up(read).await;
            if self.lost {
                continue;
            }
            match piece {
                Piece::Bytes(_, bytes) => {
                    if let Err(end) = self.pass(&bytes).await {
                        return end;
                    }
                }
                Piece::Closed => {
                    // The receiver may have gone first.
                    let _ = self.to.shutdown().await;
                    return End::Closed;
                }
                Piece::Reset => return End::Reset,
                Piece::Lost => self.lost = true,
            }
        }
        // Its sender has ended, and nobody is to know.
        std::future::pending().await
    }

    /// Ends when a piece that was read then may arrive, or is lost.
    async fn clears_up(&mut self, read: Option<Instant>) {
        loop {
            let traffic = *self.traffic.borrow_and_update();
            // The sender is in `shared`, so the traffic can always change.
            match traffic {
                _ if self.lost => return,
                Traffic::Flows => return,
                Traffic::Lost => self.lost = true,
                Traffic::Stalled => {
                    let _ = self.traffic.changed().await;
                }
                Traffic::Delayed(delay) => {
                    let Some(read) = read else { return };
                    let late = tokio::time::timeout_at(read + delay, self.traffic.changed()).await;
                    if late.is_err() {
                        return;
                    }
                }
            }
        }
    }

    async fn pass(&mut self, bytes: &[u8]) -> Result<(), End> {
        if self.way == Direction::ToClient
            && let Some((then, swallowed)) = self.swallow(bytes)
        {
            swallowed.send_replace(true);
            return match then {
                Then::Cut => Err(End::Reset),
                Then::Silence => {
                    self.lost = true;
                    Ok(())
                }
                Then::Pass => Ok(()),
            };
        }
        match self.shared.traps.meet(self.way, bytes) {
            None => {}
            Some((Kind::CutAfter { left, .. }, sprung)) => {
                sprung.send_replace(true);
                let _ = self.to.write_all(&bytes[..left]).await;
                return Err(End::Cut);
            }
            Some((Kind::Hold { mut delivered, .. }, sprung)) => {
                sprung.send_replace(true);
                let decided = delivered.wait_for(Option::is_some).await;
                if !decided.is_ok_and(|delivered| *delivered == Some(true)) {
                    return Err(End::Reset);
                }
            }
            Some((Kind::Swallow { swallowing, .. }, sprung)) => {
                *self.unheard.lock().unwrap_or_else(PoisonError::into_inner) = Some((swallowing, sprung));
            }
        }
        self.is_gone = self.is_gone || self.to.write_all(bytes).await.is_err();
        Ok(())
    }

    fn swallow(&self, bytes: &[u8]) -> Option<(Then, watch::Sender<bool>)> {
        let mut unheard = self.unheard.lock().unwrap_or_else(PoisonError::into_inner);
        let (swallowing, swallowed) = unheard.take_if(|(swallowing, _)| (swallowing.is_reply)(bytes))?;
        Some((swallowing.then, swallowed))
    }
}
