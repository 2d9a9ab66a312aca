//! The endpoint over a plain socket: exact values, isolation, and the text format.
// clippy.toml allows unwrap inside #[test] functions, not in the functions they share.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;

use telemetry::{
    BlockDevice, MemoryPurpose, Metrics, Phase, ProcessMemory, Resource, StepFacts, serve,
};

/// Status line, headers and body of `GET path`, off the runtime's threads.
async fn fetch(addr: SocketAddr, path: &'static str) -> (String, String) {
    let fetched = tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect(addr).unwrap();
        write!(stream, "GET {path} HTTP/1.0\r\nHost: test\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    });
    let answer = fetched.await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_ascii_lowercase(), body.to_owned())
}

/// Samples by name and labels, comments left out.
fn samples(body: &str) -> BTreeMap<String, f64> {
    let lines = body.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (series, value) = line.rsplit_once(' ').unwrap();
            (series.to_owned(), value.parse().unwrap())
        })
        .collect()
}

fn check(samples: &BTreeMap<String, f64>, expect: &[(&str, f64)]) {
    for (series, value) in expect {
        let found = samples.get(*series).copied();
        let same = found.is_some_and(|found| found == *value || found.is_nan() && value.is_nan());
        assert!(same, "{series}: {found:?}, expected {value}");
    }
}

fn layers(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

const FACTS: StepFacts = StepFacts {
    step: 7,
    loss: 2.125,
    grad_norm: 0.5,
    learning_rate: 1e-5,
    tokens: 1024,
    seconds: 1.5,
};

#[tokio::test]
async fn a_scrape_shows_exactly_what_was_counted() {
    let metrics = Metrics::new("1.2.3", &["store", "compute"]);
    metrics.set_layers(&layers(&["embed", "0", "head"]));
    metrics.run_opened(5, 10_000);
    metrics.step_committed(&FACTS);
    metrics.step_committed(&StepFacts { step: 8, loss: 2.0, seconds: 4.0, ..FACTS });
    metrics.phase(Phase::Backward, 0.25);
    metrics.phase(Phase::Backward, 0.5);
    metrics.stall(Resource::Storage, 0.125);
    metrics.store_read(4096);
    metrics.store_read(1 << 40);
    metrics.store_written(512);
    metrics.store_commit(0.0625);
    metrics.host_memory(MemoryPurpose::Hash, 99);
    metrics.layer_grad_norm(1, 0.75);
    metrics.layer_phase(2, Phase::Forward, 3.0);
    metrics.layer_grad_norm(0, 9.0);
    metrics.layer_locked(0, true);
    metrics.ram_budget(1 << 30);
    metrics.ram_used(1000);
    metrics.actor_restarted("store");
    metrics.mailbox_depth("compute", 3);

    let server = serve("127.0.0.1:0", metrics).await.unwrap();
    let (head, body) = fetch(server.local_addr(), "/metrics").await;
    assert!(head.starts_with("http/1.0 200"), "{head}");
    assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    let samples = samples(&body);
    check(
        &samples,
        &[
            ("ftactor_step", 8.0),
            ("ftactor_loss", 2.0),
            ("ftactor_grad_norm", 0.5),
            ("ftactor_learning_rate", 1e-5),
            ("ftactor_tokens_total", 12_048.0),
            ("ftactor_step_seconds_count", 2.0),
            ("ftactor_step_seconds_sum", 5.5),
            ("ftactor_step_seconds_bucket{le=\"+Inf\"}", 2.0),
            ("ftactor_phase_seconds{phase=\"backward\"}", 0.75),
            ("ftactor_phase_seconds{phase=\"commit\"}", 0.0),
            ("ftactor_stall_seconds_total{resource=\"storage\"}", 0.125),
            ("ftactor_stall_seconds_total{resource=\"network\"}", 0.0),
            ("ftactor_store_read_bytes_total", 1_099_511_631_872.0),
            ("ftactor_store_written_bytes_total", 512.0),
            ("ftactor_store_commit_seconds_sum", 0.0625),
            ("ftactor_host_memory_bytes_total{purpose=\"hash\"}", 99.0),
            ("ftactor_host_memory_bytes_total{purpose=\"optimizer\"}", 0.0),
            ("ftactor_layer_locked{layer=\"embed\"}", 1.0),
            ("ftactor_layer_locked{layer=\"0\"}", 0.0),
            ("ftactor_layer_grad_norm{layer=\"embed\"}", f64::NAN),
            ("ftactor_layer_grad_norm{layer=\"0\"}", 0.75),
            ("ftactor_layer_grad_norm{layer=\"head\"}", f64::NAN),
            ("ftactor_layer_seconds{layer=\"head\",phase=\"forward\"}", 3.0),
            ("ftactor_layer_seconds{layer=\"0\",phase=\"optimizer\"}", 0.0),
            ("ftactor_ram_budget_bytes", 1_073_741_824.0),
            ("ftactor_ram_used_bytes", 1000.0),
            ("ftactor_actor_restarts_total{actor=\"store\"}", 1.0),
            ("ftactor_actor_restarts_total{actor=\"compute\"}", 0.0),
            ("ftactor_mailbox_depth{actor=\"compute\"}", 3.0),
            ("ftactor_build_info{version=\"1.2.3\"}", 1.0),
        ],
    );
    assert_eq!(
        samples.get("ftactor_process_resident_bytes").is_some_and(|bytes| *bytes > 0.0),
        ProcessMemory::sample().rss_bytes().is_some()
    );
    server.shutdown().await;
}

#[test]
fn every_sample_has_help_and_type_and_every_contract_name_is_there() {
    let metrics = Metrics::new("0", &["store"]);
    metrics.set_layers(&layers(&["embed"]));
    let sysfs = fake_disk("1 0 8 0 1 0 16 0 0 5 6");
    metrics.watch_device(BlockDevice::from_sysfs(sysfs.path()).unwrap()).unwrap();
    let body = metrics.render();

    for name in "step loss grad_norm learning_rate tokens_total step_seconds phase_seconds \
                 stall_seconds_total store_read_bytes_total store_written_bytes_total \
                 store_commit_seconds layer_locked layer_grad_norm layer_seconds \
                 nvme_read_bytes_total nvme_written_bytes_total nvme_busy_ratio \
                 host_memory_bytes_total ram_budget_bytes ram_used_bytes actor_restarts_total \
                 mailbox_depth build_info"
        .split_whitespace()
    {
        assert!(body.contains(&format!("# TYPE ftactor_{name} ")), "{name} is missing");
    }
    for series in samples(&body).keys() {
        let name = series.split('{').next().unwrap();
        let family = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|suffix| name.strip_suffix(suffix))
            .unwrap_or(name);
        for kind in ["HELP", "TYPE"] {
            let lead = format!("# {kind} {family} ");
            assert_eq!(body.matches(&lead).count(), 1, "{lead}for {series}");
        }
    }
}

#[test]
fn nothing_measured_yet_is_nan_and_what_is_unknown_is_absent() {
    let metrics = Metrics::new("0", &[]);
    let samples = samples(&metrics.render());
    check(
        &samples,
        &[
            ("ftactor_step", 0.0),
            ("ftactor_loss", f64::NAN),
            ("ftactor_grad_norm", f64::NAN),
            ("ftactor_learning_rate", f64::NAN),
            ("ftactor_step_seconds_count", 0.0),
        ],
    );
    assert!(!samples.keys().any(|series| series.contains("nvme") || series.contains("layer")));
}

#[test]
fn instances_and_clones_do_not_leak_into_others() {
    let (first, second) = (Metrics::new("1", &["store"]), Metrics::new("2", &["store"]));
    first.clone().store_read(5);
    check(&samples(&first.render()), &[("ftactor_store_read_bytes_total", 5.0)]);
    check(
        &samples(&second.render()),
        &[("ftactor_store_read_bytes_total", 0.0), ("ftactor_build_info{version=\"2\"}", 1.0)],
    );
}

#[test]
fn labels_stay_those_announced() {
    let metrics = Metrics::new("0", &["store"]);
    metrics.set_layers(&layers(&["embed", "odd \"name\"\\\n"]));
    metrics.set_layers(&layers(&["embed", "0"]));
    metrics.layer_phase(0, Phase::Forward, 1.0);
    metrics.set_layers(&layers(&["embed"]));
    let before = samples(&metrics.render());
    check(&before, &[("ftactor_layer_seconds{layer=\"embed\",phase=\"forward\"}", 0.0)]);

    metrics.layer_grad_norm(1, 1.0);
    metrics.layer_locked(99, true);
    metrics.actor_restarted("nobody");
    metrics.mailbox_depth("nobody", 1);
    let after = samples(&metrics.render());
    assert!(before.keys().eq(after.keys()));
    assert_eq!(before.keys().filter(|series| series.contains("layer=")).count(), 2 + 4);
}

#[test]
fn impossible_durations_count_as_zero() {
    let metrics = Metrics::new("0", &[]);
    for seconds in [f64::NAN, f64::INFINITY, -1.0] {
        metrics.stall(Resource::Compute, seconds);
        metrics.step_committed(&StepFacts { seconds, ..FACTS });
        metrics.store_commit(seconds);
    }
    check(
        &samples(&metrics.render()),
        &[
            ("ftactor_stall_seconds_total{resource=\"compute\"}", 0.0),
            ("ftactor_step_seconds_sum", 0.0),
            ("ftactor_step_seconds_count", 3.0),
            ("ftactor_store_commit_seconds_sum", 0.0),
        ],
    );
}

#[test]
fn a_run_opened_twice_counts_its_tokens_once() {
    let metrics = Metrics::new("0", &[]);
    metrics.run_opened(3, 3000);
    metrics.run_opened(4, 4000);
    check(&samples(&metrics.render()), &[("ftactor_tokens_total", 4000.0), ("ftactor_step", 4.0)]);
    metrics.run_opened(1, 1000);
    check(&samples(&metrics.render()), &[("ftactor_tokens_total", 1000.0), ("ftactor_step", 1.0)]);
}

fn fake_disk(stat: &str) -> tempfile::TempDir {
    let sysfs = tempfile::Builder::new().prefix("disk").tempdir().unwrap();
    write_stat(sysfs.path(), stat);
    sysfs
}

fn write_stat(sysfs: &Path, stat: &str) {
    std::fs::write(sysfs.join("stat"), stat).unwrap();
}

#[test]
fn a_device_is_sampled_at_each_scrape() {
    let metrics = Metrics::new("0", &[]);
    let sysfs = fake_disk("1 0 8 0 1 0 16 0 0 5 6");
    let device = BlockDevice::from_sysfs(sysfs.path()).unwrap();
    let series = |metric| format!("ftactor_nvme_{metric}{{device=\"{}\"}}", device.name());
    let (read, written) = (series("read_bytes_total"), series("written_bytes_total"));
    let busy = series("busy_ratio");
    metrics.watch_device(device.clone()).unwrap();
    metrics.watch_device(device.clone()).unwrap();
    let expect = |samples, values: [f64; 3]| {
        check(&samples, &[(&*read, values[0]), (&*written, values[1]), (&*busy, values[2])]);
    };
    expect(samples(&metrics.render()), [4096.0, 8192.0, 0.0]);

    std::thread::sleep(std::time::Duration::from_millis(150));
    write_stat(sysfs.path(), "1 0 10 0 1 0 20 0 0 4000000 6");
    expect(samples(&metrics.render()), [5120.0, 10_240.0, 1.0]);

    write_stat(sysfs.path(), "unplugged");
    expect(samples(&metrics.render()), [5120.0, 10_240.0, f64::NAN]);
}

#[tokio::test]
async fn health_is_answered_and_other_paths_are_not() {
    let server = serve("127.0.0.1:0", Metrics::new("0", &[])).await.unwrap();
    let (head, body) = fetch(server.local_addr(), "/healthz").await;
    assert!(head.starts_with("http/1.0 200") && body == "ok\n", "{head} {body}");
    let (head, _) = fetch(server.local_addr(), "/secrets").await;
    assert!(head.starts_with("http/1.0 404"), "{head}");
}

#[tokio::test]
async fn a_taken_or_meaningless_address_is_refused_with_the_remedy() {
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = holder.local_addr().unwrap().to_string();
    for addr in [taken.as_str(), "nonsense"] {
        let error = serve(addr, Metrics::new("0", &[])).await.unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot serve metrics on {addr}: ")), "{error}");
        assert!(error.contains("--metrics off"), "{error}");
    }
    drop(holder);
}

#[tokio::test]
async fn shutdown_frees_the_port_even_with_a_silent_client() {
    let metrics = Metrics::new("0", &[]);
    let server = serve("127.0.0.1:0", metrics.clone()).await.unwrap();
    let addr = server.local_addr();
    let mut silent = TcpStream::connect(addr).unwrap();
    silent.write_all(b"GET /met").unwrap();
    fetch(addr, "/healthz").await;
    server.shutdown().await;
    let again = serve(&addr.to_string(), metrics).await.unwrap();
    assert_eq!(again.local_addr(), addr);
}

#[tokio::test]
async fn dropping_the_server_stops_it() {
    let metrics = Metrics::new("0", &[]);
    let server = serve("127.0.0.1:0", metrics).await.unwrap();
    let addr = server.local_addr();
    drop(server);
    let refused = async {
        while TcpStream::connect(addr).is_ok() {
            tokio::task::yield_now().await;
        }
    };
    let waited = tokio::time::timeout(std::time::Duration::from_secs(30), refused).await;
    assert!(waited.is_ok(), "the port is still open");
}
