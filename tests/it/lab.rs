//! Fixtures: a directory that goes away, tiny models and texts, and the binary run on them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

/// Memory that suits every model here.
pub(crate) const RAM: &str = "160M";

/// Rows that suit every model and text here.
pub(crate) const ROWS: [&str; 4] = ["--seq-len", "32", "--batch-rows", "4"];

/// A model small enough to train in milliseconds a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiny {
    pub(crate) family: &'static str,
    pub(crate) tied: bool,
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
}

/// Every family, tied and untied, all with grouped-query attention.
pub(crate) const FAMILIES: [Tiny; 5] = [
    Tiny { family: "llama", tied: true, layers: 2, hidden: 16 },
    Tiny { family: "llama", tied: false, layers: 3, hidden: 16 },
    Tiny { family: "qwen2", tied: true, layers: 2, hidden: 16 },
    Tiny { family: "qwen3", tied: false, layers: 2, hidden: 16 },
    Tiny { family: "mistral", tied: false, layers: 2, hidden: 16 },
];

impl Tiny {
    /// The text of its `config.json`.
    pub(crate) fn config(self) -> String {
        let config = json!({
            "model_type": self.family,
            "vocab_size": 259,
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 3 / 2,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": self.hidden / 4,
            "max_position_embeddings": 64,
            "tie_word_embeddings": self.tied,
        });
        config.to_string()
    }

    pub(crate) fn name(self) -> String {
        format!("{}_{}", self.family, if self.tied { "tied" } else { "untied" })
    }
}

/// What a process left.
#[derive(Clone, Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    /// Fails unless the exit code is `code`.
    #[track_caller]
    pub(crate) fn expect(self, code: i32) -> Ran {
        assert_eq!(self.code, code, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }

    /// Fails unless the error names all of `words`.
    #[track_caller]
    pub(crate) fn says(self, words: &[&str]) -> Ran {
        for word in words {
            assert!(self.stderr.contains(word), "no `{word}` in:\n{}", self.stderr);
        }
        self
    }

    /// Standard output as one JSON value.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stdout))
    }

    /// Standard output as a JSON value a line.
    #[track_caller]
    pub(crate) fn json_lines(&self) -> Vec<Value> {
        json_lines(&self.stdout)
    }
}

/// The binary with its arguments, away from this process's environment.
pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ftactor"));
    command.args(args).env_remove("RUST_LOG").env("RUST_BACKTRACE", "0").stdin(Stdio::null());
    command
}

/// Runs the binary to its end.
#[track_caller]
pub(crate) fn ftactor(args: &[&str]) -> Ran {
    ran(command(args).output().unwrap())
}

/// Starts the binary with both outputs piped.
pub(crate) fn start(args: &[&str]) -> Child {
    command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Sends a signal by name, as a terminal or service does.
pub(crate) fn kill(child: &Child, name: &str) {
    let sent = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

/// [`kill`] by number; the process may have ended by itself.
pub(crate) fn kill_pid(pid: impl std::fmt::Display, name: &str) {
    Command::new("kill").args([name, &pid.to_string()]).status().unwrap();
}

/// The result of a process; one that a signal ended has the code 128 + signal, as in shells.
pub(crate) fn ran(output: Output) -> Ran {
    use std::os::unix::process::ExitStatusExt;
    let status = output.status;
    Ran {
        code: status.code().unwrap_or_else(|| 128 + status.signal().unwrap()),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// A directory for one test.
pub(crate) struct Lab {
    dir: TempDir,
}

impl Lab {
    pub(crate) fn new() -> Lab {
        Lab { dir: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        fs::write(self.path(name), bytes).unwrap();
        self.path(name)
    }

    /// A fresh store of `model`; its path.
    #[track_caller]
    pub(crate) fn store(&self, name: &str, model: Tiny, seed: u64) -> String {
        let config = self.write(&format!("{name}.json"), model.config());
        let store = self.path(name);
        let seed = seed.to_string();
        ftactor(&["init", "--config", &config, "--store", &store, "--seed", &seed]).expect(0);
        store
    }

    /// A fresh store of the smallest model and a text for some steps; their paths.
    #[track_caller]
    pub(crate) fn store_and_text(&self) -> (String, String) {
        (self.store("store", FAMILIES[0], 1), self.text("text.txt", 60))
    }

    /// A text of `sentences` sentences that differ.
    pub(crate) fn text(&self, name: &str, sentences: usize) -> String {
        self.write(name, text(sentences))
    }
}

/// Sentences that differ, the same for the same number.
pub(crate) fn text(sentences: usize) -> String {
    let who = ["The fox", "A sailor", "The miller", "My sister", "An owl"];
    let did = ["found", "painted", "carried", "forgot", "counted", "followed", "mended"];
    let what = ["a lantern", "the clock", "seven apples", "the letter", "an empty boat"];
    let line = |i: usize| {
        let pick = |list: &[&'static str], by: usize| list[(i * i + i / by) % list.len()];
        format!("{} {} {} {i}. ", pick(&who, 1), pick(&did, 2), pick(&what, 3))
    };
    (0..sentences).map(line).collect()
}

/// Arguments of training: `more`, and what all training here shares unless `more` says otherwise.
pub(crate) fn solo<'a>(store: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["solo", "--store", store];
    for (name, value) in [("--metrics", "off"), ("--ram", RAM)] {
        if !more.contains(&name) {
            args.extend([name, value]);
        }
    }
    args.extend(more);
    args
}

/// Trains; the process's result.
#[track_caller]
pub(crate) fn train(store: &str, more: &[&str]) -> Ran {
    ftactor(&solo(store, more))
}

/// Starts training with both outputs piped.
pub(crate) fn start_training(store: &str, more: &[&str]) -> Child {
    start(&solo(store, more))
}

/// Step, and hash and Adam step of every layer.
pub(crate) type State = (u64, Vec<(String, u64)>);

/// What a store holds, without slots and attempts.
#[track_caller]
pub(crate) fn state(store: &str) -> State {
    let shown = inspect(store);
    let layer = |l: &Value| (l["hash"].as_str().unwrap().to_owned(), l["t"].as_u64().unwrap());
    let layers = shown["layers"].as_array().unwrap().iter().map(layer).collect();
    (shown["step"].as_u64().unwrap(), layers)
}

#[track_caller]
pub(crate) fn inspect(store: &str) -> Value {
    ftactor(&["inspect", "--store", store, "--json"]).expect(0).json()
}

/// The lines of a step log.
pub(crate) fn log(path: &str) -> Vec<Value> {
    json_lines(&fs::read_to_string(path).unwrap())
}

/// One number of every step line.
pub(crate) fn steps(lines: &[Value], field: &str) -> Vec<f64> {
    lines.iter().filter(|l| l.get("event").is_none()).map(|l| l[field].as_f64().unwrap()).collect()
}

/// The events of a name.
pub(crate) fn events<'l>(lines: &'l [Value], name: &str) -> Vec<&'l Value> {
    lines.iter().filter(|l| l["event"] == name).collect()
}

/// Every file below `dir` with its contents' hash, sorted.
pub(crate) fn contents(dir: &str) -> Vec<(PathBuf, u64)> {
    let mut all = Vec::new();
    walk(Path::new(dir), &mut |file| {
        all.push((file.to_path_buf(), twox_hash::XxHash3_64::oneshot(&fs::read(file).unwrap())));
    });
    all.sort();
    all
}

pub(crate) fn walk(dir: &Path, see: &mut dyn FnMut(&Path)) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { walk(&path, see) } else { see(&path) }
    }
}

fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}"))).collect()
}

/// Rewrites a file for the time of `check`.
pub(crate) fn with_file(path: &str, bytes: &[u8], check: impl FnOnce()) {
    let good = fs::read(path).unwrap();
    fs::write(path, bytes).unwrap();
    check();
    fs::write(path, good).unwrap();
}

/// The result of a command that must not wait for anybody.
#[track_caller]
pub(crate) fn soon(args: &[&str]) -> Ran {
    let mut child = start(args);
    let deadline = Instant::now() + Duration::from_secs(30);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{args:?} waits");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    ran(child.wait_with_output().unwrap())
}

pub(crate) fn make_pipe(path: &str) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}
