//! From fields to tokens on latent levels.

use isobar_array::{Array, Conv, Reduction, kernel};
use isobar_nn::{LayerNorm, Linear};
use isobar_shard::{Init, Params, Placement};
use tch::Tensor;

use super::expansion::{self, Coordinate, LEAD_TIME, LEVEL, POSITION, SIZE};
use super::geometry::Geometry;
use super::perceiver::{Net, Perceiver, PerceiverOptions, linear};
use crate::error::Result;
use crate::layers::constant;

/// Encoder: patches of each level, a perceiver over the levels, and embeddings of place, size and times.
#[derive(Debug)]
pub(super) struct Encoder<A> {
    geometry: Geometry,
    surface: Patches<A>,
    statics: Vec<A>,
    levels: Patches<A>,
    latents: A,
    surf_level_encoding: A,
    surf_mlp: Net<A>,
    surf_norm: LayerNorm<A>,
    level_agg: Perceiver<A>,
    atmos_levels_embed: Linear<A>,
    places: [Places<A>; 2],
    lead_time_embed: Linear<A>,
    absolute_time_embed: Linear<A>,
}

/// Kernels of variables, each for all frames of the history, `[width, 1, frames, patch, patch]`, and a bias.
#[derive(Debug)]
struct Patches<A> {
    weights: Vec<A>,
    bias: A,
}

impl<A: Array> Patches<A> {
    fn new(geometry: &Geometry, names: &[String], params: &mut impl Params<Array = A>) -> Result<Self> {
        let Geometry { width, patch, history, .. } = *geometry;
        let start = || Init::FanIn(history * patch * patch);
        let shape = [width, 1, history, patch, patch];
        let weight =
            |name: &String| params.param(&format!("weights.{name}"), &shape, start(), Placement::Replicate);
        let weights = names.iter().map(weight).collect::<Result<_, _>>()?;
        Ok(Self { weights, bias: params.param("bias", &[width], start(), Placement::Replicate)? })
    }

    /// The kernel `[width, frames · variables, patch, patch]`, frame by frame.
    fn kernel(&self, geometry: &Geometry) -> Result<A> {
        let Geometry { width, patch, history, .. } = *geometry;
        let all = A::cat(&self.weights.iter().collect::<Vec<_>>(), 1)?;
        let channels = history * self.weights.len() as i64;
        Ok(all.permute(&[0, 2, 1, 3, 4])?.reshape(&[width, channels, patch, patch])?)
    }
}

/// W e(place) + b of the expansion e of the places of patches, or of their sizes.
#[derive(Debug)]
struct Places<A> {
    weight: A,
    bias: A,
}

impl<A: Array> Places<A> {
    fn new(width: i64, params: &mut impl Params<Array = A>) -> Result<Self> {
        let init = Init::TruncNormal { std: 0.02 };
        let weight = params.param("weight", &[width, width], init, Placement::Replicate)?;
        Ok(Self { weight, bias: params.param("bias", &[width], Init::Constant(0.0), Placement::Replicate)? })
    }

    /// Adds the embedding to tokens `[batch, levels, rows, columns, width]`. `expand` gives `[rows, columns, width]` from the indices
    /// of rows and columns; each rank calls it with its own.
    fn add(&self, tokens: &A, expand: impl Fn(&Tensor, &Tensor) -> Expanded) -> Result<A> {
        let embed = |weight: &Tensor, at: &[Tensor]| -> Expanded {
            let [_, _, rows, columns] = at else { return weight.f_reshape([0]) };
            let expansion = expand(&rows.f_to(weight.device())?, &columns.f_to(weight.device())?)?;
            let embedded = expansion.f_to_kind(weight.kind())?.f_matmul(&weight.f_tr()?)?;
            embedded.f_unsqueeze(0)?.f_unsqueeze(0)
        };
        let named = |weight: &Tensor, at: &[Tensor]| kernel::named("places", &[weight], embed(weight, at));
        Ok(tokens.add(&self.weight.on_shards_of(tokens, 4, &named)?)?.add(&self.bias)?)
    }
}

type Expanded = Result<Tensor, tch::TchError>;

impl<A: Array> Encoder<A> {
    pub(super) fn new(
        geometry: &Geometry,
        [surface, statics, upper]: [&[String]; 3],
        depth: usize,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let width = geometry.width;
        let all = [surface, statics].concat();
        let mut surface_patches = Patches::new(geometry, &all, &mut params.scope("surf_token_embeds"))?;
        let statics = surface_patches.weights.split_off(surface.len());
        let levels = Patches::new(geometry, upper, &mut params.scope("atmos_token_embeds"))?;
        let init = || Init::TruncNormal { std: 0.02 };
        let latents = [geometry.latent_levels - 1, width];
        let latents = params.param("atmos_latents", &latents, init(), Placement::Replicate)?;
        let surf_level_encoding =
            params.param("surf_level_encoding", &[width], init(), Placement::Replicate)?;
        let surf_mlp = Net::new(width, geometry.hidden(width), &mut params.scope("surf_mlp"))?;
        let surf_norm = LayerNorm::new(&[width], &mut params.scope("surf_norm"))?;
        let hidden = geometry.hidden(width);
        let options = PerceiverOptions { width, heads: geometry.heads, hidden, depth };
        let level_agg = Perceiver::new(options, &mut params.scope("level_agg"))?;
        let mut embed = |name: &str| linear([width; 2], true, &mut params.scope(name));
        let atmos_levels_embed = embed("atmos_levels_embed")?;
        let lead_time_embed = embed("lead_time_embed")?;
        let absolute_time_embed = embed("absolute_time_embed")?;
        let position = Places::new(width, &mut params.scope("pos_embed"))?;
        let places = [position, Places::new(width, &mut params.scope("scale_embed"))?];
        Ok(Self {
            geometry: geometry.clone(),
            surface: surface_patches,
            statics,
            levels,
            latents,
            surf_level_encoding,
            surf_mlp,
            surf_norm,
            level_agg,
            atmos_levels_embed,
            places,
            lead_time_embed,
            absolute_time_embed,
        })
    }

    /// Computes tokens `[batch, latent level, row, column, width]` from fields and times; see [`Aurora`](super::Aurora).
    pub(super) fn forward(&self, x: &A, times: &A) -> Result<A> {
        let geometry = &self.geometry;
        let surface = self.embed_surface(x)?;
        let upper = self.embed_levels(x)?;
        let upper = self.level_agg.forward(&self.latents, &upper)?.permute(&[0, 3, 1, 2, 4])?;
        let mut tokens = A::cat(&[&surface.unsqueeze(1)?, &upper], 1)?;

        let width = geometry.width;
        let [latitude, longitude] = [0, 1].map(|dim| geometry.coordinate(dim));
        let [position, size] = &self.places;
        tokens =
            position.add(&tokens, |rows, columns| positions(&latitude, &longitude, rows, columns, width))?;
        tokens = size.add(&tokens, |rows, _| {
            let areas = expansion::root_areas(rows, &latitude, &longitude)?;
            expansion::of_tensor(&areas.f_unsqueeze(-1)?, SIZE, width)
        })?;
        let lead = expansion::of_numbers(&[geometry.lead_time], LEAD_TIME, width);
        let lead = self.lead_time_embed.forward(&constant(&lead, &[1, width], &tokens)?)?;
        let times = expansion::of_times(times, width)?.to_kind(tokens.kind())?;
        let times = self.absolute_time_embed.forward(&times)?.add(&lead)?;
        Ok(tokens.add(&times.reshape(&[times.extent(0)?, 1, 1, 1, width])?)?)
    }

    /// Tokens of the surface, `[batch, row, column, width]`.
    fn embed_surface(&self, x: &A) -> Result<A> {
        let geometry = &self.geometry;
        let Geometry { history, surface, statics, patch, rows, columns, .. } = *geometry;
        let frames = self.frames(x)?.narrow(2, 0, surface)?;
        let mut fields = frames.reshape(&[x.extent(0)?, history * surface, rows, columns])?;
        let mut kernel = self.surface.kernel(geometry)?;
        if statics > 0 {
            // Static fields are the same in all frames.
            let given = x.narrow(1, history * geometry.frame(), statics)?;
            fields = A::cat(&[&fields, &given], 1)?;
            let kernels =
                A::cat(&self.statics.iter().collect::<Vec<_>>(), 1)?.reduce(Reduction::Sum, &[2], false)?;
            kernel = A::cat(&[&kernel, &kernels], 1)?;
        }
        let conv = Conv { stride: vec![patch, patch], ..Conv::default() };
        let tokens = fields.conv(&kernel, Some(&self.surface.bias), &conv)?.permute(&[0, 2, 3, 1])?;
        let tokens = tokens.add(&self.surf_level_encoding)?;
        Ok(tokens.add(&self.surf_norm.forward(&self.surf_mlp.forward(&tokens)?)?)?)
    }

    /// Tokens of the pressure levels, `[batch, row, column, level, width]`.
    fn embed_levels(&self, x: &A) -> Result<A> {
        let geometry = &self.geometry;
        let Geometry { history, surface, upper, patch, rows, columns, width, .. } = *geometry;
        let count = geometry.levels.len() as i64;
        let fields = self.frames(x)?.narrow(2, surface, upper * count)?;
        let fields = fields.reshape(&[x.extent(0)?, history * upper, count, rows, columns])?;
        let kernel = self.levels.kernel(geometry)?.unsqueeze(2)?;
        let conv = Conv { stride: vec![1, patch, patch], ..Conv::default() };
        let tokens = fields.conv(&kernel, Some(&self.levels.bias), &conv)?.permute(&[0, 3, 4, 2, 1])?;
        let levels = expansion::of_numbers(&geometry.levels, LEVEL, width);
        let levels = self.atmos_levels_embed.forward(&constant(&levels, &[count, width], &tokens)?)?;
        Ok(tokens.add(&levels)?)
    }

    /// The frames of the history, `[batch, frame, channel, row, column]`.
    fn frames(&self, x: &A) -> Result<A> {
        let Geometry { history, rows, columns, .. } = self.geometry;
        let frame = self.geometry.frame();
        Ok(x.narrow(1, 0, history * frame)?.reshape(&[x.extent(0)?, history, frame, rows, columns])?)
    }
}

/// Expansions `[rows, columns, width]` of the middles of patches: half for the latitude, half for the longitude.
fn positions(
    latitude: &Coordinate,
    longitude: &Coordinate,
    rows: &Tensor,
    columns: &Tensor,
    width: i64,
) -> Expanded {
    let grid = [rows.size()[0], columns.size()[0], width / 2];
    let rows = expansion::of_tensor(&latitude.middles(rows)?, POSITION, width / 2)?;
    let columns = expansion::of_tensor(&longitude.middles(columns)?, POSITION, width / 2)?;
    Tensor::f_cat(
        &[rows.f_unsqueeze(1)?.f_expand(grid, false)?, columns.f_unsqueeze(0)?.f_expand(grid, false)?],
        -1,
    )
}
