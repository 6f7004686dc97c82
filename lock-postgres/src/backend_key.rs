//! The process number that the server names when a session begins (`BackendKeyData`).
//!
//! It is there for cancel requests. A pooler invents one of its own, since it has to find the client by it; so a number
//! that is not the one of `pg_backend_pid()` shows a pooler, in whichever mode and however its sessions alternate.

use std::future::{Ready, ready};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf, duplex};
use tokio_postgres::CancelToken;
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};

const CANCEL: i32 = 80_877_102;
const ENCRYPT: i32 = 80_877_103;

/// The number in the key, or `None` if the server gave no key.
///
/// The driver keeps it to itself, and shows it only in the cancel request: so it writes one, which is read here and goes
/// nowhere.
pub(crate) async fn process_of(token: &CancelToken) -> Option<i32> {
    let (mut reader, writer) = duplex(64);
    let sending = token.cancel_query_raw(Plain(writer), Plainly);
    let (_, pid) = tokio::join!(sending, async move { read(&mut reader).await.ok() });
    pid.filter(|&pid| pid != 0)
}

async fn read(stream: &mut DuplexStream) -> io::Result<i32> {
    loop {
        let _length = stream.read_i32().await?;
        match stream.read_i32().await? {
            ENCRYPT => stream.write_all(b"S").await?,
            CANCEL => return stream.read_i32().await,
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Stands for an encrypted stream, since the request is written as the configuration wants it.
struct Plainly;

struct Plain(DuplexStream);

impl TlsConnect<Plain> for Plainly {
    type Stream = Plain;
    type Error = io::Error;
    type Future = Ready<io::Result<Plain>>;

    fn connect(self, stream: Plain) -> Self::Future {
        ready(Ok(stream))
    }
}

impl TlsStream for Plain {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl AsyncRead for Plain {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Plain {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
