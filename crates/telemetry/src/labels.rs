//! The closed sets of label values.

/// What a step spends its time on; the value of the label `phase`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The sweep from the embedding to the head.
    Forward,
    /// The sweep back, recomputation included.
    Backward,
    /// The parameter update.
    Optimizer,
    /// Making the step durable: syncing slots and appending the record.
    Commit,
}

impl Phase {
    /// Every phase, in the order of a step.
    pub const ALL: [Phase; 4] = [Phase::Forward, Phase::Backward, Phase::Optimizer, Phase::Commit];

    /// The label value.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Optimizer => "optimizer",
            Phase::Commit => "commit",
        }
    }
}

/// What a step waits for; the value of the label `resource`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    /// The drive that holds the store.
    Storage,
    /// The compute device.
    Compute,
    /// The optimizer on the host.
    Optimizer,
    /// Other nodes.
    Network,
}

impl Resource {
    /// Every resource.
    pub const ALL: [Resource; 4] =
        [Resource::Storage, Resource::Compute, Resource::Optimizer, Resource::Network];

    /// The label value.
    pub fn name(self) -> &'static str {
        match self {
            Resource::Storage => "storage",
            Resource::Compute => "compute",
            Resource::Optimizer => "optimizer",
            Resource::Network => "network",
        }
    }
}

/// Why kernels moved bytes through host memory; the value of the label `purpose`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryPurpose {
    /// The parameter update.
    Optimizer,
    /// Chunk hashes.
    Hash,
}

impl MemoryPurpose {
    /// Every purpose.
    pub const ALL: [MemoryPurpose; 2] = [MemoryPurpose::Optimizer, MemoryPurpose::Hash];

    /// The label value.
    pub fn name(self) -> &'static str {
        match self {
            MemoryPurpose::Optimizer => "optimizer",
            MemoryPurpose::Hash => "hash",
        }
    }
}
