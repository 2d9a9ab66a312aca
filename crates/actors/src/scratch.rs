//! [`ScratchMap`]: where in the scratch file a parked input or a spilled gradient lies.

use model::{LayerId, Limits, Micro, PAGE_BYTES, Stage};

/// Places of one run; a place is used again by every step, after its last reader.
#[derive(Clone, Debug)]
pub(crate) struct ScratchMap {
    /// By layer.
    gradients: Vec<u64>,
    /// By stage.
    inputs: Vec<u64>,
    input_stride: u64,
    bytes: u64,
}

/// Bytes of the scratch file of a run within `limits`, of so many microbatches a step.
pub fn scratch_bytes(limits: &Limits, micros: usize) -> u64 {
    ScratchMap::new(limits, micros).bytes()
}

impl ScratchMap {
    pub(crate) fn new(limits: &Limits, micros: usize) -> ScratchMap {
        let mut end = 0;
        let mut place = |bytes: usize| {
            let start = end;
            end += bytes.next_multiple_of(PAGE_BYTES) as u64;
            start
        };
        let used = |flag: bool, bytes: usize| if flag { bytes } else { 0 };
        let gradients = limits.spilled.iter().zip(&limits.layer_gradient_bytes);
        let gradients = gradients.map(|(&s, &bytes)| place(used(s, bytes))).collect();
        let stride = limits.boundary_bytes.next_multiple_of(PAGE_BYTES);
        let mut inputs = vec![0; limits.parked.len()];
        for group in limits.parked_groups() {
            inputs[group].fill(place(stride * micros));
        }
        ScratchMap { gradients, inputs, input_stride: stride as u64, bytes: end }
    }

    /// Size of the scratch file; 0 when everything stays in RAM.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn gradient(&self, layer: LayerId) -> u64 {
        self.gradients[layer.index()]
    }

    pub(crate) fn input(&self, stage: Stage, micro: Micro) -> u64 {
        self.inputs[stage.index()] + u64::from(micro.0) * self.input_stride
    }
}
