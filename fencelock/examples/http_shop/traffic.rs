//! The clients: one connection and one request each.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::Outcome;
use crate::service::WAIT;

/// How long a client waits for its answer: for the lock, and for a server that is busy.
const LIMIT: Duration = WAIT.saturating_mul(2);

/// Requests under way.
pub(crate) struct Traffic {
    start: Instant,
    requests: JoinSet<Outcome<Reply>>,
}

struct Reply {
    buyer: u32,
    instance: usize,
    /// `None` if the connection failed.
    status: Option<StatusCode>,
    took: Duration,
}

impl Traffic {
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
            requests: JoinSet::new(),
        }
    }

    /// Starts the requests of these buyers, in turn at the instances: the number of each and its port.
    pub(crate) fn send(&mut self, buyers: impl Iterator<Item = u32>, instances: &[(usize, u16)]) {
        for (buyer, &(instance, port)) in buyers.zip(instances.iter().cycle()) {
            self.requests.spawn(async move {
                let start = Instant::now();
                let Ok(answer) = timeout(LIMIT, buy(port, buyer)).await else {
                    return Err(format!("the request of buyer {buyer} was not answered within {LIMIT:?}").into());
                };
                Ok(Reply {
                    buyer,
                    instance,
                    status: answer.ok(),
                    took: start.elapsed(),
                })
            });
        }
    }

    /// Waits for all answers.
    pub(crate) async fn finish(mut self) -> Outcome<Replies> {
        let mut replies = Vec::new();
        while let Some(reply) = self.requests.join_next().await {
            replies.push(reply??);
        }
        Ok(Replies {
            replies,
            took: self.start.elapsed(),
        })
    }
}

async fn buy(port: u16, buyer: u32) -> Outcome<StatusCode> {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // Ends with the request, which reports its errors.
    tokio::spawn(connection);
    let request = Request::post(format!("/purchases/{buyer}"))
        .header(header::HOST, format!("127.0.0.1:{port}"))
        .body(Body::empty())?;
    let answer = sender.send_request(request).await?;
    let status = answer.status();
    answer.into_body().collect().await?;
    Ok(status)
}

/// What the clients of an act saw.
pub(crate) struct Replies {
    replies: Vec<Reply>,
    took: Duration,
}

impl Replies {
    pub(crate) fn count(&self, status: StatusCode) -> usize {
        let statuses = self.replies.iter().filter_map(|reply| reply.status);
        statuses.filter(|&one| one == status).count()
    }

    /// The buyers whose requests were answered with 200.
    pub(crate) fn sold(&self) -> BTreeSet<u32> {
        let sold = self.replies.iter().filter(|reply| reply.status == Some(StatusCode::OK));
        sold.map(|reply| reply.buyer).collect()
    }

    /// The buyers whose connections failed, if their instance is one for which `at` is true.
    pub(crate) fn cut_off(&self, at: impl Fn(usize) -> bool) -> BTreeSet<u32> {
        let failed = self.replies.iter().filter(|reply| reply.status.is_none());
        failed
            .filter(|reply| at(reply.instance))
            .map(|reply| reply.buyer)
            .collect()
    }

    pub(crate) fn per_second(&self) -> f64 {
        self.answered().len() as f64 / self.took.as_secs_f64()
    }

    /// The time within which that share of the answers came.
    pub(crate) fn latency(&self, percent: usize) -> Duration {
        let answered = self.answered();
        let rank = (answered.len() * percent).div_ceil(100);
        answered.get(rank.saturating_sub(1)).copied().unwrap_or_default()
    }

    /// The times of all answers, the shortest first.
    fn answered(&self) -> Vec<Duration> {
        let answered = self.replies.iter().filter(|reply| reply.status.is_some());
        let mut times: Vec<_> = answered.map(|reply| reply.took).collect();
        times.sort_unstable();
        times
    }
}
