//! The socket under a connection.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::rt::Executor;
use hyper_util::rt::TokioIo;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, BufWriter, ReadBuf};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint, Uri};

/// A channel over one TCP connection, which is never made a second time: a request on it can reach no other state of the
/// server than the requests before it. `patience` is how long the network may leave data unacknowledged.
///
/// `broken` is told when the connection ends, and ends it when it is told. Must be called on `runtime`.
pub(crate) async fn connect(
    endpoint: Endpoint,
    host: String,
    port: u16,
    patience: Duration,
    broken: CancellationToken,
    runtime: Handle,
) -> Result<Channel, tonic::transport::Error> {
    // Under TLS each frame is sent as it comes: not all versions of rustls' stream come again for what is kept.
    let room = if endpoint.uri().scheme_str() == Some("http") {
        ROOM
    } else {
        0
    };
    let used = Arc::new(AtomicBool::new(false));
    let driver = Driver {
        runtime,
        broken: broken.clone(),
    };
    let connector = tower::service_fn(move |_: Uri| {
        let (host, used, broken) = (host.clone(), Arc::clone(&used), broken.clone());
        async move {
            if used.swap(true, Ordering::AcqRel) {
                return Err(io::Error::from(io::ErrorKind::BrokenPipe));
            }
            let stream = tcp(&host, port, patience).await?;
            Ok(TokioIo::new(Watched {
                stream: BufWriter::with_capacity(room, stream),
                kept: 0,
                turns: 0,
                broken,
            }))
        }
    });
    endpoint.executor(driver).connect_with_connector(connector).await
}

async fn tcp(host: &str, port: u16, patience: Duration) -> io::Result<TcpStream> {
    const PROBES: u32 = 3;
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    let socket = SockRef::from(&stream);
    // Whatever has not been sent when the socket is closed shall not be sent after that: the claims in it were given up.
    socket.set_linger(Some(Duration::ZERO))?;
    let pause = (patience / PROBES).max(Duration::from_secs(1));
    let keepalive = TcpKeepalive::new().with_time(pause).with_interval(pause);
    #[cfg(any(
        target_os = "linux",
        target_os = "android",
        target_os = "macos",
        target_os = "freebsd"
    ))]
    let keepalive = keepalive.with_retries(PROBES);
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    socket.set_tcp_user_timeout(Some(patience))?;
    Ok(stream)
}

/// Runs what works the connection, for as long as it is to live. Dropping that closes the socket at once.
struct Driver {
    runtime: Handle,
    broken: CancellationToken,
}

impl Executor<Pin<Box<dyn Future<Output = ()> + Send>>> for Driver {
    fn execute(&self, work: Pin<Box<dyn Future<Output = ()> + Send>>) {
        let broken = self.broken.clone();
        self.runtime.spawn(async move {
            tokio::select! {
                biased;
                () = broken.cancelled() => {}
                () = work => {}
            }
        });
    }
}

/// How many frames a request is at most.
const FRAMES: u8 = 3;

/// How much is kept at most; several requests.
const ROOM: usize = 8 << 10;

/// A stream that tells when it has ended.
///
/// A request is three frames, by two tasks, and each would be sent by itself. What is written is kept until those who are ready
/// have had their turn, and is sent as one: the server reads it in one go, too.
struct Watched {
    stream: BufWriter<TcpStream>,
    /// How much was kept when it was to be sent last.
    kept: usize,
    /// How often it was to be sent, and was not.
    turns: u8,
    broken: CancellationToken,
}

impl Watched {
    fn told<T>(&self, outcome: io::Result<T>) -> io::Result<T> {
        if outcome.is_err() {
            self.broken.cancel();
        }
        outcome
    }
}

impl Drop for Watched {
    /// Also when the runtime ends, which nobody reads or writes any more to notice.
    fn drop(&mut self) {
        self.broken.cancel();
    }
}

impl AsyncRead for Watched {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let (before, room) = (buffer.filled().len(), buffer.remaining() > 0);
        let outcome = ready!(Pin::new(&mut self.stream).poll_read(cx, buffer));
        if room && buffer.filled().len() == before {
            self.broken.cancel();
        }
        Poll::Ready(self.told(outcome))
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = ready!(Pin::new(&mut self.stream).poll_write(cx, bytes));
        Poll::Ready(self.told(outcome))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let kept = self.stream.buffer().len();
        if kept > self.kept && self.turns < FRAMES {
            (self.kept, self.turns) = (kept, self.turns + 1);
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let outcome = ready!(Pin::new(&mut self.stream).poll_flush(cx));
        (self.kept, self.turns) = (0, 0);
        Poll::Ready(self.told(outcome))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = ready!(Pin::new(&mut self.stream).poll_shutdown(cx));
        Poll::Ready(self.told(outcome))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, bytes));
        Poll::Ready(self.told(outcome))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::task::noop_waker;
    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn what_is_written_while_others_have_their_turn_is_sent_as_one() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        let mut watched = Watched {
            stream: BufWriter::with_capacity(ROOM, stream),
            kept: 0,
            turns: 0,
            broken: CancellationToken::new(),
        };
        let waker = noop_waker();
        let mut cx = Context::from_waker(&waker);
        for (frame, kept) in [("head", "head"), ("body", "headbody"), ("end", "headbodyend")] {
            assert!(Pin::new(&mut watched).poll_write(&mut cx, frame.as_bytes()).is_ready());
            assert!(Pin::new(&mut watched).poll_flush(&mut cx).is_pending());
            assert_eq!(watched.stream.buffer(), kept.as_bytes());
        }
        // Nobody has added to it.
        assert!(Pin::new(&mut watched).poll_flush(&mut cx).is_ready());
        let mut sent = [0; 11];
        server.read_exact(&mut sent).await.unwrap();
        assert_eq!(&sent, b"headbodyend");
        // The next request is gathered as the first was.
        assert!(Pin::new(&mut watched).poll_write(&mut cx, b"head").is_ready());
        assert!(Pin::new(&mut watched).poll_flush(&mut cx).is_pending());
    }
}
