//! From times and conditions to one vector for each sample.

use isobar_array::{Array, Unary};
use isobar_nn::{Linear, LinearOptions, Mode};
use isobar_shard::{Init, Params, Placement};

use super::kwargs::{DitConditioning, DitEmbedder, EmbedFn};
use super::{DitConfig, MODEL};
use crate::error::{Checker, Error, Result};
use crate::layers::Start;

/// The network `conditioning_embedder`.
#[derive(Debug)]
pub(super) struct Conditioning<A> {
    net: Net<A>,
    /// Features of the conditions.
    features: Option<i64>,
}

#[derive(Debug)]
enum Net<A> {
    Dit { times: Waves<A>, layers: [Linear<A>; 2], condition: Option<Linear<A>> },
    Edm { times: Waves<A>, layers: [Linear<A>; 2], condition: Option<Linear<A>>, dropout: f64 },
    Zero,
}

/// Cosines and sines of t · fₖ.
#[derive(Debug)]
struct Waves<A> {
    frequencies: A,
    order: EmbedFn,
}

/// Arguments of [`Waves`], checked.
struct WavesConfig {
    pairs: i64,
    slowest: f64,
    endpoint: bool,
    order: EmbedFn,
}

impl WavesConfig {
    fn new((name, features): (&str, i64), max_positions: Option<f64>, endpoint: bool) -> Result<Self> {
        let check = Checker(MODEL);
        let slowest = max_positions.unwrap_or(10_000.0);
        check.ensure(slowest.is_finite() && slowest > 0.0, || {
            format!(
                "max_positions of conditioning_embedder_kwargs is {slowest}, expected a finite number above 0"
            )
        })?;
        let least = if endpoint { 4 } else { 2 };
        check.ensure(features % 2 == 0 && features >= least, || {
            format!("{name} is {features}, expected an even number, at least {least}: cosines and sines come in pairs")
        })?;
        Ok(Self { pairs: features / 2, slowest, endpoint, order: EmbedFn::CosSin })
    }
}

impl<A: Array> Waves<A> {
    /// Frequencies `max_positions`^(−k / n), with n the number of pairs, less one where the slowest is an end.
    fn new(config: &WavesConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let (shape, whole) = ([config.pairs], Placement::Replicate);
        let steps = config.pairs - i64::from(config.endpoint);
        let end = -config.slowest.ln() * (config.pairs - 1) as f64 / steps as f64;
        let exponents = params.draw("freqs", &shape, &Init::Linspace { start: 0.0, end }, whole)?;
        let frequencies = exponents.unary(Unary::Exp)?;
        let frequencies = params.buffer("freqs", &shape, Init::Given(frequencies), whole)?;
        Ok(Self { frequencies, order: config.order })
    }

    /// `[batch, 2 · pairs]` for times `[batch, 1]`.
    fn forward(&self, times: &A) -> Result<A> {
        let angles = times.to_kind(self.frequencies.kind())?.mul(&self.frequencies)?;
        let (cos, sin) = (angles.unary(Unary::Cos)?, angles.unary(Unary::Sin)?);
        Ok(match self.order {
            EmbedFn::CosSin => A::cat(&[&cos, &sin], 1)?,
            EmbedFn::NpSinCos => A::cat(&[&sin, &cos], 1)?,
        })
    }
}

impl<A: Array> Conditioning<A> {
    pub(super) fn new(
        config: &DitConfig,
        width: i64,
        start: Start,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let check = Checker(MODEL);
        let kwargs = &config.conditioning_embedder_kwargs;
        check_kwargs(config.conditioning_embedder, kwargs)?;
        let features = match config.condition_dim {
            None | Some(0) => None,
            Some(features) => Some(check.extent("condition_dim", features)?),
        };
        let params = &mut params.scope("conditioning_embedder");
        let net = match config.conditioning_embedder {
            DitEmbedder::Dit => dit((kwargs, width, features), start, params)?,
            DitEmbedder::Edm => edm((kwargs, width, features), start, params)?,
            DitEmbedder::Zero => {
                check.ensure(features.is_none(), || {
                    "condition_dim is given, but the conditioning_embedder \"zero\" takes no condition; use \"dit\" or \"edm\"".into()
                })?;
                Net::Zero
            }
        };
        Ok(Self { net, features })
    }

    /// Returns whether there is a vector.
    pub(super) fn is_conditioned(&self) -> bool {
        !matches!(self.net, Net::Zero)
    }

    /// The vectors `[batch, hidden_size]` for times `[batch]` or `[batch, 1]` and conditions `[batch, condition_dim]`.
    pub(super) fn forward(
        &self,
        batch: i64,
        t: &A,
        condition: Option<&A>,
        mode: Mode<'_>,
    ) -> Result<Option<A>> {
        let got = t.shape();
        if got != [batch] && got != [batch, 1] {
            return Err(Error::Input { model: MODEL, got, want: format!("[{batch}] for the times") });
        }
        self.check_condition(batch, condition)?;
        let t = t.reshape(&[batch, 1])?;
        match &self.net {
            Net::Dit { times, layers: [first, second], condition: embed } => {
                let c = second.forward(&first.forward(&times.forward(&t)?)?.unary(Unary::Silu)?)?;
                match (embed, condition) {
                    (Some(embed), Some(condition)) => Ok(Some(c.add(&embed.forward(condition)?)?)),
                    _ => Ok(Some(c)),
                }
            }
            Net::Edm { times, layers: [first, second], condition: embed, dropout } => {
                let mut e = times.forward(&t)?;
                if let (Some(embed), Some(condition), Some(features)) = (embed, condition, self.features) {
                    // Dropped conditions are 0; the others keep their size.
                    let kept = mode.drop_path(condition, *dropout, 0)?;
                    let keeps = if mode.is_training() { 1.0 - dropout } else { 1.0 };
                    e = e.add(&embed.forward(&kept.mul_scalar(keeps * (features as f64).sqrt())?)?)?;
                }
                Ok(Some(second.forward(&first.forward(&e)?.unary(Unary::Silu)?)?))
            }
            Net::Zero => Ok(None),
        }
    }

    fn check_condition(&self, batch: i64, condition: Option<&A>) -> Result<()> {
        let (Some(condition), features) = (condition, self.features) else { return Ok(()) };
        let got = condition.shape();
        match features {
            Some(features) if got == [batch, features] => Ok(()),
            Some(features) => {
                Err(Error::Input { model: MODEL, got, want: format!("[{batch}, {features}] for the conditions") })
            }
            None => Checker(MODEL).ensure(false, || {
                format!("the batch has conditions {got:?}, but condition_dim is not given; set it to their number of features")
            }),
        }
    }
}

type Sizes<'a> = (&'a DitConditioning, i64, Option<i64>);

/// Times and conditions apart.
fn dit<A: Array>(
    (kwargs, width, features): Sizes<'_>,
    start: Start,
    params: &mut impl Params<Array = A>,
) -> Result<Net<A>> {
    let check = Checker(MODEL);
    let extent = |name: &str, given: Option<usize>, default: i64| {
        given.map_or(Ok(default), |value| {
            check.extent(&format!("{name} of conditioning_embedder_kwargs"), value)
        })
    };
    let waves = extent("freq_embed_dim", kwargs.freq_embed_dim, width)?;
    let hidden = extent("mlp_hidden_dim", kwargs.mlp_hidden_dim, 2 * width)?;
    let name = if kwargs.freq_embed_dim.is_some() { "freq_embed_dim" } else { "hidden_size" };
    let mut config = WavesConfig::new((name, waves), kwargs.max_positions, kwargs.endpoint.unwrap_or(false))?;
    config.order = kwargs.embed_fn.unwrap_or(EmbedFn::CosSin);
    let embedder = &mut params.scope("t_embedder");
    let times = Waves::new(&config, embedder)?;
    let layers = [
        Linear::with_options(waves, hidden, start.options(), &mut embedder.scope("mlp.0"))?,
        Linear::with_options(hidden, width, start.options(), &mut embedder.scope("mlp.2"))?,
    ];
    let condition = features.map(|features| {
        let options = LinearOptions { bias: false, ..Start::Zero.options() };
        Linear::with_options(features, width, options, &mut params.scope("cond_embedder"))
    });
    Ok(Net::Dit { times, layers, condition: condition.transpose()? })
}

/// Conditions added before the layers.
fn edm<A: Array>(
    (kwargs, width, features): Sizes<'_>,
    start: Start,
    params: &mut impl Params<Array = A>,
) -> Result<Net<A>> {
    let check = Checker(MODEL);
    let needed = |name: &str, given: Option<usize>| {
        let name = format!("{name} of conditioning_embedder_kwargs");
        check.ensure(given.is_some(), || {
            format!("{name} is not given, but the conditioning_embedder \"edm\" needs it")
        })?;
        check.extent(&name, given.unwrap_or(0))
    };
    let (outputs, waves) =
        (needed("emb_channels", kwargs.emb_channels)?, needed("noise_channels", kwargs.noise_channels)?);
    check.ensure(outputs == width, || {
        format!("emb_channels of conditioning_embedder_kwargs is {outputs}, expected hidden_size, {width}")
    })?;
    let dropout = kwargs.condition_dropout.unwrap_or(0.0);
    check.probability("condition_dropout of conditioning_embedder_kwargs", dropout)?;
    let mut config = WavesConfig::new(("noise_channels", waves), kwargs.max_positions, true)?;
    config.order = EmbedFn::NpSinCos;
    let times = Waves::new(&config, &mut params.scope("map_noise"))?;
    let condition = features.map(|features| {
        Linear::with_options(features, waves, start.options(), &mut params.scope("map_condition"))
    });
    let condition = condition.transpose()?;
    if features.is_none() && kwargs.legacy_condition_bias.unwrap_or(false) {
        unused_condition(waves, params)?;
    }
    let layers = [
        Linear::with_options(waves, width, start.options(), &mut params.scope("map_layer0"))?,
        Linear::with_options(width, width, start.options(), &mut params.scope("map_layer1"))?,
    ];
    Ok(Net::Edm { times, layers, condition, dropout })
}

/// Makes the unused layer that older models without conditions have, as two buffers.
fn unused_condition<A: Array>(waves: i64, params: &mut impl Params<Array = A>) -> Result<()> {
    let mut params = params.scope("map_condition");
    params.buffer("weight", &[waves, 0], Init::Constant(0.0), Placement::Replicate)?;
    params.buffer("bias", &[waves], Init::Constant(0.0), Placement::Replicate)?;
    Ok(())
}

/// Refuses arguments of another embedder.
fn check_kwargs(embedder: DitEmbedder, kwargs: &DitConditioning) -> Result<()> {
    let of_dit = [
        ("endpoint", kwargs.endpoint.is_some()),
        ("freq_embed_dim", kwargs.freq_embed_dim.is_some()),
        ("mlp_hidden_dim", kwargs.mlp_hidden_dim.is_some()),
        ("embed_fn", kwargs.embed_fn.is_some()),
    ];
    let of_edm = [
        ("emb_channels", kwargs.emb_channels.is_some()),
        ("noise_channels", kwargs.noise_channels.is_some()),
        ("condition_dropout", kwargs.condition_dropout.is_some()),
        ("legacy_condition_bias", kwargs.legacy_condition_bias.is_some()),
    ];
    let shared = [("max_positions", kwargs.max_positions.is_some())];
    let (name, foreign) = match embedder {
        DitEmbedder::Dit => ("dit", of_edm.to_vec()),
        DitEmbedder::Edm => ("edm", of_dit.to_vec()),
        DitEmbedder::Zero => ("zero", [&of_dit[..], &of_edm, &shared].concat()),
    };
    let given: Vec<&str> = foreign.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect();
    Checker(MODEL).ensure(given.is_empty(), || {
        format!(
            "the conditioning_embedder \"{name}\" has no {} in conditioning_embedder_kwargs; remove it",
            given.join(", ")
        )
    })
}
