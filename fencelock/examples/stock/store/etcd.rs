//! The store in an etcd cluster: keys under one prefix, written in one transaction.

use std::time::Duration;

use async_trait::async_trait;
use fencelock::FencingToken;
use fencelock::etcd::etcd_client::{
    Client, Compare, CompareOp, ConnectOptions, DeleteOptions, GetOptions, KeyValue, PutOptions, Txn, TxnOp,
};
use fencelock::etcd::fence::{self, FenceError};
use percent_encoding::percent_decode_str;

use super::{Books, Sale, Store, StoreError};
use crate::Outcome;

/// How long the store may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) struct Etcd {
    client: Client,
    // All keys begin with it.
    act: String,
}

impl Etcd {
    pub(crate) async fn connect(url: &str, run: &str, act: usize) -> Outcome<Self> {
        // What follows a question mark is for the locks.
        let (url, _) = url.split_once('?').unwrap_or((url, ""));
        let (_, cluster) = url.split_once("://").ok_or("the address names no host")?;
        let (login, members) = cluster.rsplit_once('@').unwrap_or(("", cluster));
        let mut options = ConnectOptions::new()
            .with_connect_timeout(PATIENCE)
            .with_timeout(PATIENCE);
        if let Some((user, password)) = login.split_once(':') {
            let [user, password] = [user, password].map(|part| percent_decode_str(part).decode_utf8_lossy());
            options = options.with_user(user, password);
        }
        let members: Vec<_> = members.trim_end_matches('/').split(',').map(with_port).collect();
        Ok(Self {
            client: Client::connect(members, Some(options)).await?,
            act: format!("stock:{run}:{act}:"),
        })
    }

    fn key(&self, kind: &str) -> String {
        format!("{}{kind}", self.act)
    }

    async fn get(&self, key: String, options: Option<GetOptions>) -> Outcome<Vec<KeyValue>> {
        Ok(self.client.kv_client().get(key, options).await?.take_kvs())
    }
}

#[async_trait]
impl Store for Etcd {
    async fn open(&self, stock: u32) -> Outcome<()> {
        self.client
            .kv_client()
            .put(self.key("left"), stock.to_string(), None)
            .await?;
        Ok(())
    }

    async fn admit(&self, token: FencingToken) -> Result<(), StoreError> {
        fence::admit(&self.client, &self.key("books"), token)
            .await
            .map_err(refusal)
    }

    async fn left(&self) -> Outcome<u32> {
        let found = self.get(self.key("left"), None).await?;
        Ok(found.first().ok_or("the books are gone")?.value_str()?.parse()?)
    }

    async fn sell(&self, sale: &Sale, fenced: bool) -> Result<(), StoreError> {
        let note = format!("{} {}", sale.left, sale.token.map_or(0, FencingToken::get));
        let write = [
            TxnOp::put(self.key("left"), sale.left.to_string(), None),
            TxnOp::put(self.key(&format!("sale:{}", sale.buyer)), note, None),
        ];
        match sale.token {
            Some(token) if fenced => {
                fence::write(&self.client, &self.key("books"), token, write)
                    .await
                    .map_err(refusal)?;
            }
            _ => {
                self.client.kv_client().txn(Txn::new().and_then(write)).await?;
            }
        }
        Ok(())
    }

    async fn books(&self) -> Outcome<Books> {
        let prefix = self.key("sale:");
        let mut sales = Vec::new();
        for noted in self.get(prefix.clone(), Some(GetOptions::new().with_prefix())).await? {
            let buyer = noted.key_str()?.strip_prefix(&prefix);
            let (left, token) = noted
                .value_str()?
                .split_once(' ')
                .ok_or("a sale was noted in another way")?;
            sales.push(Sale {
                buyer: buyer.unwrap_or_default().parse()?,
                left: left.parse()?,
                token: FencingToken::new(token.parse()?).ok(),
            });
        }
        Ok(Books {
            left: self.left().await?,
            sales,
        })
    }

    async fn put_up_sign(&self, ttl: Option<Duration>) -> Outcome<bool> {
        let key = self.key("sign");
        // Seconds are the least that etcd knows, and a lease is too dear to make one at each look.
        if !self.get(key.clone(), None).await?.is_empty() {
            return Ok(false);
        }
        let mut put = PutOptions::new();
        let mut leases = self.client.lease_client();
        let mut lease = None;
        if let Some(ttl) = ttl {
            let granted = leases.grant(ttl.as_millis().div_ceil(1000) as i64, None).await?.id();
            put = put.with_lease(granted);
            lease = Some(granted);
        }
        let absent = Compare::version(key.clone(), CompareOp::Equal, 0);
        let put = Txn::new().when([absent]).and_then([TxnOp::put(key, "1", Some(put))]);
        let taken = self.client.kv_client().txn(put).await?.succeeded();
        if let (false, Some(lease)) = (taken, lease) {
            leases.revoke(lease).await?;
        }
        Ok(taken)
    }

    async fn take_down_sign(&self) -> Outcome<()> {
        self.client.kv_client().delete(self.key("sign"), None).await?;
        Ok(())
    }

    async fn clear(&self) -> Outcome<()> {
        let all = DeleteOptions::new().with_prefix();
        self.client.kv_client().delete(&*self.act, Some(all)).await?;
        Ok(())
    }
}

fn with_port(member: &str) -> String {
    if member
        .rsplit_once(':')
        .is_some_and(|(_, port)| port.parse::<u16>().is_ok())
    {
        member.to_owned()
    } else {
        format!("{member}:2379")
    }
}

fn refusal(error: FenceError) -> StoreError {
    match error {
        FenceError::Stale(stale) => StoreError::Stale(stale),
        error => error.into(),
    }
}
