//! The socket under a connection.

use std::future::{Future, ready};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{self, Context, Poll};
use std::time::Duration;

use hyper::rt::Executor;
use hyper_util::rt::TokioIo;
use lock_core::{LockError, Source};
use lock_transport::{Endpoint as Host, tcp};
use tokio::io::{AsyncRead, AsyncWrite, BufWriter, ReadBuf};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Uri};

use crate::failure::Failure;
use crate::session::Settings;

/// Whatever carries the bytes.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

#[cfg(feature = "tls")]
const PEER: lock_transport::tls::Peer = lock_transport::tls::Peer {
    product: "etcd",
    plain: "use etcd: instead of etcds:, or its TLS port",
    client_auth: "",
};

/// A channel over one TCP connection, which is never made a second time: a request on it can reach no other state of the
/// server than the requests before it.
///
/// `broken` is told when the connection ends, and ends it when it is told. Must be called on `runtime`.
pub(crate) async fn connect(
    settings: &Settings,
    host: &Host,
    broken: CancellationToken,
    runtime: Handle,
) -> Result<Channel, Failure> {
    let op_timeout = settings.op_timeout;
    let tcp = tcp::connect(host, op_timeout).await.map_err(|error| {
        LockError::unavailable("connecting", format!("etcd cannot be reached at {host}")).with_source(error)
    })?;
    let stream: Box<dyn Stream> = match &settings.tls {
        #[cfg(feature = "tls")]
        Some(files) => Box::new(lock_transport::tls::connect(tcp, host, files, &[b"h2"], &PEER, op_timeout).await?),
        _ => Box::new(tcp),
    };
    let unusable = |e| LockError::configuration("a host in the address of etcd cannot be used").with_source(e);
    let scheme = if settings.tls.is_some() { "https" } else { "http" };
    // The stream is encrypted already; requests name the scheme that the server is reached by.
    let origin = Uri::try_from(format!("{scheme}://{host}")).map_err(|e| unusable(e.into()))?;
    let endpoint =
        tonic::transport::Endpoint::from_shared(format!("http://{host}")).map_err(|e| unusable(Source::from(e)))?;
    let endpoint = endpoint
        .origin(origin)
        .http2_keep_alive_interval(HEARTBEAT)
        .keep_alive_timeout(op_timeout)
        .keep_alive_while_idle(true);
    let driver = Driver {
        runtime,
        broken: broken.clone(),
    };
    let stream = Arc::new(Mutex::new(Some(Watched {
        stream: BufWriter::with_capacity(ROOM, stream),
        kept: 0,
        turns: 0,
        broken,
    })));
    let connector = tower::service_fn(move |_: Uri| {
        let stream = stream.lock().unwrap_or_else(PoisonError::into_inner).take();
        ready(
            stream
                .map(TokioIo::new)
                .ok_or(io::Error::from(io::ErrorKind::BrokenPipe)),
        )
    });
    let connected = endpoint.executor(driver).connect_with_connector(connector).await;
    connected.map_err(|error| {
        LockError::unavailable("connecting", format!("etcd cannot be reached at {host}"))
            .with_source(error)
            .into()
    })
}

/// How often a connection on which nothing happens is tried. Members do not suffer more than one trial every five seconds.
const HEARTBEAT: Duration = Duration::from_secs(10);

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
    stream: BufWriter<Box<dyn Stream>>,
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
        let outcome = task::ready!(Pin::new(&mut self.stream).poll_read(cx, buffer));
        if room && buffer.filled().len() == before {
            self.broken.cancel();
        }
        Poll::Ready(self.told(outcome))
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = task::ready!(Pin::new(&mut self.stream).poll_write(cx, bytes));
        Poll::Ready(self.told(outcome))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let kept = self.stream.buffer().len();
        if kept > self.kept && self.turns < FRAMES {
            (self.kept, self.turns) = (kept, self.turns + 1);
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let outcome = task::ready!(Pin::new(&mut self.stream).poll_flush(cx));
        (self.kept, self.turns) = (0, 0);
        Poll::Ready(self.told(outcome))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = task::ready!(Pin::new(&mut self.stream).poll_shutdown(cx));
        Poll::Ready(self.told(outcome))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = task::ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, bytes));
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
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    #[tokio::test]
    async fn what_is_written_while_others_have_their_turn_is_sent_as_one() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        let mut watched = Watched {
            stream: BufWriter::with_capacity(ROOM, Box::new(stream)),
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
