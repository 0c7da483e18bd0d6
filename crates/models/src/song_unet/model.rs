//! SongUNet.

use isobar_array::{Array, Unary};
use isobar_nn::Mode;
use isobar_shard::{Init, Params, Placement};
use tch::Tensor;

use super::block::Block;
use super::embedding::{Embedding, Labels};
use super::levels::{Aux, Builder, Down, Entry, Up};
use super::plan::{Plan, Style};
use super::{MODEL, SongUNetConfig};
use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::layers::{Recompute, zeros};
use crate::model::Model;

/// Names of arrays of a batch, besides the fields.
pub(crate) const NOISE_LABELS: &str = "noise_labels";
pub(crate) const CLASS_LABELS: &str = "class_labels";
pub(crate) const AUGMENT_LABELS: &str = "augment_labels";

/// The U-Nets of score-based diffusion models: DDPM++ and NCSN++ of Song et al., *Score-Based Generative Modeling through Stochastic
/// Differential Equations*, arXiv:2011.13456, in the form of Karras et al., *Elucidating the Design Space of Diffusion-Based Generative
/// Models*, arXiv:2206.00364, as PhysicsNeMo builds them.
///
/// An embedding e of the noise level τ, class labels c and augmentation labels a modulates the blocks B:
///
/// ```text
/// e = [sin ω τ, cos ω τ] + W_c c √label_dim + b_c + W_a a
/// e ← silu(L₁ silu(L₀ e))
/// B(x): h = conv₃(R act(N(x))) + W e + b
///       y = (conv₃(dropout(act(N(h)))) + conv₁(R x)) / √2        conv₁ only if channels or extents change
///       y ← (y + P attention(Q N(y))) / √2                       in blocks with attention
/// ```
///
/// R halves or doubles the extents with `resample_filter`, N is a group norm of min(32, ⌈C / 4⌉) groups with ε = 10⁻⁶, and attention has
/// one head over all points of the level. The network is
///
/// ```text
/// x₀ = conv₃(input) [+ spatial_emb]
/// down: at each further level B with R = ½; at every level num_blocks × B; the output of each is kept
/// up:   at the coarsest level B, B; at every other B with R = 2; then num_blocks + 1 times B([x, the last kept])
/// y = conv₃(silu(N(x)))
/// ```
///
/// `encoder_type` `skip` adds the downsampled input to each level, `residual` the convolved and downsampled features of the level
/// above (divided by √2 together); both replace what was kept of the level. `decoder_type` `skip` adds up outputs of all levels.
///
/// As in PhysicsNeMo, group norms divide by the biased variance in training and by the unbiased one in evaluation, so that the two
/// differ by about 1 / 2n for n elements of a group; Q makes feature c of the query, key and value in channels 3c, 3c + 1 and 3c + 2; a
/// level's height names it, also where width differs; a fresh network gives about 0.
///
/// With `embedding_type` `zero`, e is 0 and the output depends on the fields only.
///
/// Arrays of a batch: `fields` `[batch, in_channels, height, width]`; `noise_labels` `[batch]` or `[1]`, or in its place `time`
/// `[batch, 1]`, unless `embedding_type` is `zero`; with `label_dim`, `class_labels` `[batch, label_dim]` or `[1, label_dim]`, or in its
/// place `conditions`; with `augment_dim`, `augment_labels` `[batch, augment_dim]` if there are any.
///
/// State dict: `map_noise.freqs`, `map_label`, `map_augment`, `map_layer0`, `map_layer1`, `spatial_emb`; with r for a level's height,
/// `enc.{r}x{r}_{conv,down,aux_down,aux_skip,aux_residual,block{i}}` and
/// `dec.{r}x{r}_{in0,in1,up,block{i},aux_up,aux_norm,aux_conv}`. In a block: `norm0`, `conv0`, `affine`, `norm1`, `conv1`, `skip`,
/// `attn.{norm,qkv,proj}`; resampling convolutions have the buffer `resample_filter`.
///
/// ```
/// use isobar_models::{Mode, SongUNet, SongUNetConfig};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let config = SongUNetConfig { model_channels: 8, channel_mult: vec![1, 2], num_blocks: 1, ..SongUNetConfig::new([16, 8], 3, 2) };
/// let model = SongUNet::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let x = Tensor::zeros([1, 3, 16, 8], (Kind::Float, Device::Cpu));
/// let y = model.forward(&x, Some(&Tensor::from_slice(&[0.3f32])), None, None, Mode::Eval)?;
/// assert_eq!(y.size(), [1, 2, 16, 8]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct SongUNet<A = Tensor> {
    inputs: i64,
    /// Height and width of `img_resolution`.
    grid: [i64; 2],
    /// Features of labels.
    dims: [i64; 2],
    /// Extents are multiples of this.
    multiple: i64,
    width: i64,
    embedding: Option<Embedding<A>>,
    spatial_emb: Option<A>,
    encoder: Vec<Down<A>>,
    decoder: Vec<Up<A>>,
}

impl<A: Array> SongUNet<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A size is 0 or too large, more than 17 levels, extents that the levels do not divide, channels that the groups of a norm do not
    /// divide, a probability outside [0, 1), an odd or too long filter, an activation with parameters; or `params` refuses a parameter.
    pub fn new(config: &SongUNetConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        Self::with_style(config, Style::Song, params)
    }

    /// Makes the network with the blocks and the embedding of `style`.
    pub(crate) fn with_style(
        config: &SongUNetConfig,
        style: Style,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let plan = Plan::new(config, style)?;
        let embedding = Embedding::new(config, &plan, params)?;
        let spatial_emb = match config.additive_pos_embed {
            true => {
                let shape = [1, plan.width, plan.extents[0], plan.extents[1]];
                let start = Init::TruncNormal { std: 0.02 };
                Some(params.param("spatial_emb", &shape, start, Placement::Replicate)?)
            }
            false => None,
        };
        let mut build = Builder::new(config, &plan, params);
        let encoder = (0..plan.widths.len()).map(|level| build.down(level)).collect::<Result<_>>()?;
        let decoder = (0..plan.widths.len()).rev().map(|level| build.up(level)).collect::<Result<_>>()?;
        Ok(Self {
            inputs: plan.inputs,
            grid: plan.extents,
            dims: [plan.labels, plan.augmentations],
            multiple: 1 << (plan.widths.len() - 1),
            width: plan.embedding,
            embedding,
            spatial_emb,
            encoder,
            decoder,
        })
    }

    /// Computes `[batch, out_channels, height, width]` from `x` `[batch, in_channels, height, width]`, the noise
    /// levels `[batch]` or `[1]`, class labels `[batch, label_dim]` or `[1, label_dim]`, and augmentation labels
    /// `[batch, augment_dim]`. Labels that the configuration does not use are ignored. Without `spatial_emb`, extents
    /// may differ from `img_resolution`.
    ///
    /// # Errors
    ///
    /// Arrays of other shapes, noise levels or class labels that are missing, or an operator that fails.
    pub fn forward(
        &self,
        x: &A,
        noise_labels: Option<&A>,
        class_labels: Option<&A>,
        augment_labels: Option<&A>,
        mode: Mode<'_>,
    ) -> Result<A> {
        let batch = self.check_fields(x)?;
        let e = match &self.embedding {
            None => zeros(&[1, self.width], x)?,
            Some(embedding) => {
                let missing = |name: &str| Error::Missing {
                    model: MODEL,
                    name: name.to_owned(),
                    given: vec![Batch::<A>::FIELDS.to_owned()],
                };
                let noise = noise_labels.ok_or_else(|| missing(NOISE_LABELS))?;
                check_labels("noise_labels", noise, (batch, None))?;
                let [labels, augmentations] = self.dims;
                if labels > 0 {
                    let class = class_labels.ok_or_else(|| missing(CLASS_LABELS))?;
                    check_labels("class_labels", class, (batch, Some(labels)))?;
                }
                if let Some(augment) = augment_labels.filter(|_| augmentations > 0) {
                    check_labels("augment_labels", augment, (batch, Some(augmentations)))?;
                }
                let labels = Labels { noise, class: class_labels, augment: augment_labels };
                embedding.forward(&labels, batch, mode)?
            }
        };
        let (x, skips) = self.encode(x, &e, mode)?;
        self.decode(x, skips, &e, mode)
    }

    fn check_fields(&self, x: &A) -> Result<i64> {
        let shape = x.shape();
        let fits = |extents: &[i64]| match &self.spatial_emb {
            Some(emb) => extents == &emb.shape()[2..],
            None => extents.iter().all(|&n| n > 0 && n % self.multiple == 0),
        };
        if shape.len() == 4 && shape[1] == self.inputs && fits(&shape[2..]) {
            return Ok(shape[0]);
        }
        let want = match &self.spatial_emb {
            Some(emb) => format!("[batch, {}, {}, {}]", self.inputs, emb.shape()[2], emb.shape()[3]),
            None => {
                format!("[batch, {}, height, width] with multiples of {}", self.inputs, self.multiple)
            }
        };
        Err(Error::Input { model: MODEL, got: shape, want })
    }

    /// The coarsest features, and what is kept for the way up.
    fn encode(&self, input: &A, e: &A, mode: Mode<'_>) -> Result<(A, Vec<A>)> {
        let mut x = input.shallow_clone();
        let mut aux = input.shallow_clone();
        let mut skips = Vec::new();
        for Down { entry, aux: past, blocks } in &self.encoder {
            x = match entry {
                Entry::Block(block) => run(block, &x, e, mode)?,
                Entry::Convolution(conv) => {
                    let x = conv.forward(&x)?;
                    match &self.spatial_emb {
                        Some(emb) => x.add(emb)?,
                        None => x,
                    }
                }
            };
            match past {
                Aux::None => {}
                Aux::Skip { down, map } => {
                    aux = down.forward(&aux)?;
                    x = x.add(&map.forward(&aux)?)?;
                }
                Aux::Residual(conv) => {
                    x = x.add(&conv.forward(&aux)?)?.mul_scalar(0.5f64.sqrt())?;
                    aux = x.shallow_clone();
                }
            }
            skips.push(x.shallow_clone());
            for block in blocks {
                x = run(block, &x, e, mode)?;
                skips.push(x.shallow_clone());
            }
        }
        Ok((x, skips))
    }

    fn decode(&self, mut x: A, mut skips: Vec<A>, e: &A, mode: Mode<'_>) -> Result<A> {
        let mut sum: Option<A> = None;
        for Up { entry, blocks, aux_up, output } in &self.decoder {
            for block in entry {
                x = run(block, &x, e, mode)?;
            }
            for block in blocks {
                if let Some(skip) = skips.pop() {
                    x = A::cat(&[&x, &skip], 1)?;
                }
                x = run(block, &x, e, mode)?;
            }
            if let (Some(up), Some(coarser)) = (aux_up, &sum) {
                sum = Some(up.forward(coarser)?);
            }
            if let Some((norm, conv)) = output {
                let own = conv.forward(&norm.forward(&x, mode)?.unary(Unary::Silu)?)?;
                sum = Some(match &sum {
                    Some(coarser) => own.add(coarser)?,
                    None => own,
                });
            }
        }
        Ok(sum.unwrap_or(x))
    }
}

fn run<A: Array>(block: &Recompute<Block<A>>, x: &A, e: &A, mode: Mode<'_>) -> Result<A> {
    block.forward(&[x, e], mode, |block, inputs, mode| block.forward(&inputs[0], &inputs[1], mode))
}

/// Checks labels: one for each sample, or one for all.
fn check_labels<A: Array>(name: &str, labels: &A, (batch, features): (i64, Option<i64>)) -> Result<()> {
    let got = labels.shape();
    let rows = got.first().copied();
    if (rows == Some(batch) || rows == Some(1)) && got.get(1).copied() == features && got.len() <= 2 {
        return Ok(());
    }
    let features = features.map_or(String::new(), |features| format!(", {features}"));
    Err(Error::Input { model: MODEL, got, want: format!("[{batch}{features}] or [1{features}] for {name}") })
}

impl<A: Array> SongUNet<A> {
    /// Number of channels of the input.
    pub(crate) fn inputs(&self) -> i64 {
        self.inputs
    }

    /// Height and width of `img_resolution`.
    pub(crate) fn grid(&self) -> [i64; 2] {
        self.grid
    }

    /// Computes the output for `x`, with the labels of a batch under any of their names.
    pub(crate) fn forward_with_labels(&self, x: &A, labels: &Batch<A>, mode: Mode<'_>) -> Result<A> {
        let time = match (&self.embedding, labels.get(NOISE_LABELS), labels.get(Batch::<A>::TIME)) {
            (Some(_), None, Some(time)) => Some(time.reshape(&[time.extent(0)?])?),
            _ => None,
        };
        let noise = labels.get(NOISE_LABELS).or(time.as_ref());
        let class = labels.get(CLASS_LABELS).or_else(|| labels.get(Batch::<A>::CONDITIONS));
        self.forward(x, noise, class, labels.get(AUGMENT_LABELS), mode)
    }
}

impl<A: Array> Model<A> for SongUNet<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        Ok(Batch::of_fields(self.forward_with_labels(x, batch, mode)?))
    }
}
