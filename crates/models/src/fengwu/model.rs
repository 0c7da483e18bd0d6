//! FengWu.

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;
use tch::Tensor;

use super::layers::{Decoder, Encoder, Geometry, VARIABLES};
use super::{FengwuConfig, MODEL};
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::model::Model;
use crate::windows::EarthStage;

/// Variables at the surface.
const SURFACE: i64 = 4;
/// Probability of each of the fuser's blocks to be dropped in training.
const FUSER_DROP_PATH: [f64; 6] = [0.2; 6];

/// FengWu: Chen et al., *FengWu: Pushing the Skillful Global Medium-range Weather Forecast beyond 10 Days Lead*,
/// arXiv:2304.02948, as PhysicsNeMo builds it.
///
/// The input has 4 + 5 L channels: 4 variables at the surface, then geopotential z, humidity r, wind u and v and temperature t on L =
/// `pressure_level` levels each. With S for stages of blocks, for each of the six fields i,
///
/// ```text
/// sᵢ = Sᵢ(patches of xᵢ)                     2 blocks of embed_dim features
/// hᵢ = S′ᵢ(down(sᵢ))                         6 blocks, half the rows and columns, twice the features
/// f = F([h₁, …, h₆] as levels)               6 blocks over all fields
/// yᵢ = convᵀ([D′ᵢ(up(Dᵢ(fᵢ))), sᵢ])          6 and 2 blocks
/// ```
///
/// Blocks are those of [`Pangu`](crate::Pangu); those of S and D are over rows and columns only. Odd blocks shift
/// their windows by (3, 6), in F by (1, 3, 6), whatever the extents of a window. In training, blocks are dropped with
/// probabilities that grow to 0.2, and in F with 0.2 (Huang et al., arXiv:1603.09382). As in PhysicsNeMo, the grid is
/// padded to multiples of the window after the norm, the padding zeros are keys of the attention, and longitude is
/// not periodic.
///
/// Outputs: `surface` `[batch, 4, lat, lon]`; `z`, `r`, `u`, `v` and `t`, `[batch, L, lat, lon]`; and for training `fields` with all
/// of them, in the input's order.
///
/// State dict: `encoder_{name}`, `fuser.blocks.{i}` and `decoder_{name}` for the names of the outputs. The masks of odd blocks,
/// `attn_mask`, are computed, not stored. PhysicsNeMo's `earth_position_index` is left out.
///
/// ```
/// use isobar_models::{Fengwu, FengwuConfig, Mode};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let config = FengwuConfig {
///     img_size: [9, 16],
///     pressure_level: 2,
///     embed_dim: 4,
///     patch_size: [2, 2],
///     num_heads: [1, 2, 2, 1],
///     window_size: [2, 2, 4],
///     ..FengwuConfig::default()
/// };
/// let model = Fengwu::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let [surface, z, ..] = model.forward(&Tensor::zeros([1, 14, 9, 16], (Kind::Float, Device::Cpu)), Mode::Eval)?;
/// assert_eq!(surface.size(), [1, 4, 9, 16]);
/// assert_eq!(z.size(), [1, 2, 9, 16]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Fengwu<A = Tensor> {
    extents: [i64; 2],
    levels: i64,
    encoders: Vec<Encoder<A>>,
    fuser: EarthStage<A>,
    decoders: Vec<Decoder<A>>,
}

impl<A: Array> Fengwu<A> {
    /// Names of the outputs of the model as a [`Model`], besides `fields`.
    pub const OUTPUTS: [&'static str; 6] = ["surface", "z", "r", "u", "v", "t"];

    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A size is 0 or too large, features that the heads do not divide; or `params` refuses a parameter.
    pub fn new(config: &FengwuConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let geometry = Geometry::new(config)?;
        let variables = Self::OUTPUTS;
        let channels = |i: usize| if i == 0 { SURFACE } else { geometry.levels };
        let encoders = (0..variables.len())
            .map(|i| Encoder::new((variables[i], channels(i)), &geometry, params))
            .collect::<Result<_>>()?;
        let inner = geometry.inner(VARIABLES, &FUSER_DROP_PATH);
        let fuser = EarthStage::new(&Checker(MODEL), "fuser.blocks", inner, params)?;
        let decoders = (0..variables.len())
            .map(|i| Decoder::new((variables[i], channels(i)), &geometry, params))
            .collect::<Result<_>>()?;
        Ok(Self { extents: geometry.extents, levels: geometry.levels, encoders, fuser, decoders })
    }

    /// Computes the six fields, in the order of [`OUTPUTS`](Self::OUTPUTS), `[batch, 4, lat, lon]` and `[batch, L, lat, lon]`, from
    /// `x` `[batch, 4 + 5 L, lat, lon]`.
    ///
    /// # Errors
    ///
    /// `x` has another shape, or an operator fails.
    pub fn forward(&self, x: &A, mode: Mode<'_>) -> Result<[A; 6]> {
        let (shape, [rows, columns]) = (x.shape(), self.extents);
        let inputs = SURFACE + 5 * self.levels;
        if shape.len() != 4 || shape[1..] != [inputs, rows, columns] {
            let want = format!("[batch, {inputs}, {rows}, {columns}]");
            return Err(Error::Input { model: MODEL, got: shape, want });
        }
        let sizes = [SURFACE, self.levels, self.levels, self.levels, self.levels, self.levels];
        let (mut tokens, mut skips) = (Vec::new(), Vec::new());
        for (encoder, x) in self.encoders.iter().zip(x.split(&sizes, 1)?) {
            let [inner, skip] = encoder.forward(&x, mode)?;
            tokens.push(inner);
            skips.push(skip);
        }
        let fused = self.fuser.forward(&A::cat(&tokens.iter().collect::<Vec<_>>(), 1)?, mode)?;
        let decode = |i: usize| self.decoders[i].forward(&fused.narrow(1, i as i64, 1)?, &skips[i], mode);
        Ok([decode(0)?, decode(1)?, decode(2)?, decode(3)?, decode(4)?, decode(5)?])
    }
}

impl<A: Array> Model<A> for Fengwu<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        let outputs = self.forward(x, mode)?;
        let fields = A::cat(&outputs.iter().collect::<Vec<_>>(), 1)?;
        let batch = Self::OUTPUTS.into_iter().zip(outputs);
        Ok(batch.fold(Batch::of_fields(fields), |batch, (name, output)| batch.with(name, output)))
    }
}
