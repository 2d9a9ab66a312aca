//! A store's state in another layout, chunk by chunk.

use model::{Budget, BudgetError, StateLayout};
use store::StateChunk;

use crate::planes::{self, Rounding};

/// Elements that are widened at a time: a multiple of a block.
const PIECE: usize = 16 << 10;

/// The `elements` parameters of `chunk` in `layout`: weights exactly or rounded to the nearest
/// bfloat16, moments as near as the layout can. `has_moments`: what the chunk says about them
/// counts; otherwise they are zero, as before a layer's first update.
pub fn relaid(
    chunk: &StateChunk,
    elements: usize,
    has_moments: bool,
    layout: StateLayout,
    budget: &Budget,
) -> Result<StateChunk, BudgetError> {
    let mut new = StateChunk::unwritten(layout, elements, budget)?;
    let mut wide = [vec![0.0; PIECE], vec![0.0; PIECE], vec![0.0; PIECE]];
    for start in (0..elements).step_by(PIECE) {
        let piece = start..(start + PIECE).min(elements);
        for (state, wide) in wide.iter_mut().enumerate() {
            let wide = &mut wide[..piece.len()];
            match has_moments || state == 0 {
                true => planes::widen(chunk, piece.clone(), state, wide),
                false => wide.fill(0.0),
            }
        }
        let wide = wide.each_ref().map(|wide| &wide[..piece.len()]);
        for (spec, block) in layout.planes().iter().zip(new.planes_mut()) {
            if planes::is_plain(layout, spec.plane.state()) {
                block.f32s_mut()[piece.clone()].copy_from_slice(wide[spec.plane.state()]);
            }
        }
        planes::narrow(&mut new, piece, Rounding::Nearest, wide);
    }
    Ok(new)
}

#[cfg(test)]
mod tests {
    use model::Plane;

    use super::*;

    const ELEMENTS: usize = PIECE + 700;

    fn chunk() -> StateChunk {
        let budget = Budget::new(1 << 30);
        let mut chunk = StateChunk::unwritten(StateLayout::F32, ELEMENTS, &budget).unwrap();
        for (state, block) in chunk.planes_mut().iter_mut().enumerate() {
            for (i, value) in block.f32s_mut().iter_mut().enumerate() {
                let wave = ((i * 7919 + state * 31) % 2003) as f32 / 1000.0 - 1.0;
                *value = if state == 2 { wave * wave * 1e-6 } else { wave * 0.03 };
            }
        }
        chunk
    }

    fn f32_of(chunk: &StateChunk, state: usize) -> Vec<f32> {
        let budget = Budget::new(1 << 30);
        let f32 = relaid(chunk, ELEMENTS, true, StateLayout::F32, &budget).unwrap();
        planes::plain(&f32, state).to_vec()
    }

    #[test]
    fn weights_stay_exact_or_become_the_nearest_bf16_and_moments_as_near_as_codes_are() {
        let budget = Budget::new(1 << 30);
        let chunk = chunk();
        for layout in StateLayout::ALL {
            let other = relaid(&chunk, ELEMENTS, true, layout, &budget).unwrap();
            let (weights, want) = (f32_of(&other, 0), f32_of(&chunk, 0));
            let rounded = |v: &f32| model::from_bf16(model::to_bf16(*v));
            match layout {
                StateLayout::Bf16Sr8 => {
                    assert!(weights.iter().copied().eq(want.iter().map(rounded)));
                }
                _ => assert_eq!(weights, want),
            }
            for state in [1, 2] {
                let (found, want) = (f32_of(&other, state), f32_of(&chunk, state));
                if !layout.has_codes() {
                    assert_eq!(found, want);
                    continue;
                }
                // Half of the widest distance between two codes of the top decade.
                let bound = if state == 1 { 0.9 / 64.0 } else { 0.9 / 128.0 };
                for (found, want) in found.chunks(256).zip(want.chunks(256)) {
                    let top = want.iter().fold(0.0f32, |top, v| top.max(v.abs()));
                    let near = |(f, w): (&f32, &f32)| (f - w).abs() <= bound * top * 0.51;
                    assert!(found.iter().zip(want).all(near), "{layout} {state}");
                }
            }
        }
    }

    #[test]
    fn without_moments_they_are_zero() {
        let budget = Budget::new(1 << 30);
        for layout in StateLayout::ALL {
            let new = relaid(&chunk(), ELEMENTS, false, layout, &budget).unwrap();
            for state in [1, 2] {
                assert!(f32_of(&new, state).iter().all(|v| *v == 0.0), "{layout}");
            }
            if layout.has_codes() {
                assert!(new.plane(Plane::ExpAvgScale).bytes().iter().all(|byte| *byte == 0));
            }
        }
    }
}
