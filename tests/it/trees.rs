//! Kill is certain: of any process tree, by any way of holding it.

use crate::site;
use acri::{Event, status::Termination};
use acri_tests::{
    eventually,
    look::{ended, event, verified},
    process,
    site::begin,
};
use std::path::Path;

/// Processes in sessions of their own, orphans by a double fork, one without
/// its environment, all deaf to every signal that can be ignored.
const RUNAWAY: &str = r#"
deaf='trap "" TERM INT HUP QUIT; while :; do sleep 0.05; done'
setsid sh -c "$deaf" "$ACRI_RUN" &
( ( setsid sh -c "$deaf" "$ACRI_RUN" & ) & )
( ( sh -c "$deaf" "$ACRI_RUN" & ) & )
env -i /bin/sh -c "$deaf" "$ACRI_RUN" &
exec sh -c "$deaf" "$ACRI_RUN"
"#;

/// Many that are born while they are killed.
const BREEDER: &str = r#"trap "" TERM; n=0; while :; do sh -c 'trap "" TERM; sleep 600' "$ACRI_RUN" & sleep 0.001; n=$((n+1)); [ $n -gt 2000 ] && sleep 600; done"#;

async fn kills_in(tier: &str) {
    let site = site().await;
    let node = site.node_with("n1", &site.server.url(), &["--tree-control", tier]).await;
    let client = site.client().await;
    for (script, at_least) in [(RUNAWAY, 5), (BREEDER, 20)] {
        let (agent, run) = begin(&client, site.spec(script)).await;
        let begun = tokio::select! {
            started = event(&client, agent, "run.started") => started.envelope.event,
            failed = event(&client, agent, "run.failed") => failed.envelope.event,
        };
        let Event::RunStarted(started) = begun else {
            println!("skipped: trees cannot be held by {tier} here: {begun:?}");
            assert_ne!(tier, "subreaper", "this one can be had everywhere");
            return;
        };
        assert_eq!(started.tree_control.as_deref(), Some(tier));
        let id = run.to_string();
        let found = eventually("the whole tree", || async {
            let found = process::with_argument(&id);
            (found.len() >= at_least).then_some(found)
        })
        .await;
        let ack = client.kill(agent, run, "it ran away").await.unwrap();
        let left: Vec<_> = found.iter().filter(|pid| Path::new(&format!("/proc/{pid}")).exists()).collect();
        assert!(ack.proved, "{}", node.log());
        assert!(left.is_empty(), "{left:?} of {found:?} in {tier}");
        assert_eq!(process::with_argument(&id), Vec::<i32>::new(), "nor anything born since");
        assert_eq!(process::with_variable("ACRI_RUN", &id), Vec::<i32>::new());
        assert_eq!(ended(&client, agent, run).await.termination, Some(Termination::Killed));
    }
    verified(&client).await;
}

#[tokio::test]
async fn a_tree_in_a_cgroup_is_gone_when_its_kill_is_acknowledged() {
    kills_in("cgroup").await;
}

#[tokio::test]
async fn a_tree_in_a_pid_namespace_is_gone_when_its_kill_is_acknowledged() {
    kills_in("pidns").await;
}

#[tokio::test]
async fn a_tree_under_a_subreaper_is_gone_when_its_kill_is_acknowledged() {
    kills_in("subreaper").await;
}

#[tokio::test]
async fn what_a_program_leaves_behind_at_its_end_is_ended_too() {
    let site = site().await;
    for tier in ["cgroup", "pidns", "subreaper"] {
        let mut node = site.node_with(tier, &site.server.url(), &["--tree-control", tier]).await;
        let client = site.client().await;
        let script = "setsid sh -c 'trap \"\" TERM HUP; sleep 600' \"$ACRI_RUN\" & sleep 0.1; exit 5";
        let (agent, run) = begin(&client, site.spec(script)).await;
        let status = ended(&client, agent, run).await;
        if let Some(exit) = status.exit {
            assert_eq!(exit.code, Some(5));
            assert_eq!(process::with_argument(&run.to_string()), Vec::<i32>::new(), "{tier}");
        } else {
            println!("skipped: trees cannot be held by {tier} here: {status:?}");
        }
        node.drain().await;
    }
}
