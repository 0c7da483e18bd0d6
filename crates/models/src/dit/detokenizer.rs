//! From tokens to fields.

use isobar_array::{Array, Conv, Padding};
use isobar_nn::{ConvNd, LayerNorm, Linear};
use isobar_shard::{Init, Params, Placement};

use super::kwargs::DetokenizerKind;
use super::modulation::{Modulation, modulated};
use super::{DitConfig, MODEL};
use crate::error::{Checker, Result};
use crate::layers::{Start, unpatched};

const EPS: f64 = 1e-6;

/// The network `detokenizer`.
#[derive(Debug)]
pub(super) struct Detokenizer<A> {
    patch: Vec<i64>,
    modulation: Modulation<A>,
    norm: LayerNorm<A>,
    projection: Linear<A>,
    convs: Vec<ConvLayer<A>>,
}

#[derive(Debug)]
enum ConvLayer<A> {
    Plain(ConvNd<A>),
    /// Weight and bias, both 0 at first.
    Last([A; 2], Conv),
}

impl<A: Array> ConvLayer<A> {
    fn forward(&self, x: &A) -> Result<A> {
        Ok(match self {
            Self::Plain(conv) => conv.forward(x)?,
            Self::Last([weight, bias], conv) => x.conv(weight, Some(bias), conv)?,
        })
    }
}

/// Sizes of tokens and fields.
#[derive(Debug, Clone)]
pub(super) struct Sizes {
    pub(super) width: i64,
    pub(super) outputs: i64,
    pub(super) patch: Vec<i64>,
}

impl<A: Array> Detokenizer<A> {
    pub(super) fn new(
        config: &DitConfig,
        Sizes { width, outputs, patch }: Sizes,
        (conditioned, start): (bool, Start),
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let with_convs = config.detokenizer == DetokenizerKind::ProjReshape2dConv;
        let params = &mut params.scope("detokenizer");
        let name = if with_convs { "proj.proj_layer" } else { "proj_layer" };
        let layer = &mut params.scope(name);
        let last = if config.dit_initialization { Start::Zero } else { start };
        let features = patch.iter().fold(outputs, |all, &extent| all.saturating_mul(extent));
        let scope = &mut layer.scope("output_projection");
        let projection = Linear::with_options(width, features, last.options(), scope)?;
        let modulation = Modulation::new((width, 2), conditioned, last, layer)?;
        Ok(Self {
            convs: if with_convs { convs(config, outputs, patch.len(), params)? } else { Vec::new() },
            patch,
            modulation,
            norm: LayerNorm::without_affine(&[width], EPS)?,
            projection,
        })
    }

    /// Computes the fields `[batch, channels, extents…]` from tokens `[grid…, batch, features]`.
    pub(super) fn forward(&self, x: &A, c: Option<&A>) -> Result<A> {
        let vectors = self.modulation.vectors(c)?;
        let [shift, scale] = &vectors[..] else { return Ok(x.shallow_clone()) };
        let patches = self.projection.forward(&modulated(&self.norm, x, [shift, scale])?)?;
        let fields = unpatched(&patches, &self.patch)?;
        let Some((first, others)) = self.convs.split_first() else { return Ok(fields) };
        let mut y = first.forward(&fields)?;
        for conv in others {
            y = conv.forward(&y.gelu()?)?;
        }
        Ok(fields.add(&y)?)
    }
}

/// The convolutions `conv_head`, numbered with the activations between them.
fn convs<A: Array>(
    config: &DitConfig,
    outputs: i64,
    dims: usize,
    params: &mut impl Params<Array = A>,
) -> Result<Vec<ConvLayer<A>>> {
    let check = Checker(MODEL);
    let kwargs = &config.detokenizer_kwargs;
    let layers = check.extent("conv_layers of detokenizer_kwargs", config.conv_layers())? as usize;
    let hidden = check.extent("conv_hidden of detokenizer_kwargs", kwargs.conv_hidden.unwrap_or(64))?;
    let kernel = check.extent("conv_kernel of detokenizer_kwargs", kwargs.conv_kernel.unwrap_or(3))?;
    check.ensure(kernel % 2 == 1, || {
        format!(
            "conv_kernel of detokenizer_kwargs is {kernel}, expected an odd number, which keeps the extents"
        )
    })?;
    let conv = Conv { padding: Padding::Each(vec![kernel / 2]), ..Conv::default() };
    let layer = |index: usize| {
        let inputs = if index == 0 { outputs } else { hidden };
        let params = &mut params.scope(&format!("conv_head.{}", 2 * index));
        if index + 1 < layers {
            return Ok(ConvLayer::Plain(ConvNd::new(
                [inputs, hidden],
                &vec![kernel; dims],
                conv.clone(),
                params,
            )?));
        }
        if !config.dit_initialization {
            return Ok(ConvLayer::Plain(ConvNd::new(
                [inputs, outputs],
                &vec![kernel; dims],
                conv.clone(),
                params,
            )?));
        }
        let zero = || Init::Constant(0.0);
        let shape = [&[outputs, inputs], &vec![kernel; dims][..]].concat();
        let weight = params.param("weight", &shape, zero(), Placement::Replicate)?;
        let bias = params.param("bias", &[outputs], zero(), Placement::Replicate)?;
        Ok(ConvLayer::Last([weight, bias], conv.clone()))
    };
    (0..layers).map(layer).collect()
}
