//! Bytes that a rank may receive in a model, from what the model declares of its configuration ([`Traffic`]) and the layout.

use anyhow::Result;
use isobar_models::{ModelConfig, Signature, Split, Traffic};
use isobar_shard::rules::summed;

use super::bytes;
use crate::case::Case;
use crate::layout::{Layout, Placement, is_sharded};

/// Budget of a model's case.
#[derive(Debug, Default)]
pub(super) struct Budget {
    /// Bytes of a forward pass: twice what the model declares, as boundaries of strided and padded shards are rounded.
    pub(super) forward: u64,
    /// Bytes of both passes: half as many again, for the same reason.
    pub(super) both: u64,
    /// Those of `both` that align the inputs and sum their gradients.
    pub(super) inputs: u64,
}

/// Returns the budget of a case of this model; `None` for a model that declares none, and for sharded parameters without the extents of
/// the fields: they split features, which no model's bounds count.
pub(super) fn budget(config: &ModelConfig, case: &Case, layout: &Layout) -> Result<Option<Budget>> {
    if !layout.placements.values().any(|places| is_sharded(places)) {
        return Ok(Some(Budget::default()));
    }
    let inputs = Inputs::new(case, layout, config.signature())?;
    let Some(traffic) = config.traffic(&inputs.split) else { return Ok(None) };
    if inputs.splits_features {
        return Ok(None);
    }
    let (mut summed_up, mut has_gradients) = (inputs.sums, false);
    for name in &case.header.params {
        if case.get(&format!("grad.{name}")).is_some() {
            has_gradients = true;
            summed_up += summed(bytes(case.tensor(case.saved(name))?), layout.mesh.ranks() as u64);
        }
    }
    let element = case.header.inputs.iter().filter_map(|name| case.get(name));
    let element = element.map(|input| input.kind().elt_size_in_bytes()).max().unwrap_or(0) as f64;
    let passes = if has_gradients { 1.0 + Traffic::BACKWARD } else { 1.0 };
    let both_passes = |elements: f64| passes * elements * element;
    Ok(Some(Budget {
        forward: (2.0 * traffic.forward * element).ceil() as u64,
        both: (1.5 * both_passes(traffic.forward)).ceil() as u64 + traffic.parameter_uses * summed_up,
        inputs: both_passes(inputs.moved).ceil() as u64 + inputs.sums,
    }))
}

/// Traffic of a case's inputs, and how they split its fields.
struct Inputs {
    /// Split of the samples and of the spatial dims, along which at least one input is split.
    split: Split,
    /// Elements that a rank receives to redistribute the inputs to one layout.
    moved: f64,
    /// Bytes that a rank receives for the sums of gradients of inputs that are replicated where others are split.
    sums: u64,
    /// True if a sharded parameter has other extents than the fields.
    splits_features: bool,
}

impl Inputs {
    fn new(case: &Case, layout: &Layout, signature: Signature) -> Result<Self> {
        let mut domain = Domain { dims: Vec::new(), axes: vec![None; layout.mesh.axes().len()], samples: 0 };
        let (mut fields, mut splits_features) = (Vec::new(), false);
        for name in &case.header.inputs {
            let shape = case.tensor(name)?.size();
            let dims = (signature.domain)(shape.len());
            let first = domain.first_of(&shape, &dims);
            fields.push(domain.add(Input { name, shape, places: layout.of(name), dims, first }, layout));
        }
        for name in &case.header.params {
            let (shape, places) = (case.tensor(case.saved(name))?.size(), layout.of(name));
            if !is_sharded(&places) {
                continue;
            }
            let extents = domain.extents();
            // A matrix may end with the extent of a single dim by chance.
            splits_features |= extents.len() < 2 || !shape.ends_with(&extents);
            // A sharded table of positions fixes the layout of the fields.
            if let Some(first) = shape.len().checked_sub(extents.len()) {
                let dims = (first..shape.len()).collect();
                fields.push(domain.add(Input { name, shape, places, dims, first: 1 }, layout));
            }
        }
        let (mut moved, mut sums) = (0, 0);
        for input in &fields {
            let wanted = domain.placements_of(input);
            if wanted != input.places {
                moved += input.largest_shard(&wanted, layout).iter().product::<i64>();
            }
            if case.get(&format!("grad.{}", input.name)).is_some() && domain.splits_more(input) {
                sums += summed(bytes(case.tensor(input.name)?), layout.mesh.ranks() as u64);
            }
        }
        let split = Split::new(layout.mesh.ranks() as i64, &domain.dims, moved).with_samples(domain.samples);
        Ok(Self { split, moved: moved as f64, sums, splits_features })
    }
}

/// An input on a layout, or a sharded parameter.
struct Input<'a> {
    name: &'a str,
    shape: Vec<i64>,
    places: Vec<Placement>,
    /// Indices of its sample and spatial dims.
    dims: Vec<usize>,
    /// Offset of `dims` among the dims of the domain.
    first: usize,
}

impl Input<'_> {
    /// Returns the largest extent of a shard along each dim.
    fn largest_shard(&self, places: &[Placement], layout: &Layout) -> Vec<i64> {
        let parts = layout.parts(&self.shape, places);
        let largest = |dim: usize| (0..layout.mesh.ranks()).map(|rank| parts.shape_of(rank)[dim]).max();
        self.shape.iter().enumerate().map(|(dim, &extent)| largest(dim).unwrap_or(extent)).collect()
    }
}

/// Sample and spatial dims of all inputs.
struct Domain {
    /// Extent, largest shard and number of shards of each dim, from the input that is split most along it, or is the largest of those.
    dims: Vec<(i64, i64, i64)>,
    /// Dim of the domain that each axis of the mesh shards, from the first input that it shards.
    axes: Vec<Option<usize>>,
    /// Largest number of samples on a rank.
    samples: i64,
}

impl Domain {
    /// Returns the index of the first of an input's dims.
    fn first_of(&self, shape: &[i64], dims: &[usize]) -> usize {
        // Inputs without samples, such as constants of a grid, have the last dims.
        let lacks_samples = match (dims, self.dims.first()) {
            (&[samples, _, ..], Some(&(known, ..))) => shape[samples] != known,
            _ => false,
        };
        if lacks_samples { self.dims.len().saturating_sub(dims.len()) } else { 0 }
    }

    /// Returns the extents of the fields.
    fn extents(&self) -> Vec<i64> {
        self.dims.iter().skip(1).map(|&(extent, ..)| extent).collect()
    }

    /// Adds the dims of an input, and returns it.
    fn add<'a>(&mut self, input: Input<'a>, layout: &Layout) -> Input<'a> {
        let shards = input.largest_shard(&input.places, layout);
        for (at, &dim) in (input.first..).zip(&input.dims) {
            let mut count = 1;
            for (axis, place) in input.places.iter().enumerate() {
                if *place == Placement::Shard(dim) {
                    count *= layout.mesh.axes()[axis] as i64;
                    self.axes[axis].get_or_insert(at);
                }
            }
            if at == 0 {
                self.samples = self.samples.max(shards[dim]);
            }
            let side = (input.shape[dim], shards[dim], count);
            match self.dims.get_mut(at) {
                None => self.dims.push(side),
                // Of inputs with the same split, the larger: one cloud may have more points than another.
                Some(known) if (count, side.0) > (known.2, known.0) => *known = side,
                Some(_) => {}
            }
        }
        input
    }

    /// Returns the placements with which an input is split as the others are. Ranks cut their shards out of a replicated one.
    fn placements_of(&self, input: &Input<'_>) -> Vec<Placement> {
        let along = |at: usize| at.checked_sub(input.first).and_then(|at| input.dims.get(at)).copied();
        let place = |(place, axis): (&Placement, &Option<usize>)| match place {
            Placement::Replicate => Placement::Replicate,
            Placement::Shard(_) => axis.and_then(along).map_or(Placement::Replicate, Placement::Shard),
        };
        input.places.iter().zip(&self.axes).map(place).collect()
    }

    /// Returns whether an axis shards another input, and not this one.
    fn splits_more(&self, input: &Input<'_>) -> bool {
        let mut axes = input.places.iter().zip(&self.axes);
        axes.any(|(place, axis)| *place == Placement::Replicate && axis.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Sizes;
    use Placement::{Replicate, Shard};

    /// Returns the domain and the inputs of fields with these placements on 4 ranks.
    fn domain(shapes: &[(&[i64], Placement)]) -> (Domain, Vec<Input<'static>>) {
        let layout = Layout { sizes: Sizes::Chunk, ..Layout::replicated(&"4".parse().unwrap()) };
        let mut domain = Domain { dims: Vec::new(), axes: vec![None], samples: 0 };
        let inputs = shapes.iter().map(|&(shape, place)| {
            let dims = (Signature::default().domain)(shape.len());
            let first = domain.first_of(shape, &dims);
            domain.add(Input { name: "x", shape: shape.to_vec(), places: vec![place], dims, first }, &layout)
        });
        let inputs = inputs.collect();
        (domain, inputs)
    }

    #[test]
    fn only_inputs_that_are_split_otherwise_move() {
        let fields: &[i64] = &[2, 3, 8, 8];
        let (domain, inputs) =
            domain(&[(fields, Shard(2)), (fields, Shard(2)), (fields, Shard(3)), (fields, Replicate)]);
        let wanted: Vec<_> = inputs.iter().map(|input| domain.placements_of(input)[0]).collect();
        assert_eq!(wanted, [Shard(2), Shard(2), Shard(2), Replicate]);
        let summed: Vec<_> = inputs.iter().map(|input| domain.splits_more(input)).collect();
        assert_eq!(summed, [false, false, false, true]);
    }

    #[test]
    fn an_input_that_is_split_along_its_channels_moves() {
        let (domain, inputs) = domain(&[(&[4, 3, 8], Replicate), (&[4], Shard(0)), (&[4, 3, 8], Shard(1))]);
        let wanted: Vec<_> = inputs.iter().map(|input| domain.placements_of(input)[0]).collect();
        assert_eq!(wanted, [Replicate, Shard(0), Shard(0)]);
        // The first input has all samples.
        assert_eq!((domain.samples, domain.dims), (4, vec![(4, 1, 4), (8, 8, 1)]));
    }
}
