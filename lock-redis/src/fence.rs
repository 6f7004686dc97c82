//! The resource's side for data in Redis: what refuses a stale holder.
//!
//! The data may lie on any Redis server of yours, whichever backend the lock itself is on. The rule is that of
//! [`lock_core::fence`]. The mark of a resource is kept in a key of its own, [`mark_key`], and must be restored together with
//! the data that it protects.
//!
//! ```no_run
//! use lock_core::FencingToken;
//! use lock_redis::{fence, redis};
//!
//! # async fn example(mut con: redis::aio::MultiplexedConnection, token: FencingToken) -> Result<(), fence::FenceError> {
//! // Before reading what the write depends on:
//! fence::admit(&mut con, "stock/10000", token).await?;
//! let left: i64 = redis::cmd("GET").arg("stock/10000").query_async(&mut con).await?;
//! // Checked again, and written, in one step:
//! let write = redis::cmd("SET").arg("stock/10000").arg(left - 1).clone();
//! let _: () = fence::write(&mut con, "stock/10000", token, &write).await?;
//! # Ok(()) }
//! ```
//!
//! Holders of a [shared](lock_core::LockRequest::shared) lock are admitted by [`admit_shared`], which keeps a mark of its own: they do not refuse
//! each other, a writer refuses older readers, and a reader refuses older writers.
//!
//! With another driver, run [`ADMIT_LUA`] with `EVAL`.

use std::sync::LazyLock;

use lock_core::FencingToken;
use lock_core::fence::StaleToken;
use redis::aio::ConnectionLike;
use redis::{Arg, Cmd, ErrorKind, FromRedisValue, RedisError, Script, ServerErrorKind, Value};

/// The script that checks and writes. `KEYS[1]` is the [`mark_key`], `ARGV[1]` the token, with an `s` before it if its holder shares the lock,
/// and what follows is the command to carry out if the token is not stale, word by word; none merely admits the token.
///
/// It answers `["admitted", REPLY]` or `["stale", MARK]`. Raising the mark and the command are one step. If the command
/// fails the mark stays raised. In a Redis Cluster, mark and data must share a hash slot.
pub const ADMIT_LUA: &str = include_str!("scripts/fence.lua");

/// Why a holder was not admitted, or its command not carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FenceError {
    /// A later holder has been here. Stop, and lock again.
    #[error(transparent)]
    Stale(#[from] StaleToken),
    /// Redis or the command failed. Whether the holder is stale, or the command was carried out, is not known unless the
    /// error says so.
    #[error(transparent)]
    Redis(#[from] RedisError),
    /// The mark is not a token: somebody else wrote to its key.
    #[error("the mark of {resource} is not a fencing token; remove or repair its key")]
    Mark {
        /// Whose mark it is.
        resource: String,
    },
}

/// The key that holds the mark of a resource, and behind a blank the mark of those that share the lock, if that is higher. It never expires by
/// itself.
#[must_use]
pub fn mark_key(resource: &str) -> String {
    format!("{resource}:fence")
}

/// Raises the mark of `resource` to `token`, so that no older holder can write from now on. Call it before reading what a
/// later [`write()`] depends on.
///
/// # Errors
///
/// [`FenceError::Stale`] if a later holder has been here.
///
/// # Cancellation
///
/// The mark may have been raised, which harms no holder that is still to write.
pub async fn admit(con: &mut impl ConnectionLike, resource: &str, token: FencingToken) -> Result<(), FenceError> {
    guarded(con, resource, &token.to_string(), token, None).await.map(drop)
}

/// As [`admit`], for a holder that shares the lock: refused below the mark of those that write, and refuses older ones of them.
///
/// # Errors
///
/// As [`admit`].
///
/// # Cancellation
///
/// As [`admit`].
pub async fn admit_shared(
    con: &mut impl ConnectionLike,
    resource: &str,
    token: FencingToken,
) -> Result<(), FenceError> {
    let offered = format!("s{token}");
    guarded(con, resource, &offered, token, None).await.map(drop)
}

/// Admits `token` and carries out `command`, in one step that nothing comes between.
///
/// The command's answer goes through Lua: whole numbers beyond 2<sup>53</sup> lose digits.
///
/// # Errors
///
/// [`FenceError::Stale`] if a later holder has been here; the command is not carried out then. [`FenceError::Redis`] if
/// the command failed.
///
/// # Cancellation
///
/// The command may have been carried out.
pub async fn write<T: FromRedisValue>(
    con: &mut impl ConnectionLike,
    resource: &str,
    token: FencingToken,
    command: &Cmd,
) -> Result<T, FenceError> {
    let reply = guarded(con, resource, &token.to_string(), token, Some(command)).await?;
    Ok(redis::from_redis_value(reply).map_err(RedisError::from)?)
}

/// The highest token that `resource` has admitted of holders that do not share the lock.
///
/// # Errors
///
/// [`FenceError::Redis`] if Redis failed.
pub async fn mark(con: &mut impl ConnectionLike, resource: &str) -> Result<Option<FencingToken>, FenceError> {
    let mark: Option<String> = redis::cmd("GET").arg(mark_key(resource)).query_async(con).await?;
    // Without such a holder it is 0.
    let mark = mark.as_deref().map(|marks| marks.split(' ').next().unwrap_or(marks));
    mark.filter(|mark| *mark != "0")
        .map(str::parse)
        .transpose()
        .map_err(|_| not_a_token(resource))
}

async fn guarded(
    con: &mut impl ConnectionLike,
    resource: &str,
    offered: &str,
    token: FencingToken,
    command: Option<&Cmd>,
) -> Result<Value, FenceError> {
    static HASH: LazyLock<String> = LazyLock::new(|| Script::new(ADMIT_LUA).get_hash().to_owned());
    let call = |how: &str, script: &str| {
        let mut call = redis::cmd(how);
        call.arg(script).arg(1).arg(mark_key(resource)).arg(offered);
        for argument in command.into_iter().flat_map(Cmd::args_iter) {
            match argument {
                Arg::Simple(bytes) => call.arg(bytes),
                // The place of a cursor, which only iterators over scans have.
                _ => call.arg(0),
            };
        }
        call
    };
    let mut answer: Result<(String, Value), RedisError> = call("EVALSHA", &HASH).query_async(con).await;
    if let Err(error) = &answer
        && error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
    {
        answer = call("EVAL", ADMIT_LUA).query_async(con).await;
    }
    match answer {
        Ok((word, reply)) if word == "admitted" => Ok(reply),
        Ok((_, mark)) => {
            let mark = redis::from_redis_value::<String>(mark).ok();
            let mark = mark.and_then(|mark| mark.parse().ok());
            Err(mark.map_or_else(
                || not_a_token(resource),
                |mark| StaleToken::new(resource, token, mark).into(),
            ))
        }
        Err(error) if error.to_string().contains("fencelock: foreign value") => Err(not_a_token(resource)),
        Err(error) => Err(error.into()),
    }
}

fn not_a_token(resource: &str) -> FenceError {
    FenceError::Mark {
        resource: resource.to_owned(),
    }
}
