//! Traffic of the HEALPix U-Net: strips around faces, and halos.

use super::HealpixUNetConfig;
use super::plan::Plan;
use super::shape::BlockPlan;
use crate::traffic::{Grid, Split, Traffic};

/// Each convolution receives the strips around the rank's own parts of faces (at their corners of two elements), and the rows of the
/// padded faces beside them; poolings and upsamplings the rows by which boundaries are rounded. Every step runs the network.
pub(super) fn of(config: &HealpixUNetConfig, split: &Split) -> Option<Traffic> {
    let plan = Plan::new(config).ok()?;
    let fields = split.grid(2);
    let levels = plan.down.len();
    let at = |level: usize| Some(fields.coarser(plan.factor.checked_pow(level as u32)?));
    let mut elements = block(&plan.last, &fields);
    for (level, of_level) in plan.down.iter().enumerate() {
        let grid = at(level)?;
        elements += block(of_level, &grid) + grid.halo(2 * plan.factor) * of_level.outputs as f64;
    }
    for (level, of_level) in plan.up.iter().enumerate() {
        let grid = at(levels - 1 - level)?;
        elements += block(of_level, &grid) + grid.halo(2 * plan.factor) * (2 * of_level.inputs) as f64;
        if let Some(kernel) = plan.recurrence {
            let reach = (kernel - 1) / 2;
            elements += (4 * of_level.outputs) as f64 * (grid.strips(reach, 2) + grid.halo(2 * reach));
        }
    }
    elements += fields.regrouped() * (plan.inputs() + 2 * plan.last.outputs) as f64;
    // Coupled fields have their faces in another dim, and are resharded first.
    elements += fields.regrouped() * plan.coupled as f64;
    Some(split.aligned().and(plan.steps as f64 * elements).uses(plan.steps as u64))
}

fn block(plan: &BlockPlan, grid: &Grid) -> f64 {
    let convs = plan.units().into_iter().flat_map(|unit| unit.shapes);
    let channels: i64 = convs.filter(|(_, kernel)| *kernel > 1).map(|([inputs, _], _)| inputs).sum();
    channels as f64 * (grid.strips(plan.padding(), 2) + grid.halo(2 * plan.padding()))
}
