//! Loss and sampling of diffusion models.

use anyhow::{Context, Result};
use isobar_array::{Elementwise, Local};
use isobar_models::{
    Batch, EdmLoss, EdmPreconditioner, EdmPreconditionerConfig, EdmSampler, LossReduction, ModelConfig,
    Signature,
};
use isobar_shard::forbid_hidden_communication;
use isobar_shard::rules::summed;
use serde_json::Value;

use super::model::Supplier;
use super::{Entry, Forward, Operator, Pass, Rank, arguments, bytes, config, traffic};
use crate::case::{Case, Header};
use crate::layout::{Layout, Placement};

/// The loss of a denoiser, with the case's noise and noise levels.
struct Loss;

inventory::submit! { Entry(&Loss) }

/// The denoiser of a case of the loss, and how the loss is reduced.
fn denoiser(header: &Header) -> Result<(EdmPreconditionerConfig, Option<LossReduction>)> {
    let mut header = header.clone();
    let reduction = header.attrs.as_object_mut().and_then(|attrs| attrs.remove("reduction"));
    let reduction = reduction.map(serde_json::from_value).transpose().context("`attrs.reduction`")?;
    Ok((config(&header)?, reduction))
}

impl Operator for Loss {
    fn name(&self) -> &'static str {
        "edm_loss"
    }

    fn forward(&self, rank: &Rank, case: &Case, layout: &Layout) -> Result<Forward> {
        let (config, reduction) = denoiser(&case.header)?;
        let mut supplier = Supplier::new(rank, case, layout);
        let (samples, noise, sigma) = (supplier.take("x0")?, supplier.take("noise")?, supplier.take("t")?);
        let mut others = Batch::default();
        for name in case.header.inputs.iter().filter(|name| !["x0", "noise", "t"].contains(&name.as_str())) {
            others = others.with(Signature::default().array(name), supplier.take(name)?);
        }
        let model = EdmPreconditioner::new(&config, &mut supplier)?;
        supplier.check_used()?;
        let _guard = forbid_hidden_communication();
        let pass = Pass::of(&case.header);
        let loss = EdmLoss { sigma_data: config.sigma_data, ..EdmLoss::default() };
        let loss = EdmLoss { reduction: reduction.unwrap_or(loss.reduction), ..loss };
        let loss = loss.given(&samples, &noise, &sigma, |noisy, sigma| {
            model.denoise(noisy, sigma, &others, pass.mode())
        })?;
        supplier.ran(&[loss])
    }

    /// Bounds the bytes by the denoiser's budget, which includes one alignment of its inputs, two more of samples, noise and noise levels
    /// (their sum, and the differences), and the all-reduce of the loss.
    fn budget(&self, case: &Case, layout: &Layout, _rank: &Rank) -> Result<u64> {
        let (config, _) = denoiser(&case.header)?;
        let config = ModelConfig::new(config);
        let Some(denoiser) = traffic::budget(&config, case, layout)? else { return Ok(u64::MAX) };
        if denoiser.both == 0 {
            return Ok(0);
        }
        Ok(denoiser.both + 2 * denoiser.inputs + summed(size_of::<f64>() as u64, layout.mesh.ranks() as u64))
    }
}

/// A sampler with the case's latents and noise, and the exact denoiser of normal data.
struct Sampler;

inventory::submit! { Entry(&Sampler) }

impl Operator for Sampler {
    fn name(&self) -> &'static str {
        "edm_sampler"
    }

    fn forward(&self, rank: &Rank, case: &Case, layout: &Layout) -> Result<Forward> {
        let mut arguments = arguments(&case.header);
        let own = arguments.as_object_mut().context("`attrs` is not a table")?;
        let mut number = |name: &str| {
            let value = own.remove(name).as_ref().and_then(Value::as_f64);
            value.with_context(|| format!("`attrs.{name}` is missing or not a number"))
        };
        let (s, mean) = (number("sigma_data")?, number("mean")?);
        let sampler: EdmSampler =
            serde_json::from_value(arguments).context("`attrs` do not match the sampler's arguments")?;
        let mut supplier = Supplier::new(rank, case, layout);
        let (latents, noise) = (supplier.take("latents")?, supplier.take("noise")?);
        let _guard = forbid_hidden_communication();
        let sample = sampler.sample_from(
            &latents,
            |step| Ok(noise.select(0, step as i64)?.redistribute_like(&latents)?),
            |x, sigma| {
                let (s, sigma) = (s * s, sigma * sigma);
                Ok(x.mul_scalar(s)?.add_scalar(sigma * mean)?.mul_scalar((s + sigma).recip())?)
            },
        )?;
        supplier.ran(&[sample])
    }

    /// Bounds the bytes by one redistribution of the noise if its layout differs from that of the latents. The denoiser is pointwise.
    fn budget(&self, case: &Case, layout: &Layout, _rank: &Rank) -> Result<u64> {
        let along_latents = |place: &Placement| match *place {
            Placement::Shard(dim) => Placement::Shard(dim + 1),
            place => place,
        };
        let latents: Vec<_> = layout.of("latents").iter().map(along_latents).collect();
        let noise = layout.of("noise");
        let whole = bytes(case.tensor("noise")?);
        let gradients = case.get("grad.latents").is_some() || case.get("grad.noise").is_some();
        let backward = if gradients { summed(whole, layout.mesh.ranks() as u64) } else { 0 };
        let lies_alike = noise == latents || noise.iter().all(|place| *place == Placement::Replicate);
        Ok(if lies_alike { 0 } else { whole } + backward)
    }
}
