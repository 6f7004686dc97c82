//! The messages of the Redis protocol in a stream of bytes.

use bytes::BytesMut;
use lock_redis::redis::{Value, ValueCodec, from_redis_value};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio_util::codec::Decoder;

/// The messages that arrive on one direction of a connection.
pub(crate) struct Frames<R> {
    stream: R,
    codec: ValueCodec,
    /// What the codec has not taken yet, the end of `bytes`.
    rest: BytesMut,
    bytes: Vec<u8>,
}

/// A message, and the bytes that it is.
pub(crate) struct Frame {
    pub(crate) value: Value,
    pub(crate) bytes: Vec<u8>,
}

impl<R: AsyncRead + Unpin> Frames<R> {
    pub(crate) fn new(stream: R) -> Self {
        Self {
            stream,
            codec: ValueCodec::default(),
            rest: BytesMut::new(),
            bytes: Vec::new(),
        }
    }

    /// The next message; none at the end of the stream. Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Option<Frame> {
        loop {
            if let Some(value) = self.codec.decode(&mut self.rest).unwrap() {
                let after = self.bytes.split_off(self.bytes.len() - self.rest.len());
                let bytes = std::mem::replace(&mut self.bytes, after);
                return Some(Frame { value, bytes });
            }
            let known = self.rest.len();
            match self.stream.read_buf(&mut self.rest).await {
                Ok(0) | Err(_) => return None,
                Ok(_) => self.bytes.extend_from_slice(&self.rest[known..]),
            }
        }
    }
}

/// What is written in a value.
pub(crate) fn text(value: &Value) -> String {
    from_redis_value(value.clone()).unwrap_or_else(|_| panic!("not a text: {value:?}"))
}

/// The values in an array; none if it is something else.
pub(crate) fn fields(value: &Value) -> Option<&[Value]> {
    match value {
        Value::Array(fields) => Some(fields),
        _ => None,
    }
}
