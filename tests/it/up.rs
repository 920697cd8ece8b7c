//! `acri up`: a bus and a node for one machine.

use crate::site;
use acri_tests::{
    eventually, look, process,
    raw::Raw,
    site::{SHORT_LEASE, Site},
    within,
};
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use serde_json::{Value, json};
use std::{
    os::unix::fs::PermissionsExt,
    process::{Output, Stdio},
};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Another verb, which finds the bus by the context file alone.
async fn acri(site: &Site, arguments: &[&str]) -> Output {
    let output = within("the program to end", site.command().args(arguments).stdin(Stdio::null()).output()).await;
    output.expect("the program under test")
}

/// Starts a run that says `up` and goes on; tells `AGENT/RUN`.
async fn detached(site: &Site, script: &str) -> String {
    let mark = format!("{}={}", acri_tests::site::MARK, site.mark());
    let output = acri(site, &["run", "-d", "--fresh", "-e", &mark, "--", "sh", "-c", script]).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    let run = text(&output.stdout).trim().to_owned();
    eventually("its first word", || async {
        text(&acri(site, &["logs", &run]).await.stdout).contains("up").then_some(())
    })
    .await;
    run
}

/// The process of the server that `up` started.
fn server_of(site: &Site) -> i32 {
    i32::try_from(note_of(site)["pid"].as_i64().expect("a pid")).expect("a pid")
}

/// What is noted of that server.
fn note_of(site: &Site) -> Value {
    let note = std::fs::read_to_string(site.state_dir("acri").join("nats/server.json")).expect("the server's note");
    serde_json::from_str(&note).expect("JSON")
}

/// Processes of this shell script.
fn harnesses(site: &Site, script: &str) -> Vec<i32> {
    let ours = site.processes();
    process::with_argument(script).into_iter().filter(|pid| ours.contains(pid)).collect()
}

#[tokio::test]
async fn the_other_verbs_find_what_is_up_and_ctrl_c_stops_what_runs() {
    let site = site().await;
    let mut up = site.up(&[]).await;
    let server = server_of(&site);
    let output = acri(&site, &["run", "--", "echo", "hello"]).await;
    assert_eq!((text(&output.stdout).as_str(), output.status.code()), ("hello\n", Some(0)));
    let run = detached(&site, "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.02; done").await;
    assert_eq!(up.drain().await.code(), Some(0), "{}", up.log());
    assert!(!process::lives(server), "its server ends with it");
    let output = acri(&site, &["ps"]).await;
    assert_eq!(output.status.code(), Some(5), "nothing is up: {}", text(&output.stderr));
    let mut up = site.up(&[]).await;
    assert_eq!(text(&acri(&site, &["logs", &run]).await.stdout), "up\nsaved\n");
    assert_eq!(up.drain().await.code(), Some(0), "{}", up.log());
}

#[tokio::test]
async fn a_server_that_dies_is_started_again_and_what_runs_goes_on() {
    let site = site().await;
    let mut up = site.up(&[]).await;
    let run = detached(&site, "echo up; while [ ! -e go ]; do sleep 0.02; done; echo done").await;
    let first = server_of(&site);
    process::kill(first);
    up.says("nats-server has ended").await;
    up.says("nats-server was started again").await;
    let output = acri(&site, &["run", "--", "echo", "hello"]).await;
    assert_eq!((text(&output.stdout).as_str(), output.status.code()), ("hello\n", Some(0)), "{}", text(&output.stderr));
    assert_ne!(server_of(&site), first);
    let inspected: Value =
        serde_json::from_slice(&acri(&site, &["inspect", "-o", "json", &run]).await.stdout).expect("JSON");
    let work = find(&inspected, "working_directory").expect("a working directory");
    std::fs::write(format!("{work}/go"), "").expect("a file");
    assert_eq!(acri(&site, &["wait", &run]).await.status.code(), Some(0));
    assert_eq!(text(&acri(&site, &["logs", "-f", &run]).await.stdout), "up\ndone\n");
    assert_eq!(up.drain().await.code(), Some(0), "{}", up.log());
}

fn find<'a>(value: &'a Value, name: &str) -> Option<&'a str> {
    match value {
        Value::Object(fields) => {
            fields.get(name).and_then(Value::as_str).or_else(|| fields.values().find_map(|field| find(field, name)))
        }
        Value::Array(items) => items.iter().find_map(|item| find(item, name)),
        _ => None,
    }
}

#[tokio::test]
async fn a_server_that_cannot_be_kept_running_ends_up_loudly_and_what_runs_lives() {
    let site = site().await;
    let mut up = site.up(&[]).await;
    let script = "echo up; while :; do sleep 0.02; done";
    detached(&site, script).await;
    // A store that no server can use any more.
    let store = site.state_dir("acri").join("nats");
    std::fs::rename(store.join("jetstream"), store.join("away")).expect("rename");
    std::fs::write(store.join("jetstream"), "in the way").expect("a file");
    process::kill(server_of(&site));
    assert_eq!(up.ended().await.code(), Some(5), "{}", up.log());
    assert!(up.log().contains("does not keep"), "{}", up.log());
    assert!(!harnesses(&site, script).is_empty());
}

#[tokio::test]
async fn a_port_that_somebody_took_meanwhile_is_said_and_the_server_comes_back_when_it_is_free() {
    let site = site().await;
    let mut up = site.up(&[]).await;
    let port = note_of(&site)["port"].as_u64().expect("a port");
    // It does not notice before the port is taken.
    up.pause().await;
    process::kill(server_of(&site));
    let taken = std::net::TcpListener::bind(format!("127.0.0.1:{port}")).expect("the port is free");
    up.resume();
    up.says("address already in use").await;
    drop(taken);
    up.says("nats-server was started again").await;
    let output = acri(&site, &["run", "--", "echo", "hello"]).await;
    assert_eq!((text(&output.stdout).as_str(), output.status.code()), ("hello\n", Some(0)), "{}", text(&output.stderr));
    assert_eq!(up.drain().await.code(), Some(0), "{}", up.log());
}

/// A server that could not write once takes nothing more for that stream, and
/// goes on with the others, the leases' too, also when there is room by then.
#[tokio::test]
async fn a_server_whose_event_stream_takes_nothing_more_is_told_by_doctor_and_started_again() {
    let site = site().await;
    let mut up = site.up(&[]).await;
    let first = server_of(&site);
    let output = acri(&site, &["run", "--", "echo", "one"]).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    let streams = site.state_dir("acri").join("nats/jetstream/$G/streams");
    let stored = std::fs::metadata(streams.join("ACRI_EVENTS/msgs/1.blk")).expect("stored events").len();
    // No file of it may grow above what the events have now, as on a full disk.
    let limit = Rlimit { current: Some(stored), maximum: Some(stored) };
    prlimit(Pid::from_raw(first), Resource::Fsize, limit).expect("a limit");
    // Its answer comes from the server's next life.
    let (created, doctor) = tokio::join!(acri(&site, &["create", "--", "true"]), async {
        eventually("doctor to say it", || async {
            let told = text(&acri(&site, &["doctor"]).await.stdout);
            (told.contains("write error") || server_of(&site) != first).then_some(told)
        })
        .await
    });
    assert!(doctor.contains("ACRI_EVENTS' write error"), "{doctor}");
    assert!(created.status.success(), "{}", text(&created.stderr));
    up.says("nats-server takes nothing more").await;
    up.says("nats-server was started again").await;
    assert_ne!(server_of(&site), first);
    let output = acri(&site, &["run", "--", "echo", "two"]).await;
    assert_eq!((text(&output.stdout).as_str(), output.status.code()), ("two\n", Some(0)), "{}", text(&output.stderr));
    let doctor = acri(&site, &["doctor"]).await;
    assert!(text(&doctor.stdout).contains("all its streams take what is written"), "{}", text(&doctor.stdout));
    assert!(acri(&site, &["verify"]).await.status.success());
    assert_eq!(up.drain().await.code(), Some(0), "{}", up.log());
}

#[tokio::test]
async fn ctrl_c_ends_it_while_it_fetches_its_server() {
    let site = site().await;
    let bin = site.directory().join("bin");
    std::fs::create_dir(&bin).expect("a directory");
    let (python, begun) = (bin.join("python3"), site.directory().join("begun"));
    // Stands for a pip that is at it, and is gone when nobody waits for it.
    std::fs::write(&python, format!("#!/bin/sh\n: > '{}'\nexec /bin/sleep 600\n", begun.display())).expect("a file");
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).expect("a program");
    let cache = site.directory().join("cache");
    let mut up = site.spawn_up(|command| {
        command.env_remove("ACRI_NATS_SERVER").env("PATH", &bin).env("XDG_CACHE_HOME", &cache).arg("up");
    });
    eventually("the fetch", || async { begun.exists().then_some(()) }).await;
    up.interrupt();
    assert_eq!(up.ended().await.code(), Some(130), "{}", up.log());
    eventually("pip to be gone", || async { site.processes().is_empty().then_some(()) }).await;
    let left: Vec<_> = std::fs::read_dir(cache.join("acri")).expect("the cache").flatten().collect();
    assert!(left.iter().all(|entry| entry.path().is_file()), "only the lock is left: {left:?}");
}

#[tokio::test]
async fn a_second_ctrl_c_kills_what_does_not_stop_with_the_bus_or_without() {
    for bus_away in [false, true] {
        let site = site().await;
        let mut up = site.up(&["--nats", &site.server.url()]).await;
        let script = "trap '' TERM INT; echo up; while :; do sleep 0.02; done";
        detached(&site, script).await;
        if bus_away {
            site.server.pause().await;
        }
        assert!(!harnesses(&site, script).is_empty());
        up.interrupt();
        up.says("stopping what runs").await;
        up.interrupt();
        eventually("its harness to be gone", || async { harnesses(&site, script).is_empty().then_some(()) }).await;
        up.says("killing what still runs").await;
        if bus_away {
            site.server.resume();
        }
        up.ended().await;
    }
}

#[tokio::test]
async fn ctrl_c_ends_it_while_it_waits_for_its_bus() {
    let site = site().await;
    site.server.pause().await;
    let mut up = site.spawn_node("n1", &site.server.url(), &[]);
    up.interrupt();
    // A signal that comes before anybody listens ends it as well.
    let status = up.ended().await;
    assert!(!status.success(), "{status}");
    site.server.resume();
    process::signal(i32::try_from(site.server.pid().expect("a pid")).expect("a pid"), Signal::CONT);
}

#[tokio::test]
async fn what_runs_while_its_node_is_between_two_lives_is_told_at_ctrl_c_and_lives_on() {
    let site = site().await;
    let url = site.server.url();
    let mut up = site.up_with(&["--nats", &url], &SHORT_LEASE).await;
    let script = "echo up; while :; do sleep 0.02; done";
    let run = detached(&site, script).await;
    let client = site.client().await;
    let (agent, _) = run.split_once('/').expect("AGENT/RUN");
    let former = client.history(agent.parse().expect("an id")).await.expect("a history")[0].envelope.incarnation;
    let _watcher = site.node_with("n2", &url, &SHORT_LEASE).await;
    up.pause().await;
    look::fenced(&client, former).await;
    // A bus on which no node starts any more.
    Raw::connect(&url).await.api("STREAM.DELETE.KV_ACRI_INDEX", &json!({})).await;
    up.resume();
    up.says("the node was fenced").await;
    up.says("failed to start the node").await;
    up.interrupt();
    up.says("the record of 1 runs is not complete").await;
    assert_eq!(up.ended().await.code(), Some(0), "{}", up.log());
    assert!(!harnesses(&site, script).is_empty());
}

#[tokio::test]
async fn where_python_or_pip_is_missing_it_is_said_what_to_install() {
    let site = site().await;
    let no_pip = "#!/bin/sh\necho '/usr/bin/python3: No module named pip' >&2\nexit 1\n";
    let hashes = "#!/bin/sh\necho 'ERROR: THESE PACKAGES DO NOT MATCH THE HASHES' >&2\nexit 1\n";
    let cases = [
        (None, ["python3 cannot be run", "apt"]),
        (Some(no_pip), ["python3 has no pip", "apt"]),
        (Some(hashes), ["DO NOT MATCH THE HASHES", "nats-server"]),
    ];
    for (program, said) in cases {
        let path = tempfile::tempdir().unwrap();
        if let Some(text) = program {
            let python = path.path().join("python3");
            std::fs::write(&python, text).unwrap();
            std::fs::set_permissions(&python, PermissionsExt::from_mode(0o755)).unwrap();
        }
        let mut command = site.command();
        command.env_remove("ACRI_NATS_SERVER").env("PATH", path.path()).env("XDG_CACHE_HOME", path.path());
        let output = within("the demo to end", command.arg("demo").output()).await.unwrap();
        let text = text(&output.stderr);
        assert!(!output.status.success(), "{text}");
        assert!(said.iter().all(|word| text.contains(word)), "{text}");
        let left = std::fs::read_dir(path.path().join("acri")).unwrap().count();
        assert_eq!(left, 1, "only the lock is left");
    }
}

#[tokio::test]
async fn a_bus_of_our_own_is_reached_whatever_the_environment_says_of_another() {
    let site = site().await;
    let _up = site.up(&[]).await;
    let variables = ["ACRI_CREDS", "ACRI_NKEY", "ACRI_TLS_CA", "ACRI_TLS_CERT", "ACRI_TLS_KEY"];
    for arguments in [&["nodes"][..], &["demo", "-o", "json"]] {
        let mut command = site.command();
        command.envs(variables.map(|name| (name, "/no/such/file"))).args(arguments);
        let output = within("the program to end", command.output()).await.unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    }
}
