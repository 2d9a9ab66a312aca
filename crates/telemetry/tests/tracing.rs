//! What reaches the standard error stream, seen from outside: this test runs itself.
// clippy.toml allows unwrap inside #[test] functions, not in the functions they share.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Output};

/// Runs [`emit`] in a process of its own.
fn emitted(json: bool, rust_log: Option<&str>) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "emit", "--ignored", "--nocapture"]);
    command.env_remove("RUST_LOG").env("EMIT_JSON", json.to_string());
    if let Some(directives) = rust_log {
        command.env("RUST_LOG", directives);
    }
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stdout));
    assert!(!String::from_utf8_lossy(&stdout).contains("slot damaged"));
    String::from_utf8(stderr).unwrap()
}

#[test]
#[ignore = "the other tests run it in a process of its own"]
fn emit() {
    let json = std::env::var("EMIT_JSON").is_ok_and(|value| value == "true");
    assert!(telemetry::init_tracing(json));
    assert!(!telemetry::init_tracing(!json), "a second call changes nothing");
    tracing::warn!(layer = "head", "slot damaged");
    tracing::info!("step done");
}

#[test]
fn warnings_are_text_without_colours_by_default() {
    let text = emitted(false, None);
    assert!(text.contains("WARN") && text.contains("slot damaged layer=\"head\""), "{text}");
    assert!(!text.contains("step done") && !text.contains('\x1b'), "{text}");
}

#[test]
fn rust_log_chooses_and_damage_in_it_is_survived() {
    assert!(emitted(false, Some("info")).contains("step done"));
    assert!(!emitted(false, Some("off")).contains("slot damaged"));
    let text = emitted(false, Some("tracing=info,a=b=c"));
    assert!(text.contains("step done"), "{text}");
    assert!(text.contains("a=b=c"), "the damaged directive is named: {text}");
}

#[test]
fn json_is_one_object_a_line() {
    let text = emitted(true, Some("info"));
    let events: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(events.len(), 2, "{text}");
    assert_eq!(events[0]["level"], "WARN");
    assert_eq!(events[0]["fields"]["message"], "slot damaged");
    assert_eq!(events[0]["fields"]["layer"], "head");
}
