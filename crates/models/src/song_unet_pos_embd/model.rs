//! SongUNet with positions.

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;
use tch::Tensor;

use super::patches::Patches;
use super::positions::Positions;
use super::{MODEL, SongUNetPosEmbdConfig};
use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::song_unet::SongUNet;

/// A [`SongUNet`] whose input has the positions of the points as further channels, behind the fields, as PhysicsNeMo's
/// `SongUNetPosEmbd`. Mardani et al., *Residual Corrective Diffusion Modeling for Km-scale Atmospheric Downscaling*,
/// arXiv:2309.15214 (CorrDiff), regress with it (`embedding_type = "zero"`) and denoise with it.
///
/// ```text
/// y = SongUNet([x, p(row, column)])
/// ```
///
/// `gridtype` says what p is. Patches of a large grid keep their place: `global_index` names the row and column of each of their points
/// on the grid of `img_resolution`. Functions of positions are computed in double precision for a rank's own points and rounded to
/// single precision; they need no communication and are not checked against the grid. Trained positions are split as the fields are,
/// and those of patches are fetched.
///
/// Arrays of a batch: `fields` `[batch, in_channels − N_grid_channels, height, width]`; the labels as for [`SongUNet`];
/// `global_index` `[patch, 2, height, width]` for fields that are patches, all of a sample one after another, so that `batch` counts
/// samples times patches.
///
/// State dict: that of [`SongUNet`]; `pos_embd` if `gridtype` is `learnable`.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_models::{Batch, Mode, SongUNetConfig, SongUNetPosEmbd, SongUNetPosEmbdConfig};
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// // One channel of fields, four of positions.
/// let network = SongUNetConfig { model_channels: 8, channel_mult: vec![1, 2], num_blocks: 1, ..SongUNetConfig::new([16, 16], 5, 2) };
/// let config = SongUNetPosEmbdConfig::new(network);
/// let model = SongUNetPosEmbd::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// // Two patches of 8 x 8 points.
/// let x = Tensor::zeros([2, 1, 8, 8], (Kind::Float, Device::Cpu));
/// let others = Batch::default()
///     .with("noise_labels", Tensor::from_slice(&[0.3f32]))
///     .with("global_index", Tensor::zeros([2, 2, 8, 8], (Kind::Int64, Device::Cpu)));
/// assert_eq!(model.forward(&x, &others, Mode::Eval)?.size(), [2, 2, 8, 8]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct SongUNetPosEmbd<A = Tensor> {
    grid: [i64; 2],
    positions: Positions<A>,
    network: SongUNet<A>,
}

impl<A: Array> SongUNetPosEmbd<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// Those of [`SongUNet::new`](crate::SongUNet::new); channels of positions that do not fit `gridtype`; no channel left for fields.
    pub fn new(config: &SongUNetPosEmbdConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        config.check_own()?;
        let network = SongUNet::new(&config.network, params)?;
        let grid = network.grid();
        let positions = Positions::new(&config.positions, grid, params)?;
        Ok(Self { grid, positions, network })
    }

    /// Computes `[batch, out_channels, height, width]` from fields `x`. `others` are the labels and `global_index`, as far as there are
    /// any.
    ///
    /// # Errors
    ///
    /// Arrays of other shapes, labels that are missing, points outside the grid of trained positions, or an operator that fails.
    pub fn forward(&self, x: &A, others: &Batch<A>, mode: Mode<'_>) -> Result<A> {
        let inputs = self.network.inputs() - self.positions.channels();
        check_channels(MODEL, x, inputs)?;
        let patches = Patches::of(MODEL, self.grid, x, others)?;
        match self.positions.at_points(x, &patches)? {
            Some(positions) => self.network.forward_with_labels(&A::cat(&[x, &positions], 1)?, others, mode),
            None => self.network.forward_with_labels(x, others, mode),
        }
    }
}

/// Checks for fields of so many channels in two dims.
pub(crate) fn check_channels<A: Array>(model: &'static str, x: &A, inputs: i64) -> Result<()> {
    let got = x.shape();
    match got.len() == 4 && got[1] == inputs {
        true => Ok(()),
        false => Err(Error::Input { model, got, want: format!("[batch, {inputs}, height, width]") }),
    }
}

impl<A: Array> Model<A> for SongUNetPosEmbd<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        Ok(Batch::of_fields(self.forward(x, batch, mode)?))
    }
}
