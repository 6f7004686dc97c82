//! Servers, sentinels, clusters and several servers that are reached by TLS.

use std::os::unix::fs::PermissionsExt as _;

use lock_core::{DistributedLock, Locks, Released};
use lock_redis::RedisLock;
use rcgen::{CertificateParams, KeyPair};
use tempfile::TempDir;

use test_servers::free_port;

use crate::refusals::are_refused;
use crate::server::{
    Ask, HANG_LIMIT, Kind, LONG, RedisCluster, RedisSentinels, Server, busy, claim, granted, start_sentinel,
    start_with, until, waiting,
};

const SERVICE: &str = RedisSentinels::SERVICE;

/// A certificate for these names, which is its own authority, with its key, in files.
struct Certificate(TempDir);

impl Certificate {
    fn new(names: &[&str]) -> Self {
        // Servers run as another user if the tests run as root.
        let readable = std::fs::Permissions::from_mode(0o755);
        let folder = tempfile::Builder::new().permissions(readable).tempdir().unwrap();
        let params = CertificateParams::new(names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>()).unwrap();
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        std::fs::write(folder.path().join("cert.pem"), certificate.pem()).unwrap();
        std::fs::write(folder.path().join("key.pem"), key.serialize_pem()).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    /// What lets a server talk by TLS at that port, too, and to others by TLS alone.
    fn settings(&self, port: u16) -> Vec<[String; 2]> {
        let [cert, key] = ["cert.pem", "key.pem"].map(|name| self.path(name));
        let settings = [
            ["tls-port", &port.to_string()],
            ["tls-cert-file", &cert],
            ["tls-key-file", &key],
            ["tls-ca-cert-file", &cert],
            ["tls-auth-clients", "no"],
            ["tls-replication", "yes"],
        ];
        settings.map(|setting| setting.map(str::to_owned)).to_vec()
    }

    /// A server with this certificate and further arguments, and its port for TLS.
    async fn server(&self, further: &[&str]) -> (Server, u16) {
        let port = free_port().unwrap();
        let settings: Vec<_> = self
            .settings(port)
            .into_iter()
            .flat_map(|[name, value]| [format!("--{name}"), value])
            .collect();
        let settings: Vec<_> = settings.iter().map(String::as_str).collect();
        (start_with(&[&settings, further].concat()).await, port)
    }
}

#[tokio::test]
async fn a_server_is_talked_to_by_tls_if_its_certificate_is_trusted() {
    let certificate = Certificate::new(&["localhost"]);
    let (server, port) = certificate.server(&[]).await;
    let (ca, plain, none, empty) = (
        certificate.path("cert.pem"),
        server.port(),
        certificate.path("none"),
        certificate.path("empty"),
    );
    let lock = RedisLock::connect(format!("rediss://localhost:{port}?ca={ca}"))
        .await
        .unwrap();
    granted(&lock, &claim("n", LONG)).await;
    busy(&server.client().await, &claim("n", LONG)).await;
    std::fs::write(&empty, "").unwrap();
    are_refused([
        (format!("rediss://localhost:{port}"), "ca=FILE"),
        (
            format!("rediss://127.0.0.1:{port}?ca={ca}"),
            "is not for the host 127.0.0.1, but for",
        ),
        (
            format!("rediss://localhost:{plain}?ca={ca}&op_timeout=1s"),
            ": instead of rediss:",
        ),
        (format!("redis://localhost:{port}"), ": by a rediss address"),
        (format!("rediss://localhost:{port}?ca={none}"), "none"),
        (format!("rediss://localhost:{port}?ca={empty}"), "no certificate"),
    ])
    .await;
}

#[tokio::test]
async fn a_server_that_wants_certificates_of_clients_gets_one_and_ends_waits_without_any() {
    let certificate = Certificate::new(&["localhost"]);
    let (server, port) = certificate.server(&[]).await;
    let (ca, key) = (certificate.path("cert.pem"), certificate.path("key.pem"));
    let url = format!("rediss://localhost:{port}?ca={ca}");
    let locks = Locks::new(RedisLock::connect(&url).await.unwrap());
    let _held = Locks::new(server.client().await).lock("n").await.unwrap();
    let waiting = tokio::spawn(locks.lock("n").into_future());
    server.until_queued("n", 1).await;
    let _: String = server.command("CONFIG SET tls-auth-clients yes").await;
    let with_one = format!("{url}&cert={ca}&key={key}");
    granted(&RedisLock::connect(&with_one).await.unwrap(), &claim("m", LONG)).await;
    let stranger = Certificate::new(&["localhost"]);
    let [cert, key] = ["cert.pem", "key.pem"].map(|name| stranger.path(name));
    are_refused([
        (url.clone(), "give one with cert=FILE and key=FILE|tls-auth-clients"),
        (
            format!("{url}&cert={cert}&key={key}"),
            "refused the client's certificate",
        ),
    ])
    .await;
    // Only a person can mend it, so a wait without a limit ends.
    for kind in ["normal", "pubsub"] {
        let _: u32 = server.command(&format!("CLIENT KILL TYPE {kind}")).await;
    }
    let ended = tokio::time::timeout(HANG_LIMIT, waiting).await.expect("the wait ends");
    let error = ended.unwrap().unwrap_err();
    assert!(error.to_string().contains("cert=FILE and key=FILE"), "{error:?}");
}

#[tokio::test]
async fn sentinels_and_servers_are_talked_to_by_tls_also_after_a_failover() {
    let certificate = Certificate::new(&["localhost", "127.0.0.1"]);
    let (_primary, first) = certificate.server(&["--repl-diskless-sync-delay", "0"]).await;
    let (replica, second) = certificate
        .server(&["--replicaof", "127.0.0.1", &first.to_string()])
        .await;
    replica.until_info("replication", "master_link_status:up").await;
    let port = free_port().unwrap();
    let settings = certificate
        .settings(port)
        .into_iter()
        .map(|[name, value]| format!("{name} {value}"));
    let lines: Vec<_> = settings
        .chain([format!("sentinel monitor {SERVICE} 127.0.0.1 {first} 1")])
        .collect();
    let sentinel = start_sentinel(&lines.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let ca = certificate.path("cert.pem");
    let lock = RedisLock::connect(format!("rediss+sentinel://localhost:{port}/{SERVICE}?ca={ca}"))
        .await
        .unwrap();
    let grant = granted(&lock, &claim("n", LONG)).await;
    replica.until_locked("n", true).await;
    // It may not know yet that the replica is good.
    let order = format!("SENTINEL FAILOVER {SERVICE}");
    until("a failover begins", async || sentinel.redis(&order).await.is_ok()).await;
    let question = format!("SENTINEL GET-MASTER-ADDR-BY-NAME {SERVICE}");
    until("the sentinel names the replica", async || {
        sentinel.redis(&question).await.unwrap().ends_with(&second.to_string())
    })
    .await;
    until("the lock is renewed", async || lock.renew(&grant.lease).await.is_ok()).await;
    assert_eq!(lock.release(&grant.claim, None).await.unwrap(), Released::Released);
    replica.until_locked("n", false).await;
    are_refused([
        (format!("rediss+sentinel://localhost:{port}/{SERVICE}"), "ca=FILE"),
        (
            format!("redis+sentinel://localhost:{port}/{SERVICE}?op_timeout=2s"),
            ": rediss",
        ),
    ])
    .await;
}

#[tokio::test]
async fn all_nodes_of_a_cluster_are_reached_by_tls_under_the_names_that_they_announce() {
    let certificate = Certificate::new(&["localhost"]);
    let announced = [
        ["--tls-cluster", "yes"],
        ["--cluster-announce-hostname", "localhost"],
        ["--cluster-preferred-endpoint-type", "hostname"],
    ];
    // Each node has a port of its own.
    let settings: Vec<_> = certificate.settings(0)[1..]
        .iter()
        .flat_map(|[name, value]| [format!("--{name}"), value.clone()])
        .collect();
    let arguments: Vec<_> = announced
        .concat()
        .into_iter()
        .chain(settings.iter().map(String::as_str))
        .collect();
    let cluster = RedisCluster::start(&Kind::LOCAL_REDIS, 3, &arguments).await.unwrap();
    let (port, ca) = (cluster.tls_port(0), certificate.path("cert.pem"));
    let address = format!("rediss+cluster://localhost:{port}?ca={ca}");
    let (one, other) = (
        RedisLock::connect(&address).await.unwrap(),
        RedisLock::connect(&address).await.unwrap(),
    );
    for number in 0..10 {
        let text = number.to_string();
        let held = granted(&one, &claim(&text, LONG)).await;
        let wait = waiting(&other, &claim(&text, LONG));
        let (_, node) = cluster.place(&format!("{{fencelock:{text}}}:lock")).await.unwrap();
        cluster.nodes()[node].until_queued(&text, 1).await;
        assert_eq!(one.release(&held.claim, None).await.unwrap(), Released::Released);
        assert!(wait.await.unwrap().token > held.token);
    }
    are_refused([(format!("rediss+cluster://localhost:{port}"), "ca=FILE")]).await;
}

#[tokio::test]
async fn several_servers_are_talked_to_by_tls_each_with_a_certificate_of_its_own() {
    let certificates = [(); 3].map(|()| Certificate::new(&["localhost"]));
    let [(_a, a), (_b, b), (_c, c)] = [
        certificates[0].server(&[]).await,
        certificates[1].server(&["--requirepass", "two"]).await,
        certificates[2].server(&[]).await,
    ];
    let [ca, ca2, ca3] = [0, 1, 2].map(|node| certificates[node].path("cert.pem"));
    let (hosts, password) = (
        format!("localhost:{a},localhost:{b},localhost:{c}"),
        "node2.password=two",
    );
    let url = format!("redlocks://{hosts}?ca={ca}&node2.ca={ca2}&node3.ca={ca3}&{password}");
    granted(&RedisLock::connect(&url).await.unwrap(), &claim("n", LONG / 10)).await;
    // One node whose certificate is not trusted is named, although the others would do.
    are_refused([
        (
            format!("redlocks://{hosts}?ca={ca}&node2.ca={ca2}&{password}"),
            &format!("is of no authority that is trusted|localhost:{c}"),
        ),
        (
            format!("redlock://{hosts}?{password}"),
            ": by a rediss address (redlocks",
        ),
    ])
    .await;
}
