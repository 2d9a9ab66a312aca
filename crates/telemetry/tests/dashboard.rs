//! `dashboards/run.json` against the registry: no panel may ask for what is never exported.
// clippy.toml allows unwrap inside #[test] functions, not in the functions they share.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;
use telemetry::{BlockDevice, Metrics};

fn dashboard() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dashboards/run.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn panels(dashboard: &Value) -> &[Value] {
    dashboard["panels"].as_array().unwrap()
}

fn is_row(panel: &Value) -> bool {
    panel["type"] == "row"
}

/// Sample names a full trainer exports, each with its labels (`le` included).
fn exported() -> BTreeMap<String, BTreeSet<String>> {
    let metrics = Metrics::new("0", &["store"]);
    metrics.set_layers(&["embed".to_owned()]);
    let sysfs = tempfile::tempdir().unwrap();
    std::fs::write(sysfs.path().join("stat"), "1 0 8 0 1 0 16 0 0 5 6").unwrap();
    metrics.watch_device(BlockDevice::from_sysfs(sysfs.path()).unwrap()).unwrap();

    let mut names = BTreeMap::<String, BTreeSet<String>>::new();
    for line in metrics.render().lines().filter(|line| !line.starts_with('#')) {
        let end = line.find(['{', ' ']).unwrap();
        let labels = line.split(['{', ',']).filter_map(|part| part.split_once("=\""));
        let labels = labels.map(|(label, _)| label.to_owned());
        names.entry(line[..end].to_owned()).or_default().extend(labels);
    }
    // Always there for Linux, where the dashboard's readers train.
    names.entry("ftactor_process_resident_bytes".to_owned()).or_default();
    names
}

/// The identifiers of ours in a PromQL expression.
fn metrics_in(expr: &str) -> Vec<&str> {
    expr.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| word.starts_with("ftactor_"))
        .collect()
}

/// Labels in `by (...)` and in a legend's `{{...}}`, but those Prometheus adds.
fn labels_in(expr: &str, legend: &str) -> BTreeSet<String> {
    let grouped = expr.split("by (").skip(1).flat_map(|rest| {
        let inside = rest.split(')').next().unwrap_or_default();
        inside.split(',').map(str::trim)
    });
    let shown = legend.split("{{").skip(1).map(|rest| rest.split("}}").next().unwrap().trim());
    grouped.chain(shown).filter(|label| *label != "instance").map(str::to_owned).collect()
}

#[test]
fn every_expression_asks_for_exported_metrics_and_labels() {
    let (dashboard, exported) = (dashboard(), exported());
    for panel in panels(&dashboard).iter().filter(|panel| !is_row(panel)) {
        let title = panel["title"].as_str().unwrap();
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{title} asks for nothing");
        for target in targets {
            let expr = target["expr"].as_str().unwrap();
            let names = metrics_in(expr);
            assert!(!names.is_empty(), "{title}: `{expr}` names no metric");
            let mut known = BTreeSet::new();
            for name in names {
                let labels = exported.get(name);
                known.extend(labels.unwrap_or_else(|| panic!("{title}: {name} is not exported")));
            }
            for label in labels_in(expr, target["legendFormat"].as_str().unwrap_or_default()) {
                assert!(known.contains(&label), "{title}: `{expr}` has no label {label}");
            }
        }
    }
}

#[test]
fn every_exported_metric_is_shown() {
    let dashboard = dashboard();
    let text = dashboard["panels"].to_string();
    let shown: BTreeSet<&str> = metrics_in(&text).into_iter().map(family).collect();
    let exported = exported();
    let exported: BTreeSet<&str> = exported.keys().map(|name| family(name)).collect();
    assert_eq!(exported.difference(&shown).collect::<Vec<_>>(), Vec::<&&str>::new());
}

fn family(name: &str) -> &str {
    ["_bucket", "_sum", "_count"]
        .iter()
        .find_map(|suffix| name.strip_suffix(suffix))
        .unwrap_or(name)
}

#[test]
fn grafana_can_import_it() {
    let dashboard = dashboard();
    assert!(dashboard["schemaVersion"].as_u64().unwrap() >= 39);
    assert!(dashboard["uid"].as_str().is_some_and(|uid| !uid.is_empty() && uid.len() <= 40));
    assert!(dashboard["id"].is_null(), "an id would overwrite another dashboard");
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    assert!(variables.iter().any(|variable| variable["name"] == "datasource"
        && variable["type"] == "datasource"
        && variable["query"] == "prometheus"));
    for panel in panels(&dashboard).iter().filter(|panel| !is_row(panel)) {
        for source in panel["targets"].as_array().unwrap().iter().chain([panel]) {
            assert_eq!(source["datasource"]["uid"], "${datasource}", "{}", panel["title"]);
        }
    }
}

#[test]
fn every_variable_used_is_defined() {
    let dashboard = dashboard();
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    let defined: BTreeSet<&str> =
        variables.iter().map(|variable| variable["name"].as_str().unwrap()).collect();
    let text = dashboard["panels"].to_string();
    for rest in text.split('$').skip(1) {
        let name = rest.trim_start_matches('{');
        let name = name.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap();
        assert!(defined.contains(name) || name == "__rate_interval", "${name} is not defined");
    }
}

#[test]
fn panels_have_ids_of_their_own_and_do_not_overlap() {
    let dashboard = dashboard();
    let mut ids = BTreeSet::new();
    let mut cells = BTreeMap::new();
    for panel in panels(&dashboard) {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title} repeats an id");
        let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        assert!(at("w") > 0 && at("h") > 0 && at("x") + at("w") <= 24, "{title} leaves the grid");
        for y in at("y")..at("y") + at("h") {
            for x in at("x")..at("x") + at("w") {
                let below = cells.insert((x, y), title);
                assert_eq!(below, None, "{title} covers cell {x}, {y}");
            }
        }
    }
}
