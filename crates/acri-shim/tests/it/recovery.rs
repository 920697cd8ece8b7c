use std::path::PathBuf;

use acri_shim::client::Client;
use acri_shim::spool::Stream;
use acri_shim::wire::{Body, Kill, Op};
use acri_shim::{ExitReason, Owner, Phase, scan};

use crate::support::{EXE, LIMIT, OWNER, Place, read_all, until};

/// Where [`a_node_to_be_killed`] starts its run.
const DIR: &str = "ACRI_SHIM_TEST_DIR";

/// Not a test: the node of the test below, started by it as a process of its own.
#[test]
#[ignore = "a process that another test starts"]
fn a_node_to_be_killed() {
    let Ok(dir) = std::env::var(DIR) else { return };
    let dir = PathBuf::from(dir);
    let state = tempfile::tempdir_in(dir.parent().expect("a state directory")).expect("a directory");
    let launch =
        Place { dir, state }.launch("echo before; while [ ! -e go ]; do sleep 0.01; done; echo after; exec sleep 1000");
    // Should the other test fail, the orphan rule ends what nobody else would.
    let limits = acri_shim::Limits { orphan_after: LIMIT * 2, ..launch.limits };
    let launch = acri_shim::Launch { cwd: launch.dir.clone(), limits, ..launch };
    let mut spawned = acri_shim::spawn(EXE.as_ref(), &launch).expect("start");
    let _ = spawned.child.wait();
}

#[test]
fn a_harness_does_not_notice_that_its_node_was_killed_and_a_new_one_takes_over() {
    let place = Place::new();
    #[expect(clippy::disallowed_methods, reason = "the test plays the machine: it starts and kills a node")]
    let mut command = std::process::Command::new(std::env::current_exe().expect("this test"));
    command.args(["--ignored", "--exact", "recovery::a_node_to_be_killed"]).env(DIR, &place.dir);
    let mut node = command.stdout(std::process::Stdio::null()).spawn().expect("start the node");
    let running = |dir: &PathBuf| {
        let found = scan(dir).expect("scan");
        found.meta.clone().filter(|meta| meta.phase == Phase::Running).map(|_| found)
    };
    until("the run is running", || running(&place.dir));
    node.kill().expect("kill the node");
    node.wait().expect("reap the node");
    let found = scan(&place.dir).expect("scan");
    assert!(found.alive && found.exit.is_none());
    std::fs::write(place.dir.join("go"), "").expect("let the harness go on");
    let secret = found.secret.expect("the token");
    let mut client = Client::connect(&place.dir, &secret, LIMIT).expect("connect");
    let owner = Owner { epoch: OWNER.epoch + 1, incarnation: [2; 16] };
    assert_eq!(client.call(Op::Claim(owner)).expect("an answer"), Body::Done);
    let out = until("the harness went on", || {
        let records = read_all(&place.dir, 0).0;
        let out: Vec<u8> =
            records.iter().filter(|r| r.stream == Stream::Stdout).flat_map(|r| r.payload.clone()).collect();
        out.ends_with(b"after\n").then_some(out)
    });
    assert_eq!(out, b"before\nafter\n");
    let kill = Kill { epoch: owner.epoch, ..Kill::default() };
    assert!(matches!(client.call(Op::Kill(kill)), Ok(Body::Killed(_))));
    let exit = until("the shim has ended", || scan(&place.dir).ok().filter(|scan| !scan.alive)).exit;
    assert_eq!(exit.expect("recorded").reason, ExitReason::Killed);
}
