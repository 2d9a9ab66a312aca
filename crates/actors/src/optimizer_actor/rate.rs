//! How fast the optimizer's arithmetic goes, for whoever plans.

use std::sync::Arc;
use std::time::Instant;

use compute::Gradient;
use model::{Budget, BudgetError, HostBytes, LayerId, LayerTable, StateLayout};
use optim::AdamW;
use rayon::prelude::*;
use store::StateChunk;

use super::chunk::{self, GradientPart, Rule};
use super::shadow::Shadow;
use crate::reply::Failure;

/// Passes of which the fastest counts.
const ROUNDS: usize = 5;

/// Parameters per second that AdamW, hashing included, gets through on all threads of the calling pool
/// with state in `layout`; `table`: a model whose first decoder layer is updated.
///
/// # Errors
/// `Failure::Memory` where a few chunks do not fit `budget`.
pub fn optimizer_rate(
    table: &LayerTable,
    layout: StateLayout,
    budget: &Budget,
) -> Result<f64, Failure> {
    let layer = table.layer(LayerId(1));
    let elements = layer.elements();
    let chunks: Vec<usize> = (0..model::chunk_count(elements)).collect();
    let state = |chunk: usize| {
        let len = model::chunk_elements(elements, chunk).len();
        let mut state = StateChunk::unwritten(layout, len, budget)?;
        state.planes_mut().iter_mut().for_each(|plane| plane.bytes_mut().fill(0x11));
        Ok::<_, BudgetError>(state)
    };
    let states = chunks.iter().map(|&c| state(c)).collect::<Result<Vec<_>, _>>()?;
    let mut gradient = HostBytes::zeroed(elements * 4);
    gradient.f32s_mut().iter_mut().enumerate().for_each(|(i, g)| *g = (i % 13) as f32 * 1e-3);
    let gradient = Arc::new(Gradient::Dense { first: 0, values: gradient });
    let adamw = AdamW { lr: 1e-5, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
    let (shadow, prepared) = (Shadow::default(), adamw.prepare(9, 1.0));
    let rule = Rule { prepared, t: 9, shadow: &shadow, rounding: 1, weigh: false };
    let mut best = f64::MAX;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        chunks.par_iter().zip(&states).try_for_each(|(&chunk, state)| {
            let gradient = GradientPart { dense: Some(Arc::clone(&gradient)), rows: None };
            chunk::update(layer, chunk, &rule, state, &gradient, budget).map(|_| ())
        })?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(elements as f64 / best)
}
