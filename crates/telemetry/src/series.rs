//! Name, unit and help of every series, registered in a registry of its own.

use prometheus::core::Collector;
use prometheus::{
    CounterVec, Gauge, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, Opts,
    Registry, exponential_buckets,
};

/// Every metric of the first release, unlabelled ones ready to count.
#[derive(Debug)]
pub(crate) struct Series {
    pub(crate) step: Gauge,
    pub(crate) loss: Gauge,
    pub(crate) grad_norm: Gauge,
    pub(crate) learning_rate: Gauge,
    pub(crate) tokens: IntCounter,
    pub(crate) step_seconds: Histogram,
    pub(crate) phase_seconds: CounterVec,
    pub(crate) stall_seconds: CounterVec,
    pub(crate) store_read_bytes: IntCounter,
    pub(crate) store_written_bytes: IntCounter,
    pub(crate) store_commit_seconds: Histogram,
    pub(crate) layer_locked: GaugeVec,
    pub(crate) layer_grad_norm: GaugeVec,
    pub(crate) layer_seconds: CounterVec,
    pub(crate) nvme_read_bytes: IntCounterVec,
    pub(crate) nvme_written_bytes: IntCounterVec,
    pub(crate) nvme_busy_ratio: GaugeVec,
    pub(crate) host_memory_bytes: IntCounterVec,
    pub(crate) ram_budget_bytes: Gauge,
    pub(crate) ram_used_bytes: Gauge,
    pub(crate) actor_restarts: IntCounterVec,
    pub(crate) mailbox_depth: GaugeVec,
    pub(crate) build_info: GaugeVec,
    /// Absent where the operating system does not tell.
    pub(crate) process_resident_bytes: Option<Gauge>,
}

impl Series {
    /// Registers everything in `registry`, which must be new.
    pub(crate) fn register(registry: &Registry, knows_resident_bytes: bool) -> Series {
        let r = Registrar(registry);
        Series {
            step: r.gauge("ftactor_step", "Last committed optimizer step"),
            loss: r.gauge(
                "ftactor_loss",
                "Mean loss per target token of the last step in nats; NaN before it",
            ),
            grad_norm: r.gauge(
                "ftactor_grad_norm",
                "Gradient norm before clipping of the last step; NaN before it",
            ),
            learning_rate: r.gauge(
                "ftactor_learning_rate",
                "Learning rate of the last committed step; NaN before it",
            ),
            tokens: r.counter(
                "ftactor_tokens_total",
                "Tokens of committed steps since the run began, earlier processes included",
            ),
            step_seconds: r.histogram(
                "ftactor_step_seconds",
                "Seconds between consecutive durable commits",
                half_as_large_again(0.01, 31),
            ),
            phase_seconds: r.seconds_by(
                "ftactor_phase_seconds",
                "Seconds spent in each phase of steps since the process started (a counter)",
                &["phase"],
            ),
            stall_seconds: r.seconds_by(
                "ftactor_stall_seconds_total",
                "Seconds that steps waited for each resource",
                &["resource"],
            ),
            store_read_bytes: r
                .counter("ftactor_store_read_bytes_total", "Bytes read from the store"),
            store_written_bytes: r
                .counter("ftactor_store_written_bytes_total", "Bytes written to the store"),
            store_commit_seconds: r.histogram(
                "ftactor_store_commit_seconds",
                "Seconds to make a step durable: slots synced, record appended and synced",
                half_as_large_again(0.001, 31),
            ),
            layer_locked: r.gauge_by(
                "ftactor_layer_locked",
                "1 while the layer is locked (not trained), else 0",
                &["layer"],
            ),
            layer_grad_norm: r.gauge_by(
                "ftactor_layer_grad_norm",
                "Gradient norm of the layer before clipping in the last committed step; NaN before",
                &["layer"],
            ),
            layer_seconds: r.seconds_by(
                "ftactor_layer_seconds",
                "Seconds the layer spent in each phase since the process started (a counter)",
                &["layer", "phase"],
            ),
            nvme_read_bytes: r.counter_by(
                "ftactor_nvme_read_bytes_total",
                "Bytes read from the block device behind the store since boot, by all processes",
                &["device"],
            ),
            nvme_written_bytes: r.counter_by(
                "ftactor_nvme_written_bytes_total",
                "Bytes written to the block device behind the store since boot, by all processes",
                &["device"],
            ),
            nvme_busy_ratio: r.gauge_by(
                "ftactor_nvme_busy_ratio",
                "Share of the time since the last scrape with a request in flight, 0 to 1",
                &["device"],
            ),
            host_memory_bytes: r.counter_by(
                "ftactor_host_memory_bytes_total",
                "Bytes that our kernels moved through host memory",
                &["purpose"],
            ),
            ram_budget_bytes: r.gauge("ftactor_ram_budget_bytes", "Memory the run may use (--ram)"),
            ram_used_bytes: r.gauge(
                "ftactor_ram_used_bytes",
                "Memory of the budget in use: heap, pinned and registered",
            ),
            actor_restarts: r.counter_by(
                "ftactor_actor_restarts_total",
                "Restarts of the actor after a failure",
                &["actor"],
            ),
            mailbox_depth: r.gauge_by(
                "ftactor_mailbox_depth",
                "Messages waiting in the actor's mailbox",
                &["actor"],
            ),
            build_info: r.gauge_by(
                "ftactor_build_info",
                "1, labelled with the version",
                &["version"],
            ),
            process_resident_bytes: knows_resident_bytes.then(|| {
                r.gauge(
                    "ftactor_process_resident_bytes",
                    "Resident memory of the process, maps of the store included",
                )
            }),
        }
    }
}

/// `count` bucket bounds in seconds from `first` up, each half as large again.
fn half_as_large_again(first: f64, count: usize) -> Vec<f64> {
    exponential_buckets(first, 1.5, count).expect("bounds grow from above zero")
}

struct Registrar<'a>(&'a Registry);

impl Registrar<'_> {
    fn add<C: Collector + Clone + 'static>(&self, built: prometheus::Result<C>) -> C {
        let metric = built.expect("names, labels and buckets are valid constants");
        self.0.register(Box::new(metric.clone())).expect("names are distinct in a new registry");
        metric
    }

    fn gauge(&self, name: &str, help: &str) -> Gauge {
        self.add(Gauge::new(name, help))
    }

    fn gauge_by(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.add(GaugeVec::new(Opts::new(name, help), labels))
    }

    fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.add(IntCounter::new(name, help))
    }

    fn counter_by(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.add(IntCounterVec::new(Opts::new(name, help), labels))
    }

    fn seconds_by(&self, name: &str, help: &str, labels: &[&str]) -> CounterVec {
        self.add(CounterVec::new(Opts::new(name, help), labels))
    }

    fn histogram(&self, name: &str, help: &str, buckets: Vec<f64>) -> Histogram {
        self.add(Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets)))
    }
}
