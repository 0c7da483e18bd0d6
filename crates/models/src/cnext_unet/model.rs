//! The CNextU-net.

use isobar_array::Array;
use isobar_nn::{ConvNd, Mode};
use isobar_shard::Params;
use tch::Tensor;

use super::layers::{Blocks, Resample, same_extents};
use super::{CNextUNetConfig, MODEL};
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::model::Model;
use crate::size::MOST_HALVINGS;

/// The CNextU-net: Ohana et al., *The Well: a Large-Scale Collection of Diverse Physics Simulations for Machine Learning*,
/// arXiv:2412.00568, a U-Net of blocks of ConvNeXt (Liu et al., arXiv:2201.03545).
///
/// With B for blocks x + γ · W₂ gelu(W₁ layer_norm(conv₇(x))), conv₇ channel by channel, and n(x) = w · x / ‖x‖ over the channels of a
/// point,
///
/// ```text
/// h₀ = conv₃(x)
/// hᵢ₊₁ = conv₂(n(B(hᵢ)))                     half the extents, twice the channels; stages times
/// u = B(h_stages)
/// u ← convᵀ₂(n(B(u)))                        twice the extents, half the channels
/// u ← convᵀ₂(n(B(conv₁([u, hᵢ]))))           for i from stages − 1 down to 1
/// y = conv₃(u)
/// ```
///
/// h₀ is not used on the way up. Convolutions pad with zeros. Weights start as PyTorch's, γ with 10⁻⁶.
///
/// State dict: that of The Well's `UNetConvNext`. `….resample.block.0.bias` has no effect there; here it is a buffer.
///
/// ```
/// use isobar_models::{CNextUNet, CNextUNetConfig, Mode};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let config = CNextUNetConfig { stages: 2, init_features: 4, ..CNextUNetConfig::new(3, 2, &[8, 12]) };
/// let model = CNextUNet::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let y = model.forward(&Tensor::zeros([1, 3, 8, 12], (Kind::Float, Device::Cpu)), Mode::Eval)?;
/// assert_eq!(y.size(), [1, 2, 8, 12]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct CNextUNet<A = Tensor> {
    inputs: i64,
    extents: Vec<i64>,
    in_proj: ConvNd<A>,
    encoder: Vec<(Blocks<A>, Resample<A>)>,
    neck: Blocks<A>,
    decoder: Vec<Decoder<A>>,
    out_proj: ConvNd<A>,
}

#[derive(Debug)]
struct Decoder<A> {
    skip_proj: Option<ConvNd<A>>,
    blocks: Blocks<A>,
    resample: Resample<A>,
}

impl<A: Array> CNextUNet<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A size is 0, more than 16 stages, other than `n_spatial_dims` extents, extents that 2^`stages` does not divide; or `params`
    /// refuses a parameter.
    pub fn new(config: &CNextUNetConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let check = Checker(MODEL);
        let inputs = check.extent("dim_in", config.dim_in)?;
        let outputs = check.extent("dim_out", config.dim_out)?;
        let width = check.extent("init_features", config.init_features)?;
        let (dims, stages) = (config.n_spatial_dims, config.stages);
        check.ensure((1..=3).contains(&dims), || format!("n_spatial_dims is {dims}, expected 1 to 3"))?;
        check.ensure((1..=MOST_HALVINGS).contains(&stages), || {
            format!("stages is {stages}, expected 1 to {MOST_HALVINGS}")
        })?;
        let extents = &config.spatial_resolution;
        let fits = |&extent: &usize| extent > 0 && extent.is_multiple_of(1 << stages);
        check.ensure(extents.len() == dims && extents.iter().all(fits), || {
            format!(
                "spatial_resolution is {extents:?}, expected {dims} multiples of {} for {stages} stages",
                1 << stages
            )
        })?;

        let recomputes = config.gradient_checkpointing;
        let in_proj = same_extents([inputs, width], &vec![3; dims], &mut params.scope("in_proj"))?;
        let mut encoder = Vec::with_capacity(stages);
        for i in 0..stages {
            let (name, width) = (format!("encoder.{i}"), width << i);
            let blocks = Blocks::new(&name, (config.blocks_per_stage, width, dims), recomputes, params)?;
            let resample = Resample::down(width, dims, &mut params.scope(&format!("{name}.resample")))?;
            encoder.push((blocks, resample));
        }
        let neck = Blocks::new("neck", (config.blocks_at_neck, width << stages, dims), recomputes, params)?;
        let mut decoder = Vec::with_capacity(stages);
        for j in 0..stages {
            let (name, width) = (format!("decoder.{j}"), width << (stages - j));
            let skip_proj = match j {
                0 => None,
                _ => {
                    let params = &mut params.scope(&format!("{name}.skip_proj"));
                    Some(same_extents([2 * width, width], &vec![1; dims], params)?)
                }
            };
            let blocks = Blocks::new(&name, (config.blocks_per_stage, width, dims), recomputes, params)?;
            let resample = Resample::up(width, dims, &mut params.scope(&format!("{name}.resample")))?;
            decoder.push(Decoder { skip_proj, blocks, resample });
        }
        let out_proj = same_extents([width, outputs], &vec![3; dims], &mut params.scope("out_proj"))?;
        let extents = extents.iter().map(|&extent| extent as i64).collect();
        Ok(Self { inputs, extents, in_proj, encoder, neck, decoder, out_proj })
    }

    /// Computes `[batch, dim_out, extents…]` from `x` `[batch, dim_in, extents…]`, whose extents are `spatial_resolution`.
    ///
    /// # Errors
    ///
    /// `x` has another shape, or an operator fails.
    pub fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let shape = x.shape();
        if shape.len() != self.extents.len() + 2 || shape[1] != self.inputs || shape[2..] != self.extents {
            let want = format!("[batch, {}, {:?}]", self.inputs, self.extents);
            return Err(Error::Input { model: MODEL, got: shape, want });
        }
        let mut x = self.in_proj.forward(x)?;
        let mut skips = Vec::with_capacity(self.encoder.len());
        for (blocks, resample) in &self.encoder {
            skips.push(x.shallow_clone());
            x = resample.forward(&blocks.forward(&x, mode)?)?;
        }
        x = self.neck.forward(&x, mode)?;
        for Decoder { skip_proj, blocks, resample } in &self.decoder {
            if let Some(skip_proj) = skip_proj
                && let Some(skip) = skips.pop()
            {
                x = skip_proj.forward(&A::cat(&[&x, &skip], 1)?)?;
            }
            x = resample.forward(&blocks.forward(&x, mode)?)?;
        }
        Ok(self.out_proj.forward(&x)?)
    }
}

impl<A: Array> Model<A> for CNextUNet<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        Ok(Batch::of_fields(self.forward(x, mode)?))
    }
}
