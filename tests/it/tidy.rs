//! The house rules that a program can check: edges between crates, forgotten files, names, unsafe.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::lab::walk;

/// What each crate may depend on, of ours; every other edge is a room that knows too much.
const EDGES: [(&str, &[&str]); 11] = [
    ("model", &[]),
    ("optim", &[]),
    ("data", &[]),
    ("telemetry", &[]),
    ("schedule", &["model"]),
    ("store", &["model"]),
    ("compute", &["model"]),
    ("net", &["model"]),
    ("convert", &["model", "store"]),
    ("actors", &["model", "optim", "data", "telemetry", "schedule", "store", "compute", "net"]),
    (
        "ftactor",
        &[
            "model",
            "optim",
            "data",
            "telemetry",
            "schedule",
            "store",
            "compute",
            "net",
            "convert",
            "actors",
        ],
    ),
];

/// Foreign crates that only one of ours may know.
const ROOMS: [(&str, &[&str]); 11] = [
    ("kameo", &["actors"]),
    ("memmap2", &["store"]),
    ("io-uring", &["store"]),
    ("cudarc", &["compute"]),
    ("tokenizers", &["data"]),
    ("quinn", &["net"]),
    ("prometheus", &["telemetry"]),
    ("axum", &["telemetry"]),
    ("clap", &["ftactor"]),
    ("indicatif", &["ftactor"]),
    ("anyhow", &["ftactor"]),
];

const BANNED: [&str; 4] = ["manager", "helper", "util", "handler"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline", "--manifest-path"])
        .arg(root().join("Cargo.toml"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Of every package: its name, and its dependencies that are not for tests only.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let metadata = metadata();
    let name = |v: &Value| v["name"].as_str().unwrap().to_owned();
    let package = |package: &Value| {
        let all = package["dependencies"].as_array().unwrap();
        let names = all.iter().filter(|d| d["kind"] != "dev").map(name).collect();
        (name(package), names)
    };
    metadata["packages"].as_array().unwrap().iter().map(package).collect()
}

/// Our Rust files, as paths below the root.
fn sources() -> Vec<(String, String)> {
    let root = root();
    let mut all = Vec::new();
    for top in ["crates", "tests", "examples"].map(|top| root.join(top)) {
        if !top.exists() {
            continue;
        }
        walk(&top, &mut |file| {
            if file.extension().is_some_and(|e| e == "rs") {
                let name = file.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
                all.push((name, fs::read_to_string(file).unwrap()));
            }
        });
    }
    all.sort();
    assert!(all.len() > 100, "only {} files found", all.len());
    all
}

#[test]
fn crates_know_only_what_the_design_allows() {
    let allowed = BTreeMap::from(EDGES);
    for (package, dependencies) in dependencies() {
        let of_package = allowed.get(package.as_str());
        let of_package = of_package.unwrap_or_else(|| panic!("{package} has no line in EDGES"));
        for dependency in dependencies.iter().filter(|d| allowed.contains_key(d.as_str())) {
            assert!(of_package.contains(&dependency.as_str()), "{package} knows {dependency}");
        }
        for (foreign, rooms) in ROOMS {
            let may = !dependencies.contains(foreign) || rooms.contains(&package.as_str());
            assert!(may, "{package} knows {foreign}");
        }
    }
}

#[test]
fn folders_are_named_as_their_crates() {
    let metadata = metadata();
    for package in metadata["packages"].as_array().unwrap() {
        let manifest = Path::new(package["manifest_path"].as_str().unwrap());
        let folder = manifest.parent().unwrap();
        assert_eq!(folder.file_name().unwrap().to_str(), package["name"].as_str());
        assert_eq!(folder.parent().unwrap(), root().join("crates"));
    }
}

#[test]
fn every_crate_inherits_the_lints_and_its_package_facts() {
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let manifest = entry.unwrap().path().join("Cargo.toml");
        let Ok(text) = fs::read_to_string(&manifest) else { continue };
        let manifest = manifest.display();
        assert!(text.contains("[lints]\nworkspace = true"), "{manifest} inherits no lints");
        for fact in ["version", "edition", "rust-version", "license", "publish"] {
            let line = format!("{fact}.workspace = true");
            assert!(text.lines().any(|l| l == line), "{manifest} lacks {line}");
        }
    }
}

#[test]
fn no_test_file_is_forgotten() {
    let root = root().join("tests/it");
    let mut declared = BTreeSet::from([PathBuf::from("main.rs")]);
    for (file, text) in sources().iter().filter(|(file, _)| file.starts_with("tests/it/")) {
        let file = Path::new(file).strip_prefix("tests/it").unwrap();
        let folder =
            if file == Path::new("main.rs") { PathBuf::new() } else { file.with_extension("") };
        for line in text.lines().filter_map(|l| l.trim().strip_prefix("mod ")) {
            let name = line.trim_end_matches([';', ' ', '{']);
            declared.insert(folder.join(format!("{name}.rs")));
        }
    }
    walk(&root, &mut |file| {
        let file = file.strip_prefix(&root).unwrap();
        assert!(declared.contains(file), "nobody declares {}", file.display());
    });
}

#[test]
fn every_file_opens_by_saying_what_it_is() {
    for (file, text) in sources() {
        assert!(text.starts_with("//! "), "{file} does not open with a //! sentence");
        assert!(text.lines().count() < 700, "{file} has more than one subject, by its length");
    }
}

#[test]
fn unsafe_code_is_where_it_is_allowed() {
    for (file, text) in sources() {
        let uses = text.lines().any(|line| words(code(line)).any(|word| word == "unsafe"));
        let opens = |line: &str| line.starts_with("#![allow(") || line.starts_with("#[allow(");
        let allow = |line: &str| opens(line.trim_start()) && line.contains("unsafe_code");
        let allows = text.lines().any(allow);
        assert!(!uses || allows, "{file} has unsafe code without allow(unsafe_code)");
        assert!(uses || !allows, "{file} allows unsafe code and has none");
    }
}

#[test]
fn names_say_what_things_are() {
    for (file, text) in sources() {
        for word in BANNED {
            assert!(!file.to_lowercase().contains(word), "{file} is called {word}");
        }
        for (number, line) in text.lines().enumerate() {
            for name in words(code(line)).filter(|name| is_ours(name)) {
                let banned = parts(name).find(|part| BANNED.contains(&part.as_str()));
                assert!(banned.is_none(), "{file}:{}: `{name}`", number + 1);
            }
        }
    }
}

/// Words of other people's interfaces.
fn is_ours(name: &str) -> bool {
    name != "sigaction" && name != "BANNED"
}

#[test]
fn checks_see_what_they_look_for() {
    assert_eq!(parts("BufferManager").collect::<Vec<_>>(), ["buffer", "manager"]);
    assert_eq!(parts("read_util_2").collect::<Vec<_>>(), ["read", "util", "2"]);
    assert_eq!(code(r#"let a = "unsafe"; // unsafe"#), r"let a = ");
    assert_eq!(code("unsafe { x() } // why"), "unsafe { x() } ");
    assert!(words("fn f_manager(x: u8)").any(|w| w == "f_manager"));
}

/// A line up to its comment or its first text, where names cannot be.
fn code(line: &str) -> &str {
    let end = ["//", "\""].iter().filter_map(|mark| line.find(mark)).min();
    &line[..end.unwrap_or(line.len())]
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty())
}

/// The lower-case words that a name is made of.
fn parts(name: &str) -> impl Iterator<Item = String> {
    let mut split = String::new();
    let mut before = '_';
    for c in name.chars() {
        if c.is_uppercase() && before.is_lowercase() {
            split.push('_');
        }
        split.extend(c.to_lowercase());
        before = c;
    }
    split.split('_').filter(|p| !p.is_empty()).map(str::to_owned).collect::<Vec<_>>().into_iter()
}
