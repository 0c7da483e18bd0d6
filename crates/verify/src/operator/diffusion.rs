//! Loss and sampling of diffusion models.

use anyhow::{Context, Result};
use isobar_array::{Elementwise, Local};
use isobar_models::{Batch, EdmLoss, EdmPreconditioner, EdmPreconditionerConfig, EdmSampler, Signature};
use isobar_shard::forbid_hidden_communication;
use serde_json::Value;

use super::model::Supplier;
use super::{Forward, Operator, Pass, Rank, arguments, config};
use crate::case::Case;
use crate::layout::Layout;

/// The mean loss of a denoiser, with the case's noise and noise levels.
pub(crate) struct Loss;

impl Operator for Loss {
    fn name(&self) -> &'static str {
        "edm_loss"
    }

    fn forward(&self, rank: &Rank, case: &Case, layout: &Layout) -> Result<Forward> {
        let mut header = case.header.clone();
        let reduction = header.attrs.as_object_mut().and_then(|attrs| attrs.remove("reduction"));
        let reduction = reduction.map(serde_json::from_value).transpose().context("`attrs.reduction`")?;
        let config: EdmPreconditionerConfig = config(&header)?;
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

    /// Unlimited, like that of models.
    fn budget(&self, _case: &Case, _layout: &Layout, _rank: &Rank) -> Result<u64> {
        Ok(u64::MAX)
    }
}

/// A sampler with the case's latents and noise, and the exact denoiser of normal data.
pub(crate) struct Sampler;

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

    /// Each step's noise at most, laid out as the latents are.
    fn budget(&self, _case: &Case, _layout: &Layout, _rank: &Rank) -> Result<u64> {
        Ok(u64::MAX)
    }
}
