//! House rules as tests: who may depend on whom, where a subject may be
//! spelled, that the contract's files and its code say the same.
#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "in a test a panic is the finding")]

use acri::{ErrorCode, subject};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn json(path: &str) -> Value {
    serde_json::from_str(&read(&root().join(path))).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Every Rust source of ours, with its path relative to the root.
fn sources() -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut todo = vec![root().join("crates"), root().join("tests"), root().join("benches")];
    while let Some(directory) = todo.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                todo.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(root()).unwrap().display().to_string();
                found.push((name, read(&path)));
            }
        }
    }
    found.sort();
    found
}

/// Our packages and their manifests' dependency tables.
fn manifests() -> BTreeMap<String, toml::Table> {
    let mut found = BTreeMap::new();
    let mut directories: Vec<_> =
        fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path()).collect();
    directories.extend([root().join("tests"), root().join("benches")]);
    for directory in directories {
        let table: toml::Table = read(&directory.join("Cargo.toml")).parse().unwrap();
        found.insert(table["package"]["name"].as_str().unwrap().to_owned(), table);
    }
    found
}

fn dependencies(manifest: &toml::Table) -> BTreeSet<String> {
    let table = manifest.get("dependencies").and_then(toml::Value::as_table);
    table.map(|table| table.keys().cloned().collect()).unwrap_or_default()
}

/// Which of our crates each may use.
const EDGES: &[(&str, &[&str])] = &[
    ("acri", &[]),
    ("acri-core", &["acri"]),
    ("acri-bus", &["acri"]),
    ("acri-shim", &[]),
    ("acri-drivers", &["acri", "acri-shim"]),
    ("acri-runtime", &["acri", "acri-core", "acri-bus", "acri-drivers"]),
    ("acri-client", &["acri", "acri-core", "acri-bus"]),
];

#[test]
fn crates_use_only_those_below_them() {
    let manifests = manifests();
    for (name, allowed) in EDGES {
        for dependency in dependencies(&manifests[*name]).iter().filter(|name| name.starts_with("acri")) {
            assert!(allowed.contains(&dependency.as_str()), "{name} must not use {dependency}");
        }
    }
}

/// Which crates may use what has one home.
const HOMES: &[(&str, &[&str])] = &[
    ("async-nats", &["acri-bus", "acri-benches"]),
    ("ractor", &["acri-runtime"]),
    ("clap", &["acri-cli"]),
    ("anyhow", &["acri-cli", "acri-tests", "acri-benches"]),
];

#[test]
fn each_big_library_has_one_home() {
    for (name, manifest) in manifests() {
        let dependencies = dependencies(&manifest);
        for (library, homes) in HOMES {
            assert!(
                !dependencies.contains(*library) || homes.contains(&name.as_str()),
                "{name} must not use {library}"
            );
        }
        if name == "acri" || name == "acri-core" {
            for library in ["tokio", "rustix", "libc", "tracing"] {
                assert!(!dependencies.contains(library), "{name} must not use {library}");
            }
        }
    }
}

#[test]
fn every_package_takes_the_workspaces_lints() {
    for (name, manifest) in manifests() {
        assert_eq!(manifest["lints"]["workspace"].as_bool(), Some(true), "{name}");
    }
}

#[test]
fn only_the_shim_may_hold_unsafe_code() {
    for (path, text) in sources() {
        let is_root = path.ends_with("src/lib.rs") || path.ends_with("src/main.rs");
        if is_root && !path.starts_with("crates/acri-shim") {
            assert!(text.contains("#![forbid(unsafe_code)]"), "{path} does not forbid unsafe code");
        }
    }
}

#[test]
fn no_subject_is_spelled_outside_its_module() {
    let literal = format!("\"{}", subject::ROOT);
    for (path, text) in sources() {
        let allowed = path == "crates/acri/src/subject.rs" || path.contains("tests") || path.contains("suite");
        // A module's tests come last in its file.
        let code = text.split("#[cfg(test)]").next().unwrap_or(&text);
        assert!(allowed || !code.contains(&literal), "{path} spells a subject");
    }
}

#[test]
fn error_codes_are_the_same_in_code_file_and_pages() {
    let listed = json("subjects/errors.json");
    let listed = listed.as_array().or_else(|| listed["errors"].as_array()).expect("a list of codes").clone();
    assert_eq!(listed.len(), ErrorCode::ALL.len());
    for (code, entry) in ErrorCode::ALL.iter().zip(&listed) {
        let number = format!("ACRI-{:04}", code.number());
        let shown = entry["code"].as_str().map_or_else(|| entry["code"].to_string(), str::to_owned);
        assert!(shown == number || shown == code.number().to_string(), "{entry}");
        assert_eq!(entry["name"].as_str(), Some(code.name()), "{number}");
        assert_eq!(entry["retryable"].as_bool(), Some(code.retryable()), "{number}");
        let page = read(&root().join(format!("docs/errors/{number}.md")));
        assert!(page.contains(code.name()), "docs/errors/{number}.md does not name {}", code.name());
    }
    let pages = fs::read_dir(root().join("docs/errors")).unwrap().count();
    assert_eq!(pages, ErrorCode::ALL.len(), "a page without a code");
}

fn matches(filter: &str, subject: &str) -> bool {
    let (mut filter, mut subject) = (filter.split('.'), subject.split('.'));
    loop {
        match (filter.next(), subject.next()) {
            (Some(">"), Some(_)) | (None, None) => return true,
            (Some(wanted), Some(token)) if wanted == "*" || wanted == token => {}
            _ => return false,
        }
    }
}

#[test]
fn every_stored_subject_is_in_exactly_one_stream_and_no_other_is_in_any() {
    let mut filters = Vec::new();
    for entry in fs::read_dir(root().join("subjects/streams")).unwrap() {
        let path = entry.unwrap().path();
        let stream: Value = serde_json::from_str(&read(&path)).unwrap();
        let subjects = stream["subjects"].as_array().unwrap_or_else(|| panic!("{}", path.display())).clone();
        filters.extend(subjects.iter().map(|subject| subject.as_str().unwrap().to_owned()));
    }
    let agent = acri::AgentId::from_uuid(uuid::Uuid::from_u128(0xa));
    let run = acri::RunId::from_uuid(uuid::Uuid::from_u128(0xb));
    let streams = |subject: &acri::Subject| {
        let subject = subject.to_string();
        filters.iter().filter(|filter| matches(filter, &subject)).count()
    };
    for kind in acri::event::TYPE_NAMES {
        assert_eq!(streams(&acri::Subject::Event(agent, Some(run), (*kind).to_owned())), 1, "{kind}");
        assert_eq!(streams(&acri::Subject::Event(agent, None, (*kind).to_owned())), 1, "{kind}");
    }
    assert_eq!(streams(&acri::Subject::Log(agent, Some(run))), 1);
    for verb in subject::AgentVerb::ALL {
        assert_eq!(streams(&acri::Subject::Agent(agent, *verb)), 0);
    }
    for verb in subject::RunVerb::ALL {
        assert_eq!(streams(&acri::Subject::Run(agent, run, *verb)), 0);
    }
    for verb in subject::HarnessVerb::ALL {
        assert_eq!(streams(&acri::Subject::Harness("process".parse().unwrap(), *verb)), 0);
    }
    assert_eq!(streams(&acri::Subject::Heartbeat("node".parse().unwrap())), 0);
}

/// The only places that may start a process.
const SPAWNERS: &[&str] = &[
    "crates/acri-shim/",
    "crates/acri-drivers/",
    "crates/acri-bus/src/local/",
    "crates/acri-bus/tests/",
    "crates/acri-cli/src/demo/",
    "tests/",
    "benches/",
];

#[test]
fn processes_are_started_in_few_places() {
    for (path, text) in sources() {
        let spawns = text.contains("Command::new(") || text.contains("posix_spawn") || text.contains("libc::fork");
        let allowed = SPAWNERS.iter().any(|place| path.starts_with(place));
        assert!(!spawns || allowed, "{path} starts a process");
    }
}

/// The longest file that is still taken for one idea.
const FILE_LINES_MAX: usize = 800;

#[test]
fn no_source_file_is_longer_than_one_idea() {
    for (path, text) in sources() {
        let lines = text.lines().count();
        assert!(lines <= FILE_LINES_MAX, "{path} has {lines} lines");
        if lines > 500 {
            println!("long: {path}, {lines} lines");
        }
    }
}

#[test]
fn text_points_at_no_path_outside_the_project() {
    let mut todo = vec![root()];
    while let Some(directory) = todo.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                if !matches!(name.as_str(), "target" | ".git" | "node_modules") {
                    todo.push(path);
                }
                continue;
            }
            let Ok(text) = fs::read_to_string(&path) else { continue };
            let outside = ["..", "shared"].join("/");
            assert!(!text.contains(&outside), "{} points outside", path.display());
        }
    }
}
