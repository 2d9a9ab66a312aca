//! Runs a training job: one actor per resource, two machines that decide, one supervisor.
//!
//! ```text
//! RunActor (steps, data, commits) <-> NodeActor (layers of this machine)
//!                                        |-> StoreActor      reads, writes, syncs
//!                                        |-> ComputeActor    the device
//!                                        '-> OptimizerActor  gradients, AdamW, chunks
//! ```
//!
//! Invariants:
//! - an actor never awaits another one: requests carry a [`Reply`], which answers exactly once,
//!   with [`Failure::Lost`] if whoever held it died;
//! - nothing in a message has to survive: a failure aborts the attempt, and the step runs again
//!   from the disk;
//! - a dead resource actor is started anew; no address is kept across a restart.

mod batch;
mod compute_actor;
mod directory;
mod fault;
mod forward;
mod gate;
mod kinds;
mod messages;
mod node_actor;
mod optimizer_actor;
mod planes;
mod policy;
mod relayout;
mod reply;
mod report;
mod run_actor;
mod scratch;
mod solo;
mod store_actor;
mod supervisor;
mod watch;

pub use batch::Batch;
pub use fault::{Fault, FaultKind, FaultPlan};
pub use forward::{Forward, WeightReader};
pub use optimizer_actor::{Shadow, optimizer_rate};
pub use policy::Verdict;
pub use relayout::relaid;
pub use reply::{Failure, Reply};
pub use report::{
    Event, LayerSeconds, LayerStep, Observer, PhaseSeconds, StallSeconds, StepReport, Summary,
};
pub use run_actor::Clip;
pub use scratch::scratch_bytes;
pub use solo::{ACTOR_NAMES, Solo, SoloConfig};
pub use watch::Patience;
