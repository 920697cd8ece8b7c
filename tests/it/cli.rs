//! The program as a person or a script uses it.

use crate::site;
use acri::id::Sha256Digest;
use acri_tests::{
    look::{ended, says, sealed},
    process,
    raw::Raw,
    site::Site,
    within,
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use rustix::process::Signal;
use serde_json::Value;
use std::{
    os::unix::fs::PermissionsExt as _,
    process::{Output, Stdio},
};
use tokio::io::{AsyncBufReadExt as _, BufReader};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn status(output: &Output) -> i32 {
    output.status.code().unwrap_or(-1)
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}\n{}", text(&output.stdout), text(&output.stderr)))
}

fn objects(output: &Output) -> Vec<Value> {
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Starts a run that says `up` and goes on; tells `AGENT/RUN`.
async fn detached(site: &Site, script: &str) -> String {
    let mark = format!("{}={}", acri_tests::site::MARK, site.mark());
    let output = site.acri(&["run", "-d", "--fresh", "-e", &mark, "--", "sh", "-c", script]).await;
    assert_eq!(status(&output), 0, "{}", text(&output.stderr));
    text(&output.stdout).trim().to_owned()
}

#[tokio::test]
async fn run_ends_with_the_programs_own_status() {
    let site = site().await;
    let _node = site.node("n1").await;
    let output = site.acri(&["run", "--", "sh", "-c", "printf 'out\\0put\\n'; echo err >&2"]).await;
    assert_eq!(
        (status(&output), output.stdout.as_slice(), output.stderr.as_slice()),
        (0, &b"out\0put\n"[..], &b"err\n"[..])
    );
    let plain = site.directory().join("plain");
    std::fs::write(&plain, "no program").unwrap();
    let plain = plain.to_str().unwrap().to_owned();
    let script = site.directory().join("script");
    std::fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let script = script.to_str().unwrap().to_owned();
    let cases: [(&[&str], i32); 9] = [
        (&["run", "--", "/tmp"], 126),
        (&["run", "--", &script], 126),
        (&["run", "--", "sh", "-c", "exit 3"], 3),
        (&["run", "--", "sh", "-c", "exit 255"], 255),
        (&["run", "--", "sh", "-c", "kill -SEGV $$"], 128 + 11),
        (&["run", "--", "sh", "-c", "kill -KILL $$"], 128 + 9),
        (&["run", "--", "no-such-program"], 127),
        (&["run", "--", &plain], 126),
        (&["run"], 2),
    ];
    for (arguments, expected) in cases {
        let output = site.acri(arguments).await;
        assert_eq!(status(&output), expected, "{arguments:?}: {}", text(&output.stderr));
    }
    let gone = site.acri(&["run", "--cwd", "/no/such/place", "--", "true"]).await;
    assert_eq!(status(&gone), 125, "{}", text(&gone.stderr));
    assert!(text(&gone.stderr).contains("/no/such/place"));
    let mut command = site.command();
    command.args(["--nats", &site.server.url(), "run", "--", "echo", "lost"]).stdin(Stdio::null());
    command.stdout(std::fs::File::create("/dev/full").unwrap()).stderr(Stdio::piped());
    let full = within("the end", command.spawn().unwrap().wait_with_output()).await.unwrap();
    assert_eq!(status(&full), 125, "what the program wrote went nowhere");
    assert!(text(&full.stderr).contains("failed to write the output"), "{}", text(&full.stderr));
}

#[tokio::test]
async fn a_program_may_open_as_many_files_as_its_node_was_started_with() {
    let site = site().await;
    let node = site.node("n1").await;
    let limits = |pid: &str| std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let soft = |limits: &str| {
        let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap().to_owned();
        line.split_whitespace().nth(3).unwrap().parse::<u64>().unwrap()
    };
    // The tests' own limit is what the node inherited.
    let before = soft(&limits("self"));
    let output = site.acri(&["run", "--", "sh", "-c", "ulimit -Sn"]).await;
    assert_eq!(text(&output.stdout).trim(), before.to_string(), "{}", text(&output.stderr));
    assert!(soft(&limits(&node.pid().to_string())) >= before, "the node may have raised its own");
}

#[tokio::test]
async fn an_interrupt_stops_the_run_and_a_second_one_kills_it() {
    let site = site().await;
    let _node = site.node("n1").await;
    for (script, interrupts, expected) in [
        ("trap 'echo saved; exit 9' INT TERM; echo up; while :; do sleep 0.02; done", 1, 9),
        ("trap '' INT TERM; echo up; while :; do sleep 0.02; done", 2, 128 + 9),
    ] {
        let mut command = site.command();
        command.args(["--nats", &site.server.url(), "run", "--grace", "60s", "--", "sh", "-c", script]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut err = BufReader::new(child.stderr.take().unwrap()).lines();
        assert_eq!(within("up", out.next_line()).await.unwrap().unwrap(), "up");
        let pid = i32::try_from(child.id().unwrap()).unwrap();
        for _ in 0..interrupts {
            process::signal(pid, Signal::INT);
            // It says what it does before it takes the next one.
            within("a word", err.next_line()).await.unwrap();
        }
        let ended = within("the end", child.wait()).await.unwrap();
        assert_eq!(ended.code(), Some(expected), "{script}");
    }
}

#[tokio::test]
async fn ps_inspect_status_and_wait_tell_of_a_run() {
    let site = site().await;
    let _node = site.node("n1").await;
    let run = detached(&site, "echo up; while [ ! -e go ]; do sleep 0.01; done; exit 6").await;
    let (agent, of_agent) = run.split_once('/').unwrap();
    let named = site.acri(&["create", "--name", "fixer", "-l", "team=infra", "--", "true"]).await;
    let fixer = text(&named.stdout).trim().to_owned();

    let listed = json(&site.acri(&["ps", "-o", "json"]).await);
    assert_eq!(listed["agents"].as_array().unwrap().len(), 2);
    let quiet = site.acri(&["ps", "-q", "-l", "team=infra"]).await;
    assert_eq!(text(&quiet.stdout).trim(), fixer);
    let table = text(&site.acri(&["ps"]).await.stdout);
    assert!(table.contains("AGENT") && table.contains("fixer") && table.contains("running"), "{table}");

    let inspected = json(&site.acri(&["inspect", &agent[..8], "-o", "json"]).await);
    assert_eq!(inspected["owner"]["node"], "n1");
    assert_eq!(inspected["owner"]["lease"], "live");
    assert_eq!(inspected["runs"][0]["run"], of_agent);
    let told = json(&site.acri(&["status", &run, "-o", "json"]).await);
    assert_eq!(told["run"]["state"], "running");

    let early = site.acri(&["wait", &run, "--timeout", "200ms"]).await;
    assert_eq!(status(&early), 5, "{}", text(&early.stderr));
    let work = site.state_dir("n1").join(format!("node/processes/agents/{agent}/work/go"));
    std::fs::write(work, "").unwrap();
    let waited = site.acri(&["wait", &run, "-o", "json"]).await;
    assert_eq!((status(&waited), json(&waited)["state"].as_str()), (1, Some("failed")));
    let started = site.acri(&["start", "fixer"]).await;
    assert_eq!(status(&started), 0, "{}", text(&started.stderr));
    assert_eq!(status(&site.acri(&["wait", "fixer"]).await), 0);
    assert_eq!(status(&site.acri(&["status", "nothing-like-it"]).await), 3);
}

#[tokio::test]
async fn logs_go_on_after_a_cursor_and_events_are_filtered() {
    let site = site().await;
    let _node = site.node("n1").await;
    let run = detached(&site, "for i in 0 1 2 3 4 5; do echo $i; done; echo oops >&2").await;
    let followed = site.acri(&["logs", "-f", &run]).await;
    assert_eq!((text(&followed.stdout).as_str(), text(&followed.stderr).as_str()), ("0\n1\n2\n3\n4\n5\n", "oops\n"));
    let all = objects(&site.acri(&["logs", &run, "-o", "json"]).await);
    assert_eq!(all.len(), 7);
    for (index, event) in all.iter().enumerate() {
        let cursor = event["cursor"].as_str().unwrap();
        let rest = objects(&site.acri(&["logs", &run, "--since", cursor, "-o", "json"]).await);
        assert_eq!(rest, all[index + 1..]);
    }
    let tail = site.acri(&["logs", "-L", "--tail", "1"]).await;
    assert_eq!(text(&tail.stdout) + &text(&tail.stderr), "oops\n".to_owned());
    assert_eq!(status(&site.acri(&["logs", "-L", "--since", "nonsense"]).await), 2);

    let kinds = |output: Output| -> Vec<String> {
        objects(&output).iter().map(|event| event["type"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(kinds(site.acri(&["events", "-o", "json"]).await), ["run.started", "run.completed"]);
    let everything = kinds(site.acri(&["events", "--filter", "all", "-o", "json"]).await);
    assert_eq!(everything, ["agent.created", "run.accepted", "run.started", "run.completed", "run.logs_sealed"]);
    assert_eq!(kinds(site.acri(&["events", "--filter", "agent.*", "-o", "json"]).await), ["agent.created"]);
    assert_eq!(status(&site.acri(&["events", "--filter", "started"]).await), 2);
}

#[tokio::test]
async fn wait_tells_what_is_final_and_what_follows_it_may_begin_at_once() {
    let site = site().await;
    let _node = site.node("n1").await;
    for round in 0..5 {
        let run = detached(&site, "echo one; exit 0").await;
        let waited = site.acri(&["wait", &run, "-o", "json"]).await;
        let told = json(&waited);
        assert_eq!((&told["state"], &told["sealed"]), (&"completed".into(), &true.into()), "round {round}");
        let removed = site.acri(&["rm", &run]).await;
        assert_eq!(status(&removed), 0, "round {round}: {}", text(&removed.stderr));
    }
}

#[tokio::test]
async fn inspect_has_a_table_for_people_that_shows_no_secret() {
    let site = site().await;
    let _node = site.node("n1").await;
    let made = site.acri(&["create", "--name", "fixer", "-e", "API_KEY=hush", "--", "sh", "-c", "exit 3"]).await;
    let agent = text(&made.stdout).trim().to_owned();
    assert_eq!(status(&site.acri(&["start", &agent]).await), 0);
    site.acri(&["wait", &agent]).await;
    let shown = text(&site.acri(&["inspect", &agent]).await.stdout);
    let line = |name: &str| shown.lines().find(|line| line.starts_with(name)).unwrap_or_default();
    assert_eq!(line("agent").split_whitespace().nth(1), Some(agent.as_str()));
    assert!(line("command").ends_with("sh -c exit 3") && line("labels").ends_with("name=fixer"), "{shown}");
    assert!(line("environment").contains("API_KEY") && !shown.contains("hush"), "{shown}");
    assert!(line("owner").contains("n1 (epoch 1, lease live)"), "{shown}");
    assert!(line("RUN").contains("STATE"), "{shown}");
    let last = shown.lines().last().unwrap();
    assert!(last.contains("failed") && last.contains("complete") && last.contains("status 3"), "{shown}");
    let whole = json(&site.acri(&["inspect", &agent, "-o", "json"]).await);
    assert_eq!(whole["spec"]["environment"]["API_KEY"], "hush");
}

#[tokio::test]
async fn stop_kill_and_rm_end_what_they_are_told_to() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    let script = "trap 'exit 1' TERM; echo up; while :; do sleep 0.02; done";
    let (stopped, killed) = (detached(&site, script).await, detached(&site, script).await);
    for run in [&stopped, &killed] {
        let (agent, run) = run.split_once('/').unwrap();
        says(&client, agent.parse().unwrap(), run.parse().unwrap(), "up").await;
    }
    let barred = site.acri(&["rm", &stopped]).await;
    assert_eq!(status(&barred), 4, "{}", text(&barred.stderr));
    assert_eq!(status(&site.acri(&["stop", &stopped, "--grace", "30s"]).await), 0);
    assert_eq!(status(&site.acri(&["wait", &stopped]).await), 1);
    let told = json(&site.acri(&["status", &stopped, "-o", "json"]).await);
    assert_eq!(told["run"]["state"], "stopped");
    assert_eq!(status(&site.acri(&["kill", &killed]).await), 0);
    let told = json(&site.acri(&["status", &killed, "-o", "json"]).await);
    assert_eq!((&told["run"]["state"], &told["run"]["termination"]), (&"failed".into(), &"killed".into()));
    for run in [&stopped, &killed] {
        let (agent, of_agent) = run.split_once('/').unwrap();
        let (agent, of_agent) = (agent.parse().unwrap(), of_agent.parse().unwrap());
        ended(&client, agent, of_agent).await;
        sealed(&client, agent, of_agent).await;
        let removed = site.acri(&["rm", run]).await;
        assert_eq!(status(&removed), 0, "{}", text(&removed.stderr));
    }
    assert_eq!(text(&site.acri(&["ps", "-q"]).await.stdout), "");
    assert_eq!(status(&site.acri(&["kill", "no-such-run"]).await), 3);
}

/// A copy whose sums are right whatever stands in it: the chain alone must
/// find what is wrong.
fn signed(lines: &[String]) -> String {
    let sum = lines.iter().fold(Sha256Digest::default(), |sum, line| sum.chained(line.as_bytes()));
    let end = format!("{{\"end\":{{\"events\":{},\"sha256\":\"{sum}\"}}}}", lines.len());
    lines.iter().chain([&end]).map(|line| format!("{line}\n")).collect()
}

fn changed(line: &str, change: impl FnOnce(&mut Vec<u8>)) -> String {
    let start = line.find("\"stored\":\"").unwrap() + "\"stored\":\"".len();
    let end = start + line[start..].find('"').unwrap();
    let mut stored = STANDARD.decode(&line[start..end]).unwrap();
    change(&mut stored);
    format!("{}{}{}", &line[..start], STANDARD.encode(stored), &line[end..])
}

fn seq_of(line: &str) -> String {
    line[..line.find(',').unwrap()].to_owned()
}

#[tokio::test]
async fn verify_finds_a_changed_a_missing_and_a_reordered_event() {
    let site = site().await;
    let _node = site.node("n1").await;
    let run = detached(&site, "echo one").await;
    assert_eq!(status(&site.acri(&["wait", &run]).await), 0);
    site.acri(&["logs", "-f", &run]).await;
    let saved = site.directory().join("copy.jsonl");
    let saved = saved.to_str().unwrap();
    let whole = site.acri(&["verify", "--save", saved, "-o", "json"]).await;
    assert_eq!((status(&whole), &json(&whole)["intact"]), (0, &true.into()), "{}", text(&whole.stdout));
    assert_eq!(status(&site.acri(&["verify", "--file", saved]).await), 0);

    let copy = std::fs::read_to_string(saved).unwrap();
    let mut lines: Vec<String> = copy.lines().map(str::to_owned).collect();
    lines.pop();
    assert!(lines.len() >= 5);
    assert_eq!(signed(&lines), copy, "the copy is signed as it is here");
    let verdict = async |lines: &[String]| {
        let path = site.directory().join("tampered.jsonl");
        std::fs::write(&path, signed(lines)).unwrap();
        let output = site.acri(&["verify", "--file", path.to_str().unwrap(), "-o", "json"]).await;
        (status(&output), json(&output))
    };
    for at in 0..lines.len() - 1 {
        // A letter in a name, so that the event still reads as one.
        let mut tampered = lines.clone();
        tampered[at] = changed(&lines[at], |stored| {
            let place = stored.windows(2).position(|two| two == b"n1").unwrap();
            stored[place] = b'm';
        });
        let (status, told) = verdict(&tampered).await;
        assert_eq!((status, &told["other_problems"]), (1, &serde_json::json!([])), "event {at} changed");
        assert!(told["problem_count"].as_u64().unwrap() > 0);

        let mut tampered = lines.clone();
        tampered.remove(at);
        assert_eq!(verdict(&tampered).await.0, 1, "event {at} missing");

        let mut tampered = lines.clone();
        tampered.swap(at, at + 1);
        assert_eq!(verdict(&tampered).await.0, 1, "events {at} and the next in the other order");
        // And with their places in the stream put right.
        let (first, second) = (seq_of(&lines[at]), seq_of(&lines[at + 1]));
        tampered[at] = tampered[at].replacen(&second, &first, 1);
        tampered[at + 1] = tampered[at + 1].replacen(&first, &second, 1);
        assert_eq!(verdict(&tampered).await.0, 1, "events {at} and the next exchanged");
    }
    // One changed byte anywhere, unsigned.
    let mut bytes = copy.clone().into_bytes();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    let path = site.directory().join("byte.jsonl");
    std::fs::write(&path, bytes).unwrap();
    assert_eq!(status(&site.acri(&["verify", "--file", path.to_str().unwrap()]).await), 1);

    // The same on the bus itself: an event that somebody deleted.
    let mut raw = Raw::connect(&site.server.url()).await;
    let body = serde_json::json!({ "seq": 3, "no_erase": true });
    raw.api("STREAM.MSG.DELETE.ACRI_EVENTS", &body).await;
    let output = site.acri(&["verify"]).await;
    assert_eq!(status(&output), 1);
    assert!(text(&output.stdout).contains("DAMAGED"), "{}", text(&output.stdout));
}

#[tokio::test]
async fn replay_steps_through_a_history_up_to_where_it_is_told() {
    let site = site().await;
    let _node = site.node("n1").await;
    let run = detached(&site, "echo one").await;
    assert_eq!(status(&site.acri(&["wait", &run]).await), 0);
    site.acri(&["logs", "-f", &run]).await;
    let (agent, _) = run.split_once('/').unwrap();
    let all = objects(&site.acri(&["replay", agent, "-o", "json"]).await);
    assert_eq!(all.len(), 5);
    assert_eq!(all[4]["state"]["run"]["state"], "completed");
    let three = objects(&site.acri(&["replay", agent, "--until", "3", "-o", "json"]).await);
    assert_eq!(three, all[..3]);
    assert_eq!(three[2]["state"]["run"]["state"], "running");
    let saved = site.directory().join("copy.jsonl");
    let saved = saved.to_str().unwrap();
    site.acri(&["verify", "--save", saved]).await;
    let copied = objects(&site.acri(&["replay", "--file", saved, "-o", "json"]).await);
    assert_eq!(copied, all);
}

#[tokio::test]
async fn doctor_caps_nodes_and_completion_answer() {
    let site = site().await;
    let _node = site.node("n1").await;
    let doctor = site.acri(&["doctor", "-o", "json"]).await;
    assert_eq!(status(&doctor), 0, "{}", text(&doctor.stdout));
    assert!(json(&doctor)["findings"].as_array().unwrap().iter().all(|finding| finding["verdict"] != "fails"));
    let caps = json(&site.acri(&["caps", "process", "-o", "json"]).await);
    assert!(caps.to_string().contains("tree_control"), "{caps}");
    let nodes = text(&site.acri(&["nodes"]).await.stdout);
    assert!(nodes.contains("n1"), "{nodes}");
    for shell in ["bash", "zsh", "fish"] {
        let output = site.acri(&["completion", shell]).await;
        assert_eq!(status(&output), 0);
        assert!(text(&output.stdout).contains("inspect"), "{shell}");
    }
    assert_eq!(status(&site.acri(&["no-such-verb"]).await), 2);
    // With no bus it says so, and what to do.
    let mut command = site.command();
    let output = command.args(["ps"]).stdin(Stdio::null()).output().await.unwrap();
    assert_eq!(status(&output), 5);
    assert!(text(&output.stderr).contains("acri up"), "{}", text(&output.stderr));
}
