//! Output of any kind and size comes out as it went in.

use crate::site;
use acri::RunState;
use acri_client::{LogItem, Since};
use acri_tests::{
    eventually,
    look::{ended, says, sealed, verified, written},
    process,
    site::begin,
    within,
};
use futures_util::StreamExt as _;

const MIB: u64 = 1024 * 1024;

#[tokio::test]
async fn binary_output_is_kept_byte_for_byte() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    let (out, err) = (site.directory().join("out"), site.directory().join("err"));
    let script = format!(
        "(head -c 3000000 /dev/urandom; printf '\\r\\n\\0\\377\\n\\n') | tee {} & \
         (head -c 2000000 /dev/urandom; echo) | tee {} >&2; wait",
        out.display(),
        err.display()
    );
    let (agent, run) = begin(&client, site.spec(&script)).await;
    let written = written(&client, agent, run).await;
    assert!(written.stdout == std::fs::read(out).unwrap(), "stdout");
    assert!(written.stderr == std::fs::read(err).unwrap(), "stderr");
}

#[tokio::test]
async fn a_line_without_an_end_is_split_and_takes_no_memory() {
    let mib: u64 = std::env::var("ACRI_TEST_LINE_MIB").ok().and_then(|text| text.parse().ok()).unwrap_or(64);
    let site = site().await;
    let node = site.node("n1").await;
    let client = site.client().await;
    let script = format!("head -c {} /dev/zero | tr '\\0' x", mib * MIB);
    let (agent, run) = begin(&client, site.spec(&script)).await;
    let mut items = client.logs(agent, run, Since::Start, true);
    let (mut bytes, mut parts) = (0, 0);
    while let Some(item) = within("the next part", items.next()).await {
        let LogItem::Event(event, _) = item.unwrap() else { panic!("no gap") };
        let payload = event.payload.as_bytes();
        assert!(payload.iter().all(|byte| *byte == b'x'), "part {parts}");
        assert!(payload.len() as u64 <= MIB, "{} bytes in one part", payload.len());
        assert_eq!(event.part, Some(parts), "numbered");
        bytes += payload.len() as u64;
        parts += 1;
        assert_eq!(event.more, bytes < mib * MIB, "only the last has nothing behind it");
    }
    assert_eq!(bytes, mib * MIB);
    let peak = process::peak_memory(node.pid());
    println!("the node's peak: {} MiB for a line of {mib} MiB", peak / MIB);
    assert!(peak < 160 * MIB, "{} MiB", peak / MIB);
    verified(&client).await;
}

#[tokio::test]
async fn an_empty_output_and_empty_lines_are_told_apart() {
    let site = site().await;
    let _node = site.node("n1").await;
    let client = site.client().await;
    for (script, expected) in [("true", 0), ("echo", 1), ("printf '\\n\\n\\n'", 3), ("printf x", 1)] {
        let (agent, run) = begin(&client, site.spec(script)).await;
        assert_eq!(written(&client, agent, run).await.events, expected, "{script}");
    }
}

/// A file system of its own, unmounted when it is dropped.
struct Mount(std::path::PathBuf);

impl Mount {
    fn tmpfs(at: &std::path::Path, size: &str) -> rustix::io::Result<Self> {
        use rustix::mount::{MountFlags, mount};
        let options = std::ffi::CString::new(format!("size={size}")).unwrap();
        mount("acri-test", at, "tmpfs", MountFlags::empty(), options.as_c_str())?;
        Ok(Self(at.to_owned()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[tokio::test]
async fn a_full_disk_under_the_spool_holds_the_program_up_and_loses_nothing() {
    // Before the site, so that it is there until all that runs on it is ended.
    let mount;
    let site = site().await;
    let runs = site.state_dir("n1").join("node/processes/runs");
    let mut builder = std::fs::DirBuilder::new();
    std::os::unix::fs::DirBuilderExt::mode(builder.recursive(true), 0o700);
    builder.create(&runs).unwrap();
    mount = match Mount::tmpfs(&runs, "6m") {
        Ok(mount) => mount,
        Err(error) => {
            println!("skipped: a small file system cannot be mounted here: {error}");
            return;
        }
    };
    let mut node = site.node("n1").await;
    let client = site.client().await;
    let lines = 3_000;
    let done = site.directory().join("done");
    let script = format!(
        "echo up; i=0; while [ $i -lt {lines} ]; do i=$((i+1)); printf '%10000d\\n' $i; done; echo over >&2; touch {}",
        done.display()
    );
    // Nobody empties the spool until the disk is full.
    let (agent, run) = begin(&client, site.spec("while [ ! -e go ]; do sleep 0.01; done; . ./script")).await;
    let work = site.state_dir("n1").join(format!("node/processes/agents/{agent}/work"));
    std::fs::write(work.join("script"), script).unwrap();
    acri_tests::look::event(&client, agent, "run.started").await;
    node.kill9().await;
    std::fs::write(work.join("go"), "").unwrap();
    eventually("the disk to be full", || async {
        let space = rustix::fs::statvfs(&runs).unwrap();
        (space.f_bavail * space.f_frsize < 100_000).then_some(())
    })
    .await;
    assert!(!done.exists(), "the program waits");
    let _node = site.node("n1").await;
    let mut items = client.log_batches(agent, run, Since::Start, true);
    let (mut numbered, mut events) = (0_u64, 0_u64);
    while let Some(batch) = within("more of the log", items.next()).await {
        for item in batch.unwrap() {
            let LogItem::Event(event, _) = item else { panic!("no gap: {item:?}") };
            events += 1;
            assert_eq!(event.sequence.0, events);
            match event.payload.as_bytes() {
                b"up" | b"over" => {}
                number => {
                    numbered += 1;
                    assert_eq!(number, format!("{numbered:10000}").as_bytes());
                }
            }
        }
    }
    assert_eq!(numbered, lines, "five times what there is room for");
    assert_eq!(ended(&client, agent, run).await.state, RunState::Completed);
    sealed(&client, agent, run).await;
    verified(&client).await;
    // A Kill is certain on a full disk too.
    let (agent, run) = begin(&client, site.spec("echo up; exec sleep 600")).await;
    says(&client, agent, run, "up").await;
    let filler = runs.join("filler");
    let _ = std::fs::write(&filler, vec![1; 16 << 20]);
    let killed = client.kill(agent, run, "on a full disk").await.unwrap();
    assert!(killed.proved);
    std::fs::remove_file(filler).unwrap();
    drop(mount);
}
