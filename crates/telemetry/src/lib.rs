//! Every metric's name, unit and help, the exporter, disk and memory counters, and tracing.
//!
//! Invariants:
//! - this is the only crate that knows Prometheus, its HTTP endpoint and tracing subscribers;
//!   others call plain methods of [`Metrics`] and never see a metric's name;
//! - labels are bounded: their values are enums, or were announced before the first count;
//! - nothing samples in the background: `/sys` and `/proc` are read when somebody scrapes;
//! - nothing here can stop a run: a value that cannot be had leaves its series out.

mod block_device;
mod labels;
mod logging;
mod metrics;
mod mounts;
mod os;
mod process;
mod series;
mod server;

pub use block_device::{BlockDevice, DeviceRates, DeviceSample, SampleError, Unavailable};
pub use labels::{MemoryPurpose, Phase, Resource};
pub use logging::init_tracing;
pub use metrics::{Metrics, StepFacts};
pub use process::{ProcessIo, ProcessMemory};
pub use server::{ServeError, Server, serve};
