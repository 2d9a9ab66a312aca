//! The ids that every command and every record carries.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($int:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub $int);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// Index of a layer in its [`LayerTable`](crate::LayerTable): 0 is the embedding.
    LayerId(u32)
);
id!(
    /// Index of a tile inside its layer.
    TileId(u32)
);
id!(
    /// Position of a tile of the decoder in the forward sweep, the embedding being 0 and the head
    /// the last: the tile's input goes by it.
    Stage(u32)
);
id!(
    /// Number of an optimizer step; the first one is 1, 0 is the state before training.
    Step(u64)
);
id!(
    /// Number of an execution of a step; grows over the whole life of a store.
    Attempt(u64)
);
id!(
    /// Index of a microbatch inside its step.
    Micro(u32)
);

impl LayerId {
    /// The id as an index into per-layer vectors.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl Stage {
    /// The stage as an index into per-stage vectors.
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// The stage whose input is this one's output.
    pub fn next(self) -> Stage {
        Stage(self.0 + 1)
    }
}

impl Step {
    /// The step after this one.
    pub fn next(self) -> Step {
        Step(self.0 + 1)
    }
}

/// A part of a layer's gradient that is complete at once: an index into
/// [`LayerTable::pieces`](crate::LayerTable::pieces).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PieceId {
    pub layer: LayerId,
    pub part: u32,
}

/// One of the two on-disk versions of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Slot {
    A,
    B,
}

impl Slot {
    /// The slot that is not this one.
    pub fn other(self) -> Slot {
        match self {
            Slot::A => Slot::B,
            Slot::B => Slot::A,
        }
    }

    /// Name of the slot's directory.
    pub fn name(self) -> &'static str {
        match self {
            Slot::A => "a",
            Slot::B => "b",
        }
    }
}
