//! [`Weights`]: weights as they come from a store, in the planes of its layout.

use crate::planes::{from_bf16_into, join_into, split_into, to_bf16};
use crate::{HostBytes, PlaneType, Precision, StateLayout};

/// Weights of one contiguous part of a layer.
#[derive(Debug)]
pub enum Weights {
    /// float32
    F32(HostBytes),
    /// bfloat16
    Bf16(HostBytes),
    /// float32 as its nearest bfloat16 and the rest.
    Split { high: HostBytes, low: HostBytes },
}

impl Weights {
    /// From the blocks of the planes that [`StateLayout::weight_planes`] lists.
    ///
    /// # Panics
    /// On another number of blocks: a programmer's error.
    pub fn from_planes(
        layout: StateLayout,
        precision: Precision,
        blocks: impl IntoIterator<Item = HostBytes>,
    ) -> Weights {
        let mut blocks = blocks.into_iter();
        let planes = layout.weight_planes(precision);
        match (planes[0].dtype, blocks.next(), blocks.next()) {
            (PlaneType::F32, Some(values), None) => Weights::F32(values),
            (_, Some(values), None) if planes.len() == 1 => Weights::Bf16(values),
            (_, Some(high), Some(low)) if planes.len() == 2 => Weights::Split { high, low },
            _ => panic!("{} planes of weights expected", planes.len()),
        }
    }

    /// Planes that hold `values` as well as `layout` can: exactly, or the nearest bfloat16.
    pub fn from_f32(layout: StateLayout, values: &[f32]) -> Weights {
        let planes = layout.weight_planes(Precision::Exact);
        let mut blocks: Vec<HostBytes> =
            planes.iter().map(|spec| HostBytes::zeroed(spec.bytes(values.len()))).collect();
        match blocks.as_mut_slice() {
            [block] if planes[0].dtype == PlaneType::F32 => {
                block.f32s_mut().copy_from_slice(values);
            }
            [block] => {
                block.u16s_mut().iter_mut().zip(values).for_each(|(to, v)| *to = to_bf16(*v));
            }
            [high, low] => split_into(values, high.u16s_mut(), low.u16s_mut()),
            _ => panic!("weights have one plane or two"),
        }
        Weights::from_planes(layout, Precision::Exact, blocks)
    }

    /// Number of weights.
    pub fn len(&self) -> usize {
        match self {
            Weights::F32(values) => values.len() / 4,
            Weights::Bf16(values) => values.len() / 2,
            Weights::Split { high, .. } => high.len() / 2,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The blocks, in the order of their planes.
    pub fn blocks(&self) -> impl Iterator<Item = &HostBytes> {
        let (first, second) = match self {
            Weights::F32(values) | Weights::Bf16(values) => (values, None),
            Weights::Split { high, low } => (high, Some(low)),
        };
        std::iter::once(first).chain(second)
    }

    /// [`Weights::blocks`], given away.
    pub fn into_blocks(self) -> Vec<HostBytes> {
        match self {
            Weights::F32(values) | Weights::Bf16(values) => vec![values],
            Weights::Split { high, low } => vec![high, low],
        }
    }

    /// Writes the weights from `start` on, as many as `to` has room for, as float32.
    ///
    /// # Panics
    /// Beyond the last weight: a programmer's error.
    pub fn copy_f32(&self, start: usize, to: &mut [f32]) {
        let range = start..start + to.len();
        match self {
            Weights::F32(values) => to.copy_from_slice(&values.f32s()[range]),
            Weights::Bf16(values) => from_bf16_into(&values.u16s()[range], to),
            Weights::Split { high, low } => {
                join_into(&high.u16s()[range.clone()], &low.u16s()[range], to);
            }
        }
    }

    /// The weights as float32: the block itself, or one of the heap.
    pub fn into_f32(self) -> HostBytes {
        match self {
            Weights::F32(values) => values,
            other => {
                let mut values = HostBytes::zeroed(other.len() * 4);
                other.copy_f32(0, values.f32s_mut());
                values
            }
        }
    }
}
