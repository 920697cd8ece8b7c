use std::io::{Read as _, Write as _};
use std::path::Path;
use std::time::Duration;

use acri_shim::wire::{self, Body, Decoder, Hello, Kill, Op, Reply, Request, Stop};
use acri_shim::{ExitReason, Limits, Process, Tier};

use rustix::process::Signal;

use crate::support::{LIMIT, OWNER, Run, tiers, until};

/// Prints its number, ignores SIGTERM, has left its session, twice forked; waits for ever.
const TREE: &str = "trap '' TERM; \
    setsid sh -c 'trap \"\" TERM; (sh -c \"sleep 1000 & sleep 1000 & wait\" &) ; exec sleep 1000' & \
    setsid setsid sh -c 'trap \"\" TERM HUP; exec sleep 1000' & \
    sh -c 'exec sleep 1000' & sleep 1000 & echo up; wait; wait; sleep 1000";

fn kill(reason: &str) -> Op {
    Op::Kill(Kill {
        epoch: OWNER.epoch,
        command_id: "k1".to_owned(),
        principal: "anna".to_owned(),
        reason: reason.to_owned(),
    })
}

/// All processes below the shim's harness, as identities.
fn tree_of(run: &Run) -> Vec<Process> {
    let root = run.spawned.info.harness;
    let shim = i32::try_from(run.spawned.shim_pid()).expect("small");
    let mut tree = vec![root];
    let mut open = vec![shim];
    while let Some(parent) = open.pop() {
        let list = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
        for child in list.split_whitespace().map(|w| w.parse::<i32>().expect("a number")) {
            let name = std::fs::read_to_string(format!("/proc/{child}/comm")).unwrap_or_default();
            if !name.starts_with("acri-") {
                tree.extend(Process::of(child));
            }
            open.push(child);
        }
    }
    tree.sort_by_key(|p| p.pid);
    tree.dedup();
    tree
}

/// The tree, once this many of it have become `sleep`.
fn grown(run: &Run, sleepers: usize) -> Vec<Process> {
    let sleeps = |p: &&Process| std::fs::read_to_string(format!("/proc/{}/comm", p.pid)).is_ok_and(|n| n == "sleep\n");
    until("the tree has grown", || Some(tree_of(run)).filter(|tree| tree.iter().filter(sleeps).count() >= sleepers))
}

fn assert_gone(tree: &[Process]) {
    let left: Vec<_> = tree.iter().filter(|p| p.exists()).collect();
    assert!(left.is_empty(), "alive: {left:?}");
}

#[test]
fn a_kill_ends_a_tree_that_hides_and_ignores_in_every_tier() {
    for &tier in tiers() {
        let mut run = Run::in_tier(tier, TREE);
        run.until_says("up");
        let tree = grown(&run, 6);
        let mut client = run.client();
        let Body::Killed(killed) = client.call(kill("enough")).expect("an answer") else { panic!("not killed") };
        assert_gone(&tree);
        println!("{tier:?}: {} processes in {} us", killed.processes, killed.took_us);
        assert!(!killed.already);
        assert!(killed.processes >= 8, "{killed:?}");
        let exit = run.finished();
        assert_eq!((exit.signal, exit.reason), (Some(9), ExitReason::Killed));
        let request = run.scan().kill.expect("recorded");
        assert_eq!((request.principal.as_str(), request.reason.as_str(), request.epoch), ("anna", "enough", 3));
    }
}

#[test]
fn a_second_kill_is_told_so_and_the_first_record_stays() {
    for &tier in tiers() {
        let mut run = Run::in_tier(tier, "trap '' TERM; echo up; sleep 1000");
        run.until_says("up");
        // In one write, or the shim might be gone before the second.
        let hello = Hello { version: wire::VERSION, token: run.spawned.token.clone() };
        let ops = [Op::Hello(hello), kill("first"), kill("second")];
        let requests = ops.into_iter().zip(1..).map(|(op, id)| wire::encode(&Request { id, op }));
        let mut stream = wire::connect(run.dir()).expect("connect");
        stream.write_all(&requests.collect::<Vec<_>>().concat()).expect("send");
        let (mut bytes, mut decoder, mut already) = (Vec::new(), Decoder::default(), Vec::new());
        stream.set_read_timeout(Some(LIMIT)).expect("a time-out");
        stream.read_to_end(&mut bytes).expect("answers until the shim ends");
        decoder.push(&bytes);
        while let Some(Reply { id, body }) = decoder.pop().expect("valid") {
            if let Body::Killed(killed) = body {
                already.push((id, killed.already));
            }
        }
        assert_eq!(already, [(2, false), (3, true)]);
        let exit = run.finished();
        let recorded = run.scan().kill.expect("recorded");
        assert_eq!((recorded.reason.as_str(), exit.reason), ("first", ExitReason::Killed));
        assert!(recorded.boot_ns < exit.boot_ns, "recorded before it was seen to be dead");
    }
}

#[test]
fn a_stop_lets_processes_finish_and_says_so() {
    for &tier in tiers() {
        // The main process leaves at once, its child needs longer than the drain for its last words.
        let script = "sh -c 'trap \"sleep 0.4; echo last words; exit 0\" TERM; echo up; while :; do sleep 0.05; done' & \
                      trap 'exit 3' TERM; wait";
        let mut run = Run::in_tier(tier, script);
        run.until_says("up");
        let stop = Stop { epoch: OWNER.epoch, command_id: "s1".to_owned(), signal: 0 };
        let Body::Stopping(stopping) = run.client().call(Op::Stop(stop)).expect("an answer") else { panic!() };
        assert!(stopping.processes >= 2, "{stopping:?}");
        let exit = run.finished();
        assert_eq!((exit.code, exit.reason, exit.leftovers), (Some(3), ExitReason::Stopped, 0));
        assert!(String::from_utf8_lossy(&run.stream(acri_shim::spool::Stream::Stdout)).contains("last words"));
    }
}

#[test]
fn what_the_main_process_leaves_behind_is_killed_and_its_output_kept() {
    for &tier in tiers() {
        let script = "setsid sh -c 'trap \"\" TERM HUP; echo left; sleep 1000' & sleep 1000 & echo up; exit 4";
        let mut run = Run::in_tier(tier, script);
        let exit = run.finished();
        assert_eq!((exit.code, exit.reason), (Some(4), ExitReason::Exited));
        assert!(exit.leftovers >= 1, "{exit:?}");
        assert!(String::from_utf8_lossy(&run.stream(acri_shim::spool::Stream::Stdout)).contains("up\n"));
    }
}

#[test]
fn a_fork_bomb_is_ended_in_every_tier() {
    for &tier in tiers() {
        // Bounded in width, endless in time: each one forks a successor and ends.
        let script = "f() { sh -c \"$0\" \"$0\" & }; echo up; i=0; while [ $i -lt 8 ]; do \
                      sh -c 'while :; do (sleep 0.01; sleep 0.01) & sleep 0.005; done' & i=$((i+1)); done; wait";
        let mut run = Run::in_tier(tier, script);
        run.until_says("up");
        let tree = grown(&run, 4);
        let Body::Killed(killed) = run.client().call(kill("bomb")).expect("an answer") else { panic!("not killed") };
        println!("{tier:?}: {killed:?}");
        assert_gone(&tree);
        assert_eq!(run.finished().reason, ExitReason::Killed);
    }
}

#[test]
fn a_process_that_moved_out_of_the_cgroup_is_killed_all_the_same() {
    if !tiers().contains(&Tier::Cgroup) {
        return;
    }
    let mut run =
        Run::in_tier(Tier::Cgroup, "setsid sh -c 'sleep 1000; exit 1' & setsid sleep 1000 & echo up; wait; sleep 1000");
    run.until_says("up");
    let cgroup = run.scan().meta.and_then(|meta| meta.cgroup).expect("a cgroup");
    let outside = cgroup.parent().expect("a parent").join("cgroup.procs");
    let tree = grown(&run, 2);
    let moved = tree.iter().filter(|p| **p != run.spawned.info.harness);
    for process in moved {
        // The reader of this test's own choice; identity was taken a moment ago and the tree is quiet.
        std::fs::write(&outside, process.pid.to_string()).expect("move it out");
    }
    assert!(matches!(run.client().call(kill("escape")).expect("an answer"), Body::Killed(_)));
    assert_gone(&tree);
    assert_eq!(run.finished().reason, ExitReason::Killed);
}

#[test]
fn the_harness_dies_with_a_shim_that_is_killed_in_the_first_two_tiers() {
    for &tier in tiers().iter().filter(|tier| **tier != Tier::Subreaper) {
        let mut run = Run::in_tier(tier, TREE);
        run.until_says("up");
        let tree = grown(&run, 6);
        run.spawned.child.kill().expect("kill the shim");
        run.spawned.child.wait().expect("reap the shim");
        until("the tree is gone", || tree.iter().all(|p| !p.exists() || is_zombie(*p)).then_some(()));
        let scan = run.scan();
        assert!(!scan.alive && scan.exit.is_none(), "{scan:?}");
        if let Some(cgroup) = scan.meta.and_then(|meta| meta.cgroup) {
            until("the guardian removed the cgroup", || (!cgroup.exists()).then_some(()));
        }
    }
}

fn is_zombie(process: Process) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.pid)).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z'))
}

#[test]
fn in_the_third_tier_the_main_process_dies_with_the_shim_and_a_sweep_finds_no_more() {
    let mut run = Run::in_tier(Tier::Subreaper, "echo up; sleep 1000");
    run.until_says("up");
    let main = run.spawned.info.harness;
    run.spawned.child.kill().expect("kill the shim");
    run.spawned.child.wait().expect("reap the shim");
    until("the main process is gone", || (!main.exists() || is_zombie(main)).then_some(()));
    acri_shim::sweep(run.dir(), None).expect("sweep");
}

#[test]
fn a_killed_guardian_is_replaced_and_does_its_duty() {
    if !tiers().contains(&Tier::Cgroup) {
        return;
    }
    let mut run = Run::in_tier(Tier::Cgroup, "echo up; setsid sleep 1000 & sleep 1000");
    run.until_says("up");
    let first = until("there is a guardian", || guardian_of(&run));
    rustix::process::kill_process(first, Signal::KILL).expect("kill the guardian");
    until("there is another guardian", || guardian_of(&run).filter(|pid| *pid != first));
    let tree = grown(&run, 2);
    run.spawned.child.kill().expect("kill the shim");
    run.spawned.child.wait().expect("reap the shim");
    until("the tree is gone", || tree.iter().all(|p| !p.exists() || is_zombie(*p)).then_some(()));
}

#[test]
fn what_shim_and_guardian_left_is_swept() {
    if !tiers().contains(&Tier::Cgroup) {
        return;
    }
    let mut run = Run::in_tier(Tier::Cgroup, TREE);
    run.until_says("up");
    let tree = grown(&run, 6);
    assert!(acri_shim::sweep(run.dir(), None).is_err(), "the shim lives");
    // Held by its pidfd, since its parent is about to die.
    let guardian = until("there is a guardian", || guardian_of(&run));
    let pidfd = rustix::process::pidfd_open(guardian, rustix::process::PidfdFlags::empty()).expect("open");
    rustix::process::pidfd_send_signal(&pidfd, Signal::STOP).expect("stop the guardian");
    run.spawned.child.kill().expect("kill the shim");
    run.spawned.child.wait().expect("reap the shim");
    assert!(tree.iter().any(|p| p.exists() && !is_zombie(*p)), "nothing is left to be swept");
    acri_shim::sweep(run.dir(), None).expect("sweep");
    assert!(tree.iter().all(|p| !p.exists() || is_zombie(*p)));
    let cgroup = run.scan().meta.and_then(|meta| meta.cgroup).expect("a cgroup");
    assert!(!cgroup.exists());
    rustix::process::pidfd_send_signal(&pidfd, Signal::CONT).expect("let the guardian end");
    let ended = rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN);
    let limit = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut [ended], Some(&limit)), Ok(1), "the guardian ends");
}

fn guardian_of(run: &Run) -> Option<rustix::process::Pid> {
    let shim = run.spawned.shim_pid();
    let list = std::fs::read_to_string(format!("/proc/{shim}/task/{shim}/children")).unwrap_or_default();
    let pids: Vec<i32> = list.split_whitespace().map(|w| w.parse().expect("a number")).collect();
    let named = |pid: &&i32| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.starts_with("acri-guardian"))
    };
    pids.iter().find(named).copied().and_then(rustix::process::Pid::from_raw)
}

#[test]
fn a_run_without_an_owner_is_killed_and_says_why() {
    for &tier in tiers() {
        let mut run = Run::launch("trap '' TERM; echo up; setsid sleep 1000 & sleep 1000", |launch| {
            launch.tiers = vec![tier];
            launch.limits = Limits { orphan_after: Duration::from_millis(400), ..Limits::default() };
        });
        let exit = run.finished();
        assert_eq!((exit.signal, exit.reason), (Some(9), ExitReason::Orphaned));
        let orphaned = run.scan().orphaned.expect("recorded");
        assert_eq!(orphaned.owner, OWNER);
        assert!(orphaned.boot_ns - orphaned.last_contact_boot_ns >= 400_000_000);
    }
}

#[test]
fn only_contact_of_the_owner_keeps_a_run_alive() {
    let mut run = Run::launch("echo up; sleep 1000", |launch| {
        launch.limits = Limits { orphan_after: Duration::from_millis(1500), ..Limits::default() };
    });
    let mut client = run.client();
    let began = std::time::Instant::now();
    while began.elapsed() < Duration::from_millis(2500) {
        assert_eq!(client.call(Op::Contact(OWNER)).expect("an answer"), Body::Done);
    }
    let stranger = acri_shim::Owner { incarnation: [1; 16], ..OWNER };
    loop {
        match client.call(Op::Contact(stranger)) {
            Ok(Body::Stale(stale)) => assert_eq!(stale.highest, OWNER.epoch),
            Ok(other) => panic!("{other:?}"),
            Err(_) => break,
        }
    }
    assert_eq!(run.finished().reason, ExitReason::Orphaned);
}

#[test]
fn a_shim_ignores_the_signals_of_a_terminal_and_has_a_session_of_its_own() {
    let run = Run::start("echo up; exec sleep 1000");
    run.until_says("up");
    let number = run.spawned.info.shim.pid;
    let shim = rustix::process::Pid::from_raw(number).expect("a number");
    assert_eq!(rustix::process::getsid(Some(shim)).expect("session"), shim);
    for signal in [Signal::HUP, Signal::INT, Signal::TERM, Signal::QUIT, Signal::PIPE] {
        rustix::process::kill_process(shim, signal).expect("signal the shim");
    }
    assert!(matches!(run.client().call(Op::Status), Ok(Body::Status(_))));
    let cwd = std::fs::read_link(format!("/proc/{number}/cwd")).ok();
    assert!(cwd.is_none_or(|cwd| cwd == Path::new("/")));
    let environment = std::fs::read(format!("/proc/{number}/environ")).unwrap_or_default();
    assert!(environment.is_empty(), "{:?}", String::from_utf8_lossy(&environment));
    let arguments = std::fs::read(format!("/proc/{number}/cmdline")).expect("arguments");
    assert!(arguments.ends_with(b"\0shim\0"), "{:?}", String::from_utf8_lossy(&arguments));
}
