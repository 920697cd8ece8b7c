//! Buses that want more than a password: credentials, an nkey, TLS. Each has a
//! server of its own, whose keys and certificates are made here.

use crate::site;
use acri_bus::local::{Find, find};
use acri_tests::{eventually, site::Site, within};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use nkeys::KeyPair;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer};
use serde_json::{Value, json};
use std::{
    path::Path,
    process::{Output, Stdio},
};
use tokio::process::{Child, Command};

/// A nats-server with settings of its own.
struct Bus {
    _child: Child,
    port: u16,
}

impl Bus {
    /// Starts one; `settings` are added to what every bus of ACRI needs.
    async fn start(site: &Site, settings: &str) -> Self {
        let binary = find(&Find::from_env(), &|_| {}).await.expect("a nats-server");
        let home = site.directory().join("bus");
        std::fs::create_dir(&home).expect("a directory");
        let shown = home.display();
        let text = format!(
            "host: 127.0.0.1\nport: -1\nports_file_dir: \"{shown}\"\nlog_file: \"{shown}/log\"\nmax_payload: 2MB\n\
             jetstream {{ store_dir: \"{shown}\", max_file_store: 64GB }}\n{settings}\n"
        );
        std::fs::write(home.join("conf"), text).expect("a file");
        let mut command = Command::new(&binary.path);
        command.arg("-c").arg(home.join("conf")).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.kill_on_drop(true).spawn().expect("a nats-server");
        let ports = home.join(format!("nats-server_{}.ports", child.id().expect("a pid")));
        let port = eventually("the bus", || async { port_in(&ports) }).await;
        Self { _child: child, port }
    }
}

fn port_in(path: &Path) -> Option<u16> {
    let ports: Value = serde_json::from_str(&std::fs::read_to_string(path).ok()?).ok()?;
    ports["nats"][0].as_str()?.rsplit_once(':')?.1.parse().ok()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn written(site: &Site, name: &str, text: &str) -> String {
    let path = site.directory().join(name);
    std::fs::write(&path, text).expect("a file");
    path.into_os_string().into_string().expect("text")
}

async fn acri(site: &Site, options: &[&str], arguments: &[&str]) -> Output {
    let mut command = site.command();
    command.args(options).args(arguments).stdin(Stdio::null());
    within("the program to end", command.output()).await.expect("the program under test")
}

/// A node and a client with these options, and a run through both.
async fn works(site: &Site, url: &str, options: &[&str]) {
    let mut node = site.node_with("n1", url, options).await;
    let options = [&["--nats", url], options].concat();
    let output = acri(site, &options, &["run", "--", "echo", "hello"]).await;
    assert_eq!((text(&output.stdout).as_str(), output.status.code()), ("hello\n", Some(0)), "{}", text(&output.stderr));
    assert_eq!(node.drain().await.code(), Some(0), "{}", node.log());
}

/// That a client with these options is not let in, and ends with this status.
async fn refused(site: &Site, url: &str, options: &[&str], status: i32) -> String {
    let output = acri(site, &[&["--nats", url], options].concat(), &["ps"]).await;
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{options:?}: {said}");
    said
}

#[tokio::test]
async fn a_bus_that_wants_an_nkey_lets_in_who_has_its_seed() {
    let site = site().await;
    let (user, stranger) = (KeyPair::new_user(), KeyPair::new_user());
    let users = format!("authorization {{ users: [ {{ nkey: {} }} ] }}", user.public_key());
    let bus = Bus::start(&site, &users).await;
    let url = format!("nats://127.0.0.1:{}", bus.port);
    let seed = written(&site, "seed", &format!("{}\n", user.seed().unwrap()));
    let other = written(&site, "other", &stranger.seed().unwrap());
    works(&site, &url, &["--nkey", &seed]).await;
    refused(&site, &url, &[], 5).await;
    refused(&site, &url, &["--nkey", &other], 5).await;
    let said = refused(&site, &url, &["--nkey", "/no/such/seed"], 3).await;
    assert!(said.contains("/no/such/seed"), "{said}");
    let said = refused(&site, &url, &["--nkey", &written(&site, "no.seed", "no seed")], 3).await;
    assert!(said.contains("no.seed") && said.contains("nkey seed"), "{said}");
}

#[tokio::test]
async fn a_bus_without_tls_is_refused_by_who_names_an_authority() {
    let site = site().await;
    let ca = written(&site, "ca.pem", &Authority::new().certificate);
    let bus = Bus::start(&site, "").await;
    let url = format!("nats://127.0.0.1:{}", bus.port);
    works(&site, &url, &[]).await;
    refused(&site, &url, &["--tls-ca", &ca], 5).await;
}

/// A claim about `subject`, signed by `issuer`, as NATS writes it.
fn claim(issuer: &KeyPair, subject: &KeyPair, mut nats: Value) -> String {
    nats["version"] = 2.into();
    let claims = json!({
        "jti": uuid::Uuid::new_v4(), "iat": 1_700_000_000, "iss": issuer.public_key(), "name": "acri",
        "sub": subject.public_key(), "nats": nats,
    });
    let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let signed = format!("{}.{}", part(json!({ "typ": "JWT", "alg": "ed25519-nkey" })), part(claims));
    let signature = issuer.sign(signed.as_bytes()).unwrap();
    format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
}

fn credentials(account: &KeyPair, user: &KeyPair) -> String {
    let limits = json!({ "type": "user", "pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1 });
    format!(
        "-----BEGIN NATS USER JWT-----\n{}\n------END NATS USER JWT------\n\n\
         -----BEGIN USER NKEY SEED-----\n{}\n------END USER NKEY SEED------\n",
        claim(account, user, limits),
        user.seed().unwrap()
    )
}

#[tokio::test]
async fn a_bus_that_wants_credentials_is_found_by_what_up_leaves() {
    let site = site().await;
    let (operator, system, account) = (KeyPair::new_operator(), KeyPair::new_account(), KeyPair::new_account());
    let limits = json!({
        "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true, "conn": -1,
        "leaf": -1, "mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1,
    });
    let without = json!({
        "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true, "conn": -1, "leaf": -1,
    });
    let settings = format!(
        "operator: {}\nsystem_account: {}\nresolver: MEMORY\nresolver_preload: {{\n  {}: {}\n  {}: {}\n}}",
        claim(&operator, &operator, json!({ "type": "operator" })),
        system.public_key(),
        system.public_key(),
        claim(&operator, &system, json!({ "type": "account", "limits": without })),
        account.public_key(),
        claim(&operator, &account, json!({ "type": "account", "limits": limits })),
    );
    let bus = Bus::start(&site, &settings).await;
    let url = format!("nats://127.0.0.1:{}", bus.port);
    let creds = written(&site, "acri.creds", &credentials(&account, &KeyPair::new_user()));
    let forged = written(&site, "forged.creds", &credentials(&KeyPair::new_account(), &KeyPair::new_user()));
    works(&site, &url, &["--creds", &creds]).await;
    refused(&site, &url, &[], 5).await;
    refused(&site, &url, &["--creds", &forged], 5).await;

    let mut up = site.up(&["--nats", &url, "--creds", &creds]).await;
    let output = acri(&site, &[], &["run", "--", "echo", "again"]).await;
    assert_eq!(text(&output.stdout), "again\n", "{}", text(&output.stderr));
    assert_eq!(up.drain().await.code(), Some(0), "{}", up.log());
}

/// An authority, and what it has signed.
struct Authority {
    issuer: Issuer<'static, rcgen::KeyPair>,
    certificate: String,
}

impl Authority {
    fn new() -> Self {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), certificate }
    }

    /// Writes a certificate for these names and its key.
    fn sign(&self, site: &Site, file: &str, names: &[&str]) -> (String, String) {
        let key = rcgen::KeyPair::generate().unwrap();
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let certificate = CertificateParams::new(names).unwrap().signed_by(&key, &self.issuer).unwrap();
        let certificate = written(site, &format!("{file}.pem"), &certificate.pem());
        (certificate, written(site, &format!("{file}.key"), &key.serialize_pem()))
    }
}

#[tokio::test]
async fn a_bus_with_tls_is_believed_by_its_authority_and_wants_ours() {
    let site = site().await;
    let (authority, stranger) = (Authority::new(), Authority::new());
    let ca = written(&site, "ca.pem", &authority.certificate);
    let other_ca = written(&site, "other-ca.pem", &stranger.certificate);
    let (certificate, key) = authority.sign(&site, "server", &["localhost", "127.0.0.1"]);
    let (ours, our_key) = authority.sign(&site, "ours", &["acri"]);
    let (theirs, their_key) = stranger.sign(&site, "theirs", &["acri"]);
    let tls = format!(
        "tls {{ cert_file: \"{certificate}\", key_file: \"{key}\", ca_file: \"{ca}\", verify: true, timeout: 5 }}"
    );
    let bus = Bus::start(&site, &tls).await;
    let url = format!("tls://127.0.0.1:{}", bus.port);
    let identity = ["--tls-cert", ours.as_str(), "--tls-key", our_key.as_str()];
    works(&site, &url, &[&["--tls-ca", &ca], identity.as_slice()].concat()).await;
    // A server that an unknown authority has signed, and clients that it does not know.
    refused(&site, &url, &[&["--tls-ca", &other_ca], identity.as_slice()].concat(), 5).await;
    refused(&site, &url, &["--tls-ca", &ca], 5).await;
    refused(&site, &url, &["--tls-ca", &ca, "--tls-cert", &theirs, "--tls-key", &their_key], 5).await;
    let said = refused(&site, &url, &["--tls-ca", "/no/such/ca.pem"], 3).await;
    assert!(said.contains("/no/such/ca.pem"), "{said}");
}
