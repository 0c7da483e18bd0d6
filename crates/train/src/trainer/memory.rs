//! Room in memory for a run's gradients and optimizer state.

use isobar_manager::checks;
use isobar_manager::config::CheckChoice;
use tch::Device;

use super::FitConfig;
use crate::error::{Error, Result};
use crate::fields::SHARD_AXIS;
use crate::params::Parameters;
use crate::ranks::Ranks;

/// Rejects a run on all ranks if their hosts lack memory for it. All ranks call.
pub(super) fn check(params: &Parameters, ranks: &Ranks, config: &FitConfig) -> Result<()> {
    if config.checks == CheckChoice::Off {
        return Ok(());
    }
    let what = format!("training {} parameters a rank", params.elements());
    let mend = "train a smaller model, or on more ranks along an axis that splits it (shard, model); \
                --set distributed.checks=warn tries all the same";
    let found = checks::memory(&ranks.world, needed(params, ranks, config), &what, mend);
    let found = found.map_err(|error| match error {
        isobar_manager::Error::Collective(error) => Error::Collectives(error),
        error => Error::Task { context: "the check of memory", source: error.into() },
    });
    match found? {
        Some(lack) if config.checks == CheckChoice::On => Err(Error::HostMemory { text: lack.text }),
        Some(lack) if ranks.world.rank() == 0 => {
            tracing::warn!("{lack}");
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Returns the bytes of host memory that training needs on this rank, besides the parameters themselves.
fn needed(params: &Parameters, ranks: &Ranks, config: &FitConfig) -> u64 {
    let shards = ranks.shards.as_ref().map_or(1, |(_, mesh)| {
        let axes = mesh.names().into_iter().zip(mesh.shape());
        axes.filter(|(name, _)| *name == SHARD_AXIS).map(|(_, ranks)| ranks as u64).product()
    });
    let state = config.optimizer.moments() + config.train.averages().len() as u64;
    let of_one = |param: &crate::Parameter| {
        let bytes =
            (param.tensor.numel() as u64).saturating_mul(param.tensor.kind().elt_size_in_bytes() as u64);
        let gradient = u64::from(param.grad().is_none());
        bytes.saturating_mul(state + gradient) / shards.max(1)
    };
    let on_host = params.iter().filter(|param| param.tensor.device() == Device::Cpu);
    on_host.map(of_one).fold(0, u64::saturating_add)
}
