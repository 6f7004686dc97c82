//! TLS as every backend does it: which certificate is taken, and what is said of the others.

use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair, date_time_ymd};

use crate::world::{Done, HANG_LIMIT, World};

/// The address of each backend, with `PORT` for the port. A majority of Redlock's nodes decides, so three lead to the same server.
const BACKENDS: [&str; 6] = [
    "rediss://localhost:PORT?op_timeout=3s",
    "rediss+sentinel://localhost:PORT/service?op_timeout=3s",
    "rediss+cluster://localhost:PORT?op_timeout=3s",
    "redlocks://localhost:PORT,127.0.0.1:PORT,127.0.0.2:PORT?op_timeout=3s",
    "etcds://localhost:PORT?op_timeout=3s",
    "postgres://joe@localhost:PORT/shop?sslnegotiation=direct&op_timeout=3s",
];

const NAMES: [&str; 3] = ["localhost", "127.0.0.1", "127.0.0.2"];

/// A server of OpenSSL that talks TLS and nothing else, at the same port of two addresses. It ends when dropped.
struct Server(Vec<Child>, u16);

impl Server {
    fn start(folder: &Path, name: &str, more: &[&str]) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut server = Self(Vec::new(), listener.local_addr().unwrap().port());
        drop(listener);
        for host in ["127.0.0.1", "127.0.0.2"] {
            let accept = format!("{host}:{}", server.1);
            let (cert, key) = (format!("{name}.pem"), format!("{name}.key"));
            let mut command = Command::new("openssl");
            command.args(["s_server", "-4", "-rev", "-alpn", "h2,postgresql", "-accept", &accept]);
            command
                .args(["-cert", &cert, "-key", &key])
                .args(more)
                .current_dir(folder)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            server.0.push(command.spawn().unwrap());
            let began = Instant::now();
            while TcpStream::connect((host, server.1)).is_err() {
                assert!(began.elapsed() < HANG_LIMIT, "{name}");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        server
    }

    fn run(&self, world: &World, backend: &str, query: &str) -> Done {
        let url = format!("{}&{query}", backend.replace("PORT", &self.1.to_string()));
        world.run_at(&url, "run -n lock -- true")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn self_signed(folder: &Path, name: &str, hosts: &[&str], set: impl Fn(&mut CertificateParams)) {
    let hosts: Vec<_> = hosts.iter().map(|&host| host.to_owned()).collect();
    let mut params = CertificateParams::new(hosts).unwrap();
    set(&mut params);
    let key = KeyPair::generate().unwrap();
    let certificate = params.self_signed(&key).unwrap().pem();
    for (kind, text) in [("pem", certificate), ("key", key.serialize_pem())] {
        std::fs::write(folder.join(format!("{name}.{kind}")), text).unwrap();
    }
}

fn openssl(folder: &Path, arguments: &str) {
    let mut command = Command::new("openssl");
    let done = command.args(arguments.split(' ')).current_dir(folder).output().unwrap();
    assert!(done.status.success(), "{arguments}: {done:?}");
}

#[test]
fn each_certificate_has_its_exit_code_and_its_sentence_on_every_backend() {
    let world = World::new();
    let folder = world.dir();
    let authority = |params: &mut CertificateParams| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    self_signed(folder, "authority", &NAMES, authority);
    self_signed(folder, "nameless", &[], authority);
    self_signed(folder, "plain", &NAMES, |_| {});
    self_signed(folder, "elsewhere", &["elsewhere.example"], authority);
    self_signed(folder, "expired", &NAMES, |params| {
        (params.not_before, params.not_after) = (date_time_ymd(2001, 1, 1), date_time_ymd(2002, 1, 1));
    });
    let new = |more: &str| {
        let request = "req -nodes -subj /CN=localhost -newkey ec -pkeyopt ec_paramgen_curve";
        openssl(folder, &format!("{request}:{more}"));
    };
    new("P-256 -keyout v1.key -out v1.csr");
    openssl(folder, "x509 -req -in v1.csr -signkey v1.key -days 2 -out v1.pem");
    new("P-521 -x509 -days 2 -keyout p521.key -out p521.pem");
    let wants_clients = ["-Verify", "1", "-verify_return_error"];
    // The certificate of the server, the one in ca=, what else the server is told, and what is said; nothing if it is taken.
    let cases: [(&str, &str, &[&str], &str); 10] = [
        ("authority", "authority", &[], ""),
        ("nameless", "nameless", &[], ""),
        ("plain", "plain", &[], ""),
        ("authority", "plain", &[], "name this certificate itself with ca=FILE"),
        (
            "plain",
            "authority",
            &[],
            "name its authority, or itself if it signed itself, with ca=FILE",
        ),
        ("elsewhere", "elsewhere", &[], ", but for"),
        ("expired", "expired", &[], "has expired; renew it at the server"),
        ("v1", "v1", &[], "X.509 version 1"),
        ("p521", "p521", &[], "P-521"),
        ("plain", "plain", &wants_clients, "give one with cert=FILE and key=FILE"),
    ];
    let mut wrong = Vec::new();
    for (name, ca, more, says) in cases {
        let server = Server::start(folder, name, more);
        let ca = format!("ca={}", folder.join(format!("{ca}.pem")).display());
        for backend in BACKENDS {
            let done = server.run(&world, backend, &ca);
            let said = &done.stderr;
            let right = match says {
                // What the server says then is no protocol of a backend.
                "" => !said.contains("ertificate") && !said.contains("TLS with"),
                says => done.code == Some(78) && said.contains(says) && said.matches('\n').count() == 1,
            };
            let blames = says.contains("expired") || says.contains("but for");
            let untrue = blames && said.contains("ca=FILE")
                || said.contains("::")
                || said.contains("cert=FILE") != says.contains("cert=FILE");
            if !right || untrue {
                wrong.push(format!("{name} {backend}: {done:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}: {wrong:#?}", wrong.len());
}

#[test]
fn an_address_without_tls_says_so_and_blames_no_certificate() {
    let world = World::new();
    self_signed(world.dir(), "plain", &NAMES, |_| {});
    let server = Server::start(world.dir(), "plain", &[]);
    for backend in [
        "redis://localhost:PORT?op_timeout=3s",
        "etcd://localhost:PORT?op_timeout=3s",
    ] {
        let done = server.run(&world, backend, "namespace=n");
        let line = done.one_line(69);
        assert!(!line.contains("ertificate") && !line.contains("::"), "{line}");
    }
}
