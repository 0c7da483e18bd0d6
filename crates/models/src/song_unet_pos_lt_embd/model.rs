//! SongUNet with positions and lead times.

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::{Init, Params, Placement};
use tch::{Kind, Tensor};

use super::{MODEL, SongUNetPosLtEmbdConfig};
use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::song_unet::SongUNet;
use crate::song_unet_pos_embd::{Patches, Positions, check_channels};

/// Name of the array of a batch with the numbers of lead times.
pub(crate) const LEAD_TIME_LABEL: &str = "lead_time_label";

/// A [`SongUNetPosEmbd`](crate::SongUNetPosEmbd) that also reads trained fields of each sample's lead time, as PhysicsNeMo's
/// `SongUNetPosLtEmbd`.
///
/// ```text
/// y = SongUNet([x, p(row, column), l(lead time, row, column)])
/// ```
///
/// The channels `prob_channels` of y are each multiplied by a trained number; evaluation then gives their softmax.
///
/// Arrays of a batch: `lead_time_label` `[sample]`, the numbers of the lead times, from 0 to `lead_time_steps` − 1; the others are those of
/// [`SongUNetPosEmbd`](crate::SongUNetPosEmbd).
///
/// State dict: that of [`SongUNet`]; `pos_embd` if `gridtype` is `learnable`; `lt_embd`; `scalar` with `prob_channels`.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_models::{Batch, Mode, SongUNetConfig, SongUNetPosLtEmbd, SongUNetPosLtEmbdConfig};
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// // One channel of fields, four of positions, two of lead times.
/// let network = SongUNetConfig { model_channels: 8, channel_mult: vec![1, 2], num_blocks: 1, ..SongUNetConfig::new([8, 8], 7, 2) };
/// let config = SongUNetPosLtEmbdConfig::new(2, network);
/// let model = SongUNetPosLtEmbd::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let x = Tensor::zeros([2, 1, 8, 8], (Kind::Float, Device::Cpu));
/// let others = Batch::default()
///     .with("noise_labels", Tensor::from_slice(&[0.3f32]))
///     .with("lead_time_label", Tensor::from_slice(&[3i64, 8]));
/// assert_eq!(model.forward(&x, &others, Mode::Eval)?.size(), [2, 2, 8, 8]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct SongUNetPosLtEmbd<A = Tensor> {
    grid: [i64; 2],
    positions: Positions<A>,
    /// `[lead time, channel, height, width]`.
    lead_times: A,
    /// Channels that are probabilities, and their factors `[1, channel, 1, 1]`.
    probabilities: Option<(Vec<i64>, A)>,
    network: SongUNet<A>,
}

impl<A: Array> SongUNetPosLtEmbd<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// Those of [`SongUNetPosEmbd::new`](crate::SongUNetPosEmbd::new); no lead time, or none of its channels; channels of probabilities
    /// that the output lacks.
    pub fn new(config: &SongUNetPosLtEmbdConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        config.check_own()?;
        let network = SongUNet::new(&config.network, params)?;
        let grid = network.grid();
        let positions = Positions::new(&config.positions, grid, params)?;
        let lead = &config.lead_times;
        let shape = [lead.lead_time_steps as i64, lead.lead_time_channels as i64, grid[0], grid[1]];
        let start = Init::Normal { mean: 0.0, std: 1.0 };
        let lead_times = params.param("lt_embd", &shape, start, Placement::Replicate)?;
        let channels: Vec<i64> = lead.prob_channels.iter().map(|&channel| channel as i64).collect();
        let probabilities = match channels.len() {
            0 => None,
            count => {
                let shape = [1, count as i64, 1, 1];
                Some((channels, params.param("scalar", &shape, Init::Constant(1.0), Placement::Replicate)?))
            }
        };
        Ok(Self { grid, positions, lead_times, probabilities, network })
    }

    /// Computes `[batch, out_channels, height, width]` from fields `x`. `others` are the labels, lead times and `global_index`, as far
    /// as there are any.
    ///
    /// # Errors
    ///
    /// Arrays of other shapes, labels that are missing, a lead time or trained point that does not exist, or an operator that fails.
    pub fn forward(&self, x: &A, others: &Batch<A>, mode: Mode<'_>) -> Result<A> {
        let further = self.positions.channels() + self.lead_times.extent(1)?;
        check_channels(MODEL, x, self.network.inputs() - further)?;
        let patches = Patches::of(MODEL, self.grid, x, others)?;
        let label = others.require(MODEL, LEAD_TIME_LABEL)?;
        let samples = patches.samples;
        let got = label.shape();
        if got != [samples] && got != [samples, 1] {
            let want = format!("[{samples}] for {LEAD_TIME_LABEL}");
            return Err(Error::Input { model: MODEL, got, want });
        }
        let label = label.detach()?.reshape(&[samples])?.to_kind(Kind::Int64)?;
        let positions = self.positions.at_points(x, &patches)?;
        let lead_time = self.lead_time(&patches, &label)?.to_kind(x.kind())?;
        let inputs: Vec<&A> = [Some(x), positions.as_ref(), Some(&lead_time)].into_iter().flatten().collect();
        let y = self.network.forward_with_labels(&A::cat(&inputs, 1)?, others, mode)?;
        match &self.probabilities {
            Some((channels, factors)) => probabilities(&y, channels, factors, mode),
            None => Ok(y),
        }
    }

    /// Fields of the samples' lead times: `[sample · patch, channel, height, width]`.
    fn lead_time(&self, patches: &Patches<A>, label: &A) -> Result<A> {
        if patches.points.is_none() {
            return Ok(self.lead_times.index_select(0, label)?);
        }
        let shape = self.lead_times.shape();
        let (steps, channels) = (shape[0], shape[1]);
        // Points are picked for all lead times, so that the number of elements exchanged does not depend on the labels.
        let picked = patches.pick(&self.lead_times.reshape(&[steps * channels, shape[2], shape[3]])?)?;
        let own = picked.shape();
        let each = picked.reshape(&[own[0], steps, channels, own[2], own[3]])?.index_select(1, label)?;
        let all = [own[0] * patches.samples, channels, own[2], own[3]];
        Ok(each.transpose(0, 1)?.reshape(&all)?)
    }
}

/// Scales the logits of those channels, and in evaluation takes their softmax.
fn probabilities<A: Array>(y: &A, channels: &[i64], factors: &A, mode: Mode<'_>) -> Result<A> {
    let each = y.split(&vec![1; y.extent(1)? as usize], 1)?;
    let logits: Vec<&A> = channels.iter().filter_map(|&channel| each.get(channel as usize)).collect();
    let mut scaled = A::cat(&logits, 1)?.mul(&factors.to_kind(y.kind())?)?;
    if !mode.is_training() {
        scaled = scaled.softmax(1)?;
    }
    let scaled = scaled.split(&vec![1; channels.len()], 1)?;
    let place = |at: usize| channels.iter().position(|&channel| channel == at as i64);
    let all =
        each.iter().enumerate().map(|(at, own)| place(at).and_then(|place| scaled.get(place)).unwrap_or(own));
    Ok(A::cat(&all.collect::<Vec<_>>(), 1)?)
}

impl<A: Array> Model<A> for SongUNetPosLtEmbd<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        Ok(Batch::of_fields(self.forward(x, batch, mode)?))
    }
}
