//! The metrics of a run: series that are there from the start and agree with the step log.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Child;

use crate::lab::{Lab, ROWS, events, log, start_training, steps, train};

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Starts a run that only its test ends.
fn endless(store: &str, text: &str, more: &[&str]) -> Child {
    start_training(store, &[&ROWS[..], &["--data", text, "--steps", "100000"], more].concat())
}

/// The endpoint's answer, or nothing if nobody listens.
fn scrape(port: u16) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    Some(text)
}

/// The value of a series with exactly this name and these labels.
fn value(text: &str, series: &str) -> f64 {
    let line = text.lines().find(|l| l.rsplit_once(' ').is_some_and(|(name, _)| name == series));
    line.unwrap_or_else(|| panic!("no {series} in {text}"))
        .rsplit_once(' ')
        .unwrap()
        .1
        .parse()
        .unwrap()
}

/// Lets a run commit until its endpoint shows `step`; the scrape, while the run goes on.
fn scrape_at(child: &mut Child, port: u16, step: f64) -> String {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    while let Some(line) = lines.next() {
        line.unwrap();
        if let Some(text) = scrape(port).filter(|t| value(t, "ftactor_step") >= step) {
            std::thread::spawn(move || lines.for_each(drop));
            return text;
        }
    }
    panic!("the run ended before step {step} was seen")
}

#[test]
fn a_scrape_during_a_run_agrees_with_the_log() {
    let lab = Lab::new();
    let (store, text) = lab.store_and_text();
    let (file, port) = (lab.path("log.jsonl"), free_port());
    let address = format!("127.0.0.1:{port}");
    let more = ["--metrics", &address, "--log", &file, "--json", "--fault", "compute:panic:20"];
    let mut child = endless(&store, &text, &more);
    let scraped = scrape_at(&mut child, port, 5.0);
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));

    let lines = log(&file);
    let step = value(&scraped, "ftactor_step") as usize;
    let at = |field: &str| steps(&lines, field)[step - 1];
    assert_eq!(at("step"), step as f64);
    // Series are set and read one by one while the run goes on: some may be a step older.
    let near = |field: &str, series: &str| {
        let seen = value(&scraped, series);
        let logged = steps(&lines, field);
        let window = &logged[step.saturating_sub(3)..(step + 2).min(logged.len())];
        assert!(window.contains(&seen), "{series} is {seen}, the log has {window:?}");
    };
    near("loss", "ftactor_loss");
    near("grad_norm", "ftactor_grad_norm");
    near("lr", "ftactor_learning_rate");
    near("tokens_total", "ftactor_tokens_total");
    let restarts = value(&scraped, "ftactor_actor_restarts_total{actor=\"compute\"}");
    assert_eq!(restarts, events(&lines, "restart").len() as f64);
    assert_eq!(restarts, 1.0);
    let read: f64 = steps(&lines, "read_bytes").iter().take(step + 2).sum();
    let counted = value(&scraped, "ftactor_store_read_bytes_total");
    assert!(counted > 0.0 && counted <= read, "{counted} {read}");
    assert!(value(&scraped, "ftactor_ram_budget_bytes") == (160u64 << 20) as f64);
}

#[test]
fn every_documented_series_is_there() {
    let lab = Lab::new();
    let (store, text) = lab.store_and_text();
    let port = free_port();
    let address = format!("127.0.0.1:{port}");
    let mut child = endless(&store, &text, &["--metrics", &address, "--json"]);
    let scraped = scrape_at(&mut child, port, 1.0);
    child.kill().unwrap();
    child.wait().unwrap();
    for name in [
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens_total",
        "step_seconds",
        "phase_seconds",
        "stall_seconds_total",
        "store_read_bytes_total",
        "store_written_bytes_total",
        "store_commit_seconds",
        "layer_locked",
        "layer_grad_norm",
        "layer_seconds",
        "ram_budget_bytes",
        "ram_used_bytes",
        "actor_restarts_total",
        "mailbox_depth",
        "build_info",
    ] {
        let help = format!("# HELP ftactor_{name} ");
        assert!(scraped.contains(&help), "no {name}");
    }
    for layer in ["embed", "0", "1", "head"] {
        value(&scraped, &format!("ftactor_layer_grad_norm{{layer=\"{layer}\"}}"));
    }
}

#[test]
fn off_opens_no_port_and_a_taken_one_is_refused_by_name() {
    let lab = Lab::new();
    let (store, text) = lab.store_and_text();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let args = [&ROWS[..], &["--data", &text, "--steps", "2", "--metrics", &address]].concat();
    train(&store, &args).expect(2).says(&[&address, "--metrics"]);

    let mut child = endless(&store, &text, &["--json"]);
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("start"), "the run did not begin: {line}");
    let listening = listening_sockets(child.id());
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(listening, 0);
}

/// TCP sockets of a process that listen, from `/proc`.
fn listening_sockets(process: u32) -> usize {
    let tables =
        ["tcp", "tcp6"].map(|t| std::fs::read_to_string(format!("/proc/{process}/net/{t}")));
    let own: Vec<String> = std::fs::read_dir(format!("/proc/{process}/fd"))
        .unwrap()
        .filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok())
        .filter_map(|target| {
            let inode = target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
            Some(inode.to_owned())
        })
        .collect();
    let listens = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields.get(3) == Some(&"0A") && fields.get(9).is_some_and(|i| own.iter().any(|o| o == i))
    };
    tables.into_iter().flatten().map(|t| t.lines().filter(|l| listens(l)).count()).sum()
}
