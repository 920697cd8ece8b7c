//! What a spec and a task must be before a process is made of them, and the
//! environment that the process gets.

use crate::driver::{Refusal, Start};
use acri::{
    AgentSpec, ErrorBody, ErrorCode, Payload,
    limits::PROCESS_TASK_BYTES_MAX,
    spec::{Completion, Stdin},
};
use rustix::fs::{Access, access};
use std::path::{Path, PathBuf};

/// The search path of a spec that names none.
pub const PATH_DEFAULT: &str = "/usr/local/bin:/usr/bin:/bin";
/// Holds the task's text.
pub const TASK_VARIABLE: &str = "ACRI_TASK";
/// Holds the agent's id.
pub const AGENT_VARIABLE: &str = "ACRI_AGENT";
/// Holds the run's id.
pub const RUN_VARIABLE: &str = "ACRI_RUN";

pub(super) fn refusal(code: ErrorCode, field: &'static str, problem: impl std::fmt::Display) -> Refusal {
    let message = format!("field `{field}` {problem}");
    Refusal(ErrorBody { field: Some(field.to_owned()), ..ErrorBody::new(code, message) })
}

/// Checks what does not depend on the node.
pub(super) fn check_spec(spec: &AgentSpec) -> Result<(), Refusal> {
    spec.check().map_err(|invalid| Refusal(invalid.into()))?;
    if spec.stdin == Stdin::Records {
        return Err(refusal(ErrorCode::Unsupported, "stdin", "cannot be `records`: nothing writes them yet"));
    }
    if spec.completion == Completion::Record {
        return Err(refusal(ErrorCode::Unsupported, "completion", "cannot be `record`: nothing reads them yet"));
    }
    if spec.command.first().is_none_or(String::is_empty) {
        return Err(refusal(ErrorCode::InvalidArgument, "command", "names no program"));
    }
    let ours = [TASK_VARIABLE, AGENT_VARIABLE, RUN_VARIABLE];
    if let Some(name) = ours.into_iter().find(|name| spec.environment.contains_key(*name)) {
        return Err(refusal(
            ErrorCode::InvalidArgument,
            "environment",
            format_args!("sets {name}, which is the node's"),
        ));
    }
    Ok(())
}

/// Checks a task: text of at most [`PROCESS_TASK_BYTES_MAX`] that an
/// environment variable can hold.
pub(crate) fn check_task(task: &Payload) -> Result<(), Refusal> {
    let Payload::Text { text, .. } = task else {
        return Err(refusal(ErrorCode::Unsupported, "task", "must be text"));
    };
    if text.len() > PROCESS_TASK_BYTES_MAX {
        let problem = format_args!("has {} bytes, more than {PROCESS_TASK_BYTES_MAX}", text.len());
        return Err(refusal(ErrorCode::TooLarge, "task", problem));
    }
    if text.contains('\0') {
        return Err(refusal(ErrorCode::InvalidArgument, "task", "contains a zero byte"));
    }
    Ok(())
}

/// Checks that a directory exists and may be entered.
pub(super) fn check_directory(directory: &Path) -> Result<(), Refusal> {
    let no = |problem: String| refusal(ErrorCode::FailedPrecondition, "working_directory", problem);
    let shown = directory.display();
    let metadata = std::fs::metadata(directory).map_err(|error| no(format!("{shown} cannot be used: {error}")))?;
    if !metadata.is_dir() {
        return Err(no(format!("{shown} is not a directory")));
    }
    access(directory, Access::EXEC_OK).map_err(|error| no(format!("{shown} may not be entered: {error}")))
}

/// Finds the program as the holder will: on the spec's own `PATH`, and from the
/// working directory on if it is named with a slash.
pub(super) fn check_program(spec: &AgentSpec, directory: &Path) -> Result<(), Refusal> {
    let name = spec.command.first().map_or("", String::as_str);
    let no = |problem: String| refusal(ErrorCode::FailedPrecondition, "command", problem);
    let candidates: Vec<PathBuf> = if name.contains('/') {
        vec![directory.join(name)]
    } else {
        search_path(spec).split(':').map(|entry| directory.join(entry).join(name)).collect()
    };
    let (mut found, mut directory) = (false, false);
    for candidate in candidates {
        if candidate.is_file() {
            if access(&candidate, Access::EXEC_OK).is_ok() {
                return Ok(());
            }
            found = true;
        }
        directory |= candidate.is_dir();
    }
    let shown: String = name.chars().take(200).collect();
    Err(match (found, name.contains('/')) {
        (true, _) => no(format!("names {shown:?}, which may not be executed")),
        (false, true) if directory => no(format!("names {shown:?}, which is a directory")),
        (false, true) => no(format!("names {shown:?}, which is no file")),
        (false, false) => no(format!("names {shown:?}, which is not on the PATH {:?}", search_path(spec))),
    })
}

fn search_path(spec: &AgentSpec) -> &str {
    spec.environment.get("PATH").map_or(PATH_DEFAULT, String::as_str)
}

/// The whole environment: the spec's, a default `PATH`, and three variables of
/// ours. Nothing of the node's own; no `HOME` either, which a spec may set.
pub(super) fn environment(start: &Start, task: &str) -> Vec<(String, String)> {
    let mut environment = start.spec.environment.clone();
    environment.entry("PATH".to_owned()).or_insert_with(|| PATH_DEFAULT.to_owned());
    environment.insert(TASK_VARIABLE.to_owned(), task.to_owned());
    environment.insert(AGENT_VARIABLE.to_owned(), start.agent.to_string());
    environment.insert(RUN_VARIABLE.to_owned(), start.run.to_string());
    environment.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(command: &[&str]) -> AgentSpec {
        let command = command.iter().map(|&word| word.to_owned()).collect();
        AgentSpec::new("process".parse().unwrap(), command)
    }

    #[test]
    fn programs_are_found_on_the_default_path_and_on_the_specs_own() {
        let root = Path::new("/");
        assert!(check_program(&spec(&["sh"]), root).is_ok());
        assert!(check_program(&spec(&["bin/sh"]), root).is_ok(), "relative to the working directory");
        let mut elsewhere = spec(&["sh"]);
        elsewhere.environment.insert("PATH".to_owned(), "/nowhere".to_owned());
        assert_eq!(check_program(&elsewhere, root).unwrap_err().0.field.as_deref(), Some("command"));
        assert!(check_program(&spec(&["bin"]), root).is_err(), "a directory is no program");
    }

    #[test]
    fn a_task_with_a_zero_byte_or_octets_is_refused() {
        assert!(check_task(&Payload::text("x")).is_ok());
        assert!(check_task(&Payload::text("x\0y")).is_err());
        assert!(check_task(&Payload::Octets { octets: vec![255] }).is_err());
    }

    #[test]
    fn the_variables_that_the_node_sets_cannot_be_set_by_a_spec() {
        let mut spec = spec(&["sh"]);
        spec.environment.insert(TASK_VARIABLE.to_owned(), "mine".to_owned());
        assert_eq!(check_spec(&spec).unwrap_err().0.code, ErrorCode::InvalidArgument);
    }
}
