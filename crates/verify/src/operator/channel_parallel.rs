//! The model whose channels are split over ranks: its layouts are sizes of the group `model_parallel`.

use anyhow::{Context, Result};
use isobar_array::Generator;
use isobar_models::{Architecture, DistributedAfno as Model, DistributedAfnoConfig, Error};
use isobar_shard::{ParallelRegion, ParamStore, Placement as ParamPlacement};

use super::{Entry, Forward, LocalTensor, Operator, Part, Pass, Rank, bytes, config, parameters};
use crate::case::{Case, Header};
use crate::layout::{Layout, Placement, Sizes};
use crate::mesh::Mesh;

const INPUT: &str = "input";
const OUTPUT: &str = "output";
const CHANNEL_DIM: usize = 1;

/// Along the last axis of the mesh the ranks share one model; along the others they do the same.
struct DistributedAfno;

inventory::submit! { Entry(&DistributedAfno) }

impl Operator for DistributedAfno {
    fn name(&self) -> &'static str {
        DistributedAfnoConfig::NAME
    }

    fn layouts(&self, _header: &Header, mesh: &Mesh) -> Result<Vec<Layout>> {
        Ok(vec![Layout { sizes: Sizes::Balanced, ..Layout::replicated(mesh) }])
    }

    fn must_refuse(&self, header: &Header, layout: &Layout) -> Result<Option<String>> {
        let config: DistributedAfnoConfig = config(header)?;
        let ranks = model_ranks(layout);
        let mut split = vec![("embed_dim", config.embed_dim), ("num_blocks", config.num_blocks)];
        split.extend(config.channel_parallel_inputs.then_some(("in_channels", config.in_channels)));
        let outputs = config.out_channels.unwrap_or(config.in_channels);
        split.extend(config.channel_parallel_outputs.then_some(("out_channels", outputs)));
        let uneven = split.into_iter().find(|(_, extent)| extent % ranks != 0);
        Ok(uneven.map(|(name, extent)| format!("{name} {extent} is not divisible by {ranks} ranks")))
    }

    fn forward(&self, rank: &Rank, case: &Case, layout: &Layout) -> Result<Forward> {
        let group = rank.axes.last().context("a mesh without axes")?.clone();
        let config: DistributedAfnoConfig = config(&case.header)?;
        let whole = case.tensor(INPUT)?;
        let channels =
            |parallel: bool| if parallel { Placement::Shard(CHANNEL_DIM) } else { Placement::Replicate };
        let places = along_model(layout, channels(config.channel_parallel_inputs));
        let input = LocalTensor::leaf(rank, case, INPUT, layout.parts(&whole.size(), &places))?;
        let store = ParamStore::new(Generator::new(0)).with_options(whole.kind(), whole.device());
        let mut store = store.with_region(ParallelRegion::new(group));
        let model = match Model::new(&config, &mut store) {
            Ok(model) => model,
            Err(error @ Error::Config { .. }) => return Ok(Forward::Refused(error.to_string())),
            Err(error) => return Err(error.into()),
        };
        store.load(&case.params()?)?;
        let output = model.forward(&input.tensor, Pass::of(&case.header).mode())?;

        let places = along_model(layout, channels(config.channel_parallel_outputs));
        let parts = layout.parts(&case.tensor(OUTPUT)?.size(), &places);
        let outputs = vec![LocalTensor { name: OUTPUT.to_owned(), tensor: output, part: Part::Of(parts) }];
        let mut leaves = vec![input];
        leaves.extend(parameters(&store, case, |parameter| {
            let place = match parameter.placement {
                ParamPlacement::Shard(dim) => Placement::Shard(dim),
                _ => Placement::Replicate,
            };
            layout.parts(&parameter.shape, &along_model(layout, place))
        }));
        Ok(Forward::Ran { outputs, leaves })
    }

    /// With P ranks and T the bytes of all channels of the tokens: each block and the head gather T, and each block
    /// reduces T to parts; backward does the reverse. Beside these the output is gathered where it is whole on all ranks,
    /// the gradients of the shared parameters are summed, and so are those of the input, or it is gathered and they are
    /// reduced to parts.
    fn budget(&self, case: &Case, layout: &Layout, _rank: &Rank) -> Result<u64> {
        let config: DistributedAfnoConfig = config(&case.header)?;
        let ranks = model_ranks(layout) as u64;
        if self.must_refuse(&case.header, layout)?.is_some() {
            return Ok(0);
        }
        let input = case.tensor(INPUT)?;
        let [height, width] = config.inp_shape.map(|extent| extent / config.patch_size);
        let elements = input.size()[0] as usize * config.embed_dim * height * width;
        let tokens = (elements * input.kind().elt_size_in_bytes()) as u64;
        let shared: u64 =
            case.params()?.iter().filter(|(name, _)| is_shared(name)).map(|(_, p)| bytes(p)).sum();
        let exchanged = (4 * config.depth as u64 + 2) * tokens * (ranks - 1) / ranks;
        let output = if config.channel_parallel_outputs { 0 } else { bytes(case.tensor(OUTPUT)?) };
        Ok(exchanged + output + (ranks - 1) * (bytes(input) + shared))
    }
}

/// `place` along the axis of the model, replicated along the others.
fn along_model(layout: &Layout, place: Placement) -> Vec<Placement> {
    let mut places = vec![Placement::Replicate; layout.mesh.axes().len()];
    if let Some(last) = places.last_mut() {
        *last = place;
    }
    places
}

fn model_ranks(layout: &Layout) -> usize {
    layout.mesh.axes().last().copied().unwrap_or(1)
}

/// Returns whether a parameter is replicated.
fn is_shared(name: &str) -> bool {
    [".norm1.", ".norm2.", ".mlp.b2", ".head."].iter().any(|part| name.contains(part))
}
