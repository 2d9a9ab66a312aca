//! What happens next in a training run: events in, commands out.
//!
//! [`Run`] decides about steps, attempts, norms and commits; [`Node`] about the layers of one
//! machine: sweeps, weight buffers, gradients, updates and slots. They exchange only
//! [`ToNode`] and [`FromNode`].
//!
//! Invariants:
//! - pure and deterministic: no clock, no thread, no tensor bytes;
//! - everything carries its attempt; what belongs to a dropped attempt is ignored;
//! - every decision follows from the record of the step before and from the step itself;
//! - nothing of step s+1 is written before s is durable, or is known to be committed with a later
//!   step; no live slot is ever written.

mod auto_lock;
mod cost;
mod guard;
mod ledger;
mod node;
mod run;
mod updates;
mod visits;

pub use auto_lock::AutoLock;
pub use cost::{StepBytes, StepPlan};
pub use guard::{Guard, Reason, SKIPS_IN_A_ROW, Trip};
pub use ledger::Ledger;
pub use node::{Again, Node, NodeCommand, NodeConfig, NodeEvent, Policy, Written};
pub use run::{End, Run, RunCommand, RunConfig, RunEvent};
pub use updates::Updates;
pub use visits::{ComputeOp, Input, Need, Visit, VisitId, VisitKind, sweep};

use std::sync::Arc;

use model::{Attempt, Step};

/// What the run tells a node.
#[derive(Clone, Debug, PartialEq)]
pub enum ToNode {
    /// Sweep forward and backward over the step's microbatches. `locked`: by layer, in force for
    /// this step; `policy`: when its optimizer runs; `saved`: a commit is to follow.
    Begin { step: Step, attempt: Attempt, locked: Arc<[bool]>, policy: Policy, saved: bool },
    /// The norm of the whole model is known: the optimizer may run (or, fused, has run).
    Apply { step: Step, attempt: Attempt, sum_of_squares: f64 },
    /// The step that is updated is committed with a later one, which may write over it.
    Settled { step: Step, attempt: Attempt },
    /// Sync all that was updated since the last commit, this step included, and answer
    /// [`FromNode::Prepared`].
    Save { step: Step, attempt: Attempt },
    /// The step is durable: what was saved is live now.
    Committed { step: Step, attempt: Attempt },
    /// Drop this attempt and every later one, and answer [`FromNode::Aborted`]. Unless it is being
    /// saved, what was updated since the last commit goes too.
    Abort { attempt: Attempt },
}

/// What a node tells the run.
#[derive(Clone, Debug, PartialEq)]
pub enum FromNode {
    /// Both sweeps are done. `sums` of the gradient's squares by layer, zero where it is locked;
    /// `loss`, summed over targets.
    Norm { step: Step, attempt: Attempt, sums: Arc<[f64]>, loss: f64 },
    /// Every layer has its new version. `weights`: square sums of the new weights by layer, zero
    /// where it is locked or nobody asked.
    Updated { step: Step, attempt: Attempt, weights: Arc<[f64]> },
    /// Every version to be committed is written and synced.
    Prepared { step: Step, attempt: Attempt },
    /// A layer's update came to something that is not finite.
    NotFinite { step: Step, attempt: Attempt },
    /// Something failed inside the attempt; `fatal` if trying again is pointless.
    Failed { attempt: Attempt, fatal: bool },
    /// Nothing of the dropped attempts is in flight any more.
    Aborted { attempt: Attempt },
}
