//! Bytes that a rank may receive in a model, from what the model declares of its configuration ([`Traffic`]) and the layout.

use anyhow::Result;
use isobar_models::{ModelConfig, Signature, Split, Traffic};
use isobar_shard::rules::summed;

use super::bytes;
use crate::case::Case;
use crate::layout::{Layout, Placement};

/// Budget of a model's case.
pub(super) struct Budget {
    /// Bytes of a forward pass: twice what the model declares, as boundaries of strided and padded shards are rounded.
    pub(super) forward: u64,
    /// Bytes of both passes.
    pub(super) both: u64,
}

/// The budget of a case of this model; `None` for a model that declares none, and for sharded parameters, which no model's bounds
/// count.
pub(super) fn budget(config: &ModelConfig, case: &Case, layout: &Layout) -> Result<Option<Budget>> {
    if layout.placements.values().flatten().all(|place| *place == Placement::Replicate) {
        return Ok(Some(Budget { forward: 0, both: 0 }));
    }
    let is_split = |name: &String| layout.of(name).iter().any(|place| *place != Placement::Replicate);
    if case.header.params.iter().any(is_split) {
        return Ok(None);
    }
    let Some(traffic) = config.traffic(&split(case, layout, config.signature())?) else { return Ok(None) };
    let gradients = case.header.params.iter().filter(|name| case.get(&format!("grad.{name}")).is_some());
    let sizes = gradients.map(|name| Ok(bytes(case.tensor(case.saved(name))?)));
    let sizes = sizes.collect::<Result<Vec<u64>>>()?;
    let element = case.header.inputs.iter().filter_map(|name| case.get(name));
    let element = element.map(|input| input.kind().elt_size_in_bytes()).max().unwrap_or(0);
    let parameters: u64 = sizes.iter().map(|&size| summed(size, layout.mesh.ranks() as u64)).sum();
    let forward = traffic.forward * element as f64;
    let backward = if sizes.is_empty() { 0.0 } else { Traffic::BACKWARD * forward };
    let both = (forward + backward).ceil() as u64 + traffic.parameter_uses * parameters;
    Ok(Some(Budget { forward: (2.0 * forward).ceil() as u64, both }))
}

/// The split of the samples and of the spatial dims, along which at least one input is split.
fn split(case: &Case, layout: &Layout, signature: Signature) -> Result<Split> {
    let (mut dims, mut elements): (Vec<(i64, i64, i64)>, i64) = (Vec::new(), 0);
    for name in &case.header.inputs {
        let shape = case.tensor(name)?.size();
        elements += shape.iter().product::<i64>();
        let parts = layout.parts(&shape, &layout.of(name));
        let side = |&dim: &usize| {
            let axes = layout.of(name).into_iter().zip(layout.mesh.axes());
            let shards = axes.filter(|(place, _)| *place == Placement::Shard(dim));
            let shards = shards.map(|(_, &ranks)| ranks as i64).product();
            let largest = (0..layout.mesh.ranks()).map(|rank| parts.shape_of(rank)[dim]).max();
            (shape[dim], largest.unwrap_or(shape[dim]), shards)
        };
        let own: Vec<_> = (signature.domain)(shape.len()).iter().map(side).collect();
        // Inputs without samples, such as constants of a grid, have the last dims.
        let first = match dims.len() {
            0 => 0,
            all if own.len() > 1 && own[0].0 != dims[0].0 => all.saturating_sub(own.len()),
            _ => 0,
        };
        for (at, side) in own.into_iter().enumerate() {
            match dims.get_mut(first + at) {
                None => dims.push(side),
                Some(known) if side.2 > known.2 => *known = side,
                Some(_) => {}
            }
        }
    }
    Ok(Split::new(layout.mesh.ranks() as i64, &dims, elements))
}
