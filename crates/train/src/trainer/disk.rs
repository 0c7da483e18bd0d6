//! Room on disk for a run's checkpoints.

use std::path::Path;

use isobar_collectives::Group;
use isobar_manager::checks::{Finding, Severity, disk_space, free_space};
use isobar_manager::config::CheckChoice;
use tch::Tensor;

use super::FitConfig;
use crate::error::{Error, Result};
use crate::params::Parameters;

/// Rejects a run on all ranks if the disk cannot hold one checkpoint, and warns if it holds fewer than are
/// kept. Rank 0 queries the disk. All ranks call.
pub(super) fn check(
    world: &Group,
    params: &Parameters,
    buffers: &[(String, Tensor)],
    config: &FitConfig,
) -> Result<()> {
    if config.checks == CheckChoice::Off {
        return Ok(());
    }
    let found = (world.rank() == 0).then(|| look(&config.folder, needed(params, buffers, config))).flatten();
    let told = serde_json::to_vec(&found).unwrap_or_default();
    let found: Option<Finding> =
        serde_json::from_slice(&world.broadcast_bytes(&told, 0)?).unwrap_or_default();
    match found {
        Some(Finding { severity: Severity::Error, text }) if config.checks == CheckChoice::On => {
            Err(Error::DiskSpace { text })
        }
        Some(finding) if world.rank() == 0 => {
            tracing::warn!("{finding}");
            Ok(())
        }
        _ => Ok(()),
    }
}

fn look(folder: &Path, needed: u64) -> Option<Finding> {
    // The folder may not be there yet.
    let absolute = std::path::absolute(folder).ok()?;
    let free = absolute.ancestors().find_map(free_space)?;
    disk_space(&folder.display().to_string(), free, needed)
}

/// Returns the bytes of one checkpoint.
fn needed(params: &Parameters, buffers: &[(String, Tensor)], config: &FitConfig) -> u64 {
    let copies = 1 + config.optimizer.moments() + config.train.averages().len() as u64;
    let size = |tensor: &Tensor| tensor.kind().elt_size_in_bytes() as u64;
    let params = params.iter().map(|param| {
        let extents = param.global_shape().into_iter().map(i64::unsigned_abs);
        extents.fold(size(&param.tensor).saturating_mul(copies), u64::saturating_mul)
    });
    let buffers = buffers.iter().map(|(_, buffer)| size(buffer).saturating_mul(buffer.numel() as u64));
    params.chain(buffers).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::params::Parameter;

    #[test]
    fn a_checkpoint_has_parameters_moments_averages_and_buffers() {
        let zeros = |shape: [i64; 2], kind| Tensor::zeros(shape, (kind, Device::Cpu));
        let weight = zeros([3, 4], Kind::Double).set_requires_grad(true);
        let params = Parameters::new(vec![Parameter::replicated("weight", &weight)]).unwrap();
        let buffers = [("mean".to_owned(), zeros([2, 5], Kind::Float))];
        let mut config = FitConfig::default();
        assert_eq!(needed(&params, &buffers, &config), 12 * 8 * 3 + 10 * 4);
        config.train.average_decay = Some(0.9);
        assert_eq!(needed(&params, &buffers, &config), 12 * 8 * 4 + 10 * 4);
    }

    #[test]
    fn a_disk_that_holds_no_checkpoint_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("not/there/yet");
        assert_eq!(look(&path, 1), None);
        assert_eq!(look(&path, u64::MAX).unwrap().severity, Severity::Error);
    }
}
