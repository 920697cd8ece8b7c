use std::os::unix::fs::PermissionsExt as _;

use acri_shim::spool::Stream;
use acri_shim::{
    ExitReason, FailureKind, KillRequest, Launch, Phase, Process, SpawnError, Tier, latch_kill, remove, scan,
};

use crate::support::{OWNER, Place, Run, make_private, tiers};

/// Launches what cannot start and returns what was said, after checking that nothing is left.
fn refused(change: impl FnOnce(&Place, &mut Launch)) -> (FailureKind, String) {
    let place = Place::new();
    let mut launch = place.launch("exit 0");
    change(&place, &mut launch);
    let dir = launch.dir.clone();
    match Run::try_launch(place, &launch) {
        Err(SpawnError::Failed { kind, text }) => {
            if let Ok(scan) = scan(&dir) {
                assert!(!scan.alive && scan.meta.is_none() && scan.exit.is_none(), "{scan:?}");
            }
            (kind, text)
        }
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("it started"),
    }
}

#[test]
fn a_missing_program_is_told_by_name() {
    let (kind, text) = refused(|_, launch| launch.argv = vec!["no-such-program".to_owned()]);
    assert_eq!(kind, FailureKind::NotFound);
    assert!(text.contains("no-such-program"), "{text}");
    let (kind, text) = refused(|_, launch| launch.argv = vec!["/no/such/program".to_owned()]);
    assert_eq!(kind, FailureKind::NotFound);
    assert!(text.contains("/no/such/program"), "{text}");
}

#[test]
fn a_program_that_may_not_be_executed_is_told_by_path() {
    let (kind, text) = refused(|place, launch| {
        let path = place.state.path().join("data");
        std::fs::write(&path, "#!/bin/sh\n").expect("write");
        launch.argv = vec![path.to_string_lossy().into_owned()];
    });
    assert_eq!(kind, FailureKind::Permission);
    assert!(text.contains("/data"), "{text}");
}

#[test]
fn a_script_with_a_missing_interpreter_fails_in_every_tier_and_leaves_nothing() {
    for &tier in tiers() {
        let (kind, text) = refused(|place, launch| {
            let path = place.state.path().join("script");
            std::fs::write(&path, "#!/no/such/interpreter\n").expect("write");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("chmod");
            launch.argv = vec![path.to_string_lossy().into_owned()];
            launch.tiers = vec![tier];
        });
        assert_eq!(kind, FailureKind::NotFound);
        assert!(text.contains("/script"), "{text}");
    }
}

#[test]
fn a_bad_working_directory_is_told_by_path() {
    let (kind, text) = refused(|_, launch| launch.cwd = "/no/such/directory".into());
    assert_eq!(kind, FailureKind::Cwd);
    assert!(text.contains("/no/such/directory"), "{text}");
    let (kind, _) = refused(|_, launch| launch.cwd = "/etc/passwd".into());
    assert_eq!(kind, FailureKind::Cwd);
    let (kind, _) = refused(|_, launch| launch.cwd = "relative".into());
    assert_eq!(kind, FailureKind::Cwd);
}

#[test]
fn arguments_beyond_the_systems_limit_are_refused_as_limits() {
    let (kind, _) = refused(|_, launch| launch.argv.push("x".repeat(1 << 20)));
    assert_eq!(kind, FailureKind::Limits);
}

#[test]
fn no_tier_and_a_missing_run_directory_are_refused() {
    assert_eq!(refused(|_, launch| launch.tiers.clear()).0, FailureKind::Tier);
    let (kind, text) = refused(|_, launch| launch.dir = "/no/such/state".into());
    assert_eq!(kind, FailureKind::Other);
    assert!(text.contains("/no/such/state"), "{text}");
}

#[test]
fn an_unavailable_tier_gives_way_to_the_next() {
    let run = Run::launch("sleep 1000", |launch| {
        launch.cgroup_parent = Some("/no/such/cgroup".into());
        launch.tiers = vec![Tier::Cgroup, Tier::Subreaper];
    });
    assert_eq!(run.spawned.info.tier, Tier::Subreaper);
    let meta = run.scan().meta.expect("meta");
    assert_eq!((meta.tier, meta.phase), (Some(Tier::Subreaper), Phase::Running));
}

#[test]
fn the_harness_gets_exactly_what_it_was_given_in_every_tier() {
    for &tier in tiers() {
        let script = "env | sort; pwd; readlink /proc/self/fd/0; ls /proc/self/fd; \
                      grep -E 'Sig(Blk|Ign|Cgt)' /proc/self/status; cat /proc/self/oom_score_adj; \
                      [ $(ps -o sid= -p $$) -eq $$ ] && echo own session";
        let mut run = Run::launch(script, |launch| {
            launch.tiers = vec![tier];
            launch.env.push(("ONLY".to_owned(), "this = that".to_owned()));
        });
        run.finished();
        let out = String::from_utf8(run.stream(Stream::Stdout)).expect("text");
        let names: Vec<&str> = out.lines().take_while(|l| !l.starts_with('/')).collect();
        let names: Vec<&str> = names.iter().filter_map(|l| l.split('=').next()).collect();
        // PWD and friends are the shell's own.
        assert!(names.iter().all(|n| ["ONLY", "PATH", "PWD", "OLDPWD", "SHLVL", "_"].contains(n)), "{names:?}");
        assert!(out.contains("ONLY=this = that\n"), "{out}");
        let cwd = run.place.state.path().canonicalize().expect("the directory");
        assert!(out.contains(&format!("{}\n/dev/null\n0\n1\n2\n3\nSig", cwd.display())), "{out}");
        assert!(out.contains("SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n"), "{out}");
        let own = std::fs::read_to_string("/proc/self/oom_score_adj").expect("own score");
        assert!(out.contains(&format!("\n{own}own session\n")), "{out}");
    }
}

#[test]
fn a_second_shim_for_one_directory_is_refused_while_the_first_lives_and_afterwards() {
    let mut run = Run::start("echo up; exec sleep 1000");
    run.until_says("up");
    let launch = run.place.launch("echo second");
    let second = acri_shim::spawn(crate::support::EXE.as_ref(), &launch);
    assert!(matches!(&second, Err(SpawnError::Failed { kind: FailureKind::AlreadyRunning, .. })), "{second:?}");
    assert!(remove(run.dir()).is_err(), "a living run's directory was removed");
    assert!(run.scan().alive);
    run.spawned.child.kill().expect("kill");
    run.spawned.child.wait().expect("reap");
    let third = acri_shim::spawn(crate::support::EXE.as_ref(), &launch);
    assert!(matches!(&third, Err(SpawnError::Failed { kind: FailureKind::AlreadyStarted, .. })), "{third:?}");
    assert_eq!(run.stream(Stream::Stdout), b"up\n");
}

#[test]
fn a_scan_after_the_exit_tells_all() {
    let mut run = Run::start("echo hello; exit 5");
    let before = run.spawned.info.clone();
    let exit = run.finished();
    let scan = run.scan();
    assert_eq!(scan.exit.as_ref(), Some(&exit));
    assert_eq!((exit.code, exit.signal, exit.reason), (Some(5), None, ExitReason::Exited));
    let meta = scan.meta.expect("meta");
    assert_eq!((meta.shim, meta.harness), (before.shim, Some(before.harness)));
    assert_eq!(meta.boot_id, acri_shim::boot_id().expect("boot id"));
    assert_eq!(meta.argv0, "sh");
    assert_eq!((scan.alive, scan.boot_changed), (false, false));
    assert_eq!(scan.secret.as_ref(), Some(&run.spawned.token));
    assert_eq!((scan.owner, scan.kill, scan.orphaned), (Some(OWNER), None, None));
    if let Some(cgroup) = meta.cgroup {
        assert!(!cgroup.exists(), "the cgroup is left");
    }
    for entry in std::fs::read_dir(run.dir()).expect("list").flatten() {
        let mode = entry.metadata().expect("metadata").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{:?}", entry.file_name());
    }
    remove(run.dir()).expect("remove");
    assert!(!run.dir().exists());
}

#[test]
fn a_harness_that_dies_of_a_signal_is_told_so() {
    for &tier in tiers() {
        let mut run = Run::in_tier(tier, "kill -USR1 $$");
        let exit = run.finished();
        assert_eq!((exit.code, exit.signal, exit.reason), (None, Some(10), ExitReason::Exited));
    }
}

#[test]
fn a_kill_recorded_before_the_start_prevents_it() {
    let place = Place::new();
    let request = KillRequest { command_id: "c1".to_owned(), ..KillRequest::default() };
    assert!(latch_kill(&place.dir, &request).expect("record"));
    assert!(!latch_kill(&place.dir, &KillRequest::default()).expect("the first stays"));
    let launch = place.launch("touch started");
    let (state, dir) = (place.state.path().to_owned(), place.dir.clone());
    let Err(SpawnError::Failed { kind, .. }) = Run::try_launch(Place { ..place }, &launch) else { panic!("started") };
    assert_eq!(kind, FailureKind::Killed);
    assert!(!state.join("started").exists());
    drop(dir);
}

#[test]
fn a_very_long_state_path_works() {
    let place = Place::new();
    let mut deep = place.state.path().to_owned();
    for _ in 0..6 {
        deep.push("x".repeat(40));
    }
    deep.push("run");
    make_private(&deep);
    let mut launch = place.launch("echo deep; exec sleep 1000");
    launch.dir = deep.clone();
    let run = Run::try_launch(Place { dir: deep, state: place.state }, &launch).expect("start");
    run.until_says("deep");
}

#[test]
fn a_program_that_is_no_shim_gives_no_answer_and_a_missing_one_is_told() {
    let place = Place::new();
    let launch = place.launch("exit 0");
    let error = acri_shim::spawn("/bin/true".as_ref(), &launch).expect_err("no shim");
    assert!(matches!(error, SpawnError::NoAnswer { .. }), "{error:?}");
    let error = acri_shim::spawn("/no/such/shim".as_ref(), &launch).expect_err("no shim");
    assert!(matches!(error, SpawnError::Shim { .. }), "{error:?}");
}

#[test]
fn after_a_restart_of_the_machine_the_scan_says_so_and_nothing_is_signalled() {
    let mut run = Run::start("exit 0");
    run.finished();
    let mut meta = run.scan().meta.expect("meta");
    // An innocent process that has the number now.
    meta.harness = Some(Process::of(i32::try_from(std::process::id()).expect("small")).expect("self"));
    meta.boot_id = "another".to_owned();
    let bytes = rmp_serde::encode::to_vec_named(&meta).expect("encode");
    std::fs::write(run.dir().join("meta"), bytes).expect("write");
    assert!(run.scan().boot_changed);
    assert_eq!(acri_shim::sweep(run.dir(), None).expect("sweep"), 0);
}

#[test]
fn a_damaged_state_file_is_told_by_name() {
    let mut run = Run::start("exit 0");
    run.finished();
    for name in ["exit", "meta", "owner", "secret"] {
        let path = run.dir().join(name);
        let good = std::fs::read(&path).expect("read");
        for bad in [&good[..good.len() - 1], &[&good[..], b"x"].concat(), b"", b"\xc1"] {
            std::fs::write(&path, bad).expect("damage");
            assert_eq!(run.scan().damaged, [name], "{bad:?}");
        }
        std::fs::write(&path, good).expect("repair");
    }
    assert!(run.scan().exit.is_some());
}
