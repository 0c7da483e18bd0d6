//! Checks that the network of a run and its samples fit into memory.

use anyhow::{Result, bail};
use isobar_collectives::Group;
use isobar_manager::DeviceMesh;
use isobar_manager::checks;
use isobar_manager::config::CheckChoice;
use isobar_models::{FieldSpec, LargestArray, ModelConfig};
use isobar_shard::{ModelSize, ParallelRegion, ParamCount};
use isobar_train::SHARD_AXIS;
use tch::{Device, Kind};

use super::part_window::PartWindows;
use super::place::Place;
use super::ranks::Arrangement;
use crate::config::Config;
use isobar_command::exit::{Because, Exit};

/// Bytes of overhead per tensor: handles, names, nodes of the graph.
const TENSOR: u128 = 1 << 10;

/// Rejects a network that does not fit into memory, before it is allocated. Counts parameters, gradients,
/// optimizer state and the largest array of one sample, the least that a run needs. All ranks call.
pub(super) fn check(
    world: &Group,
    arrangement: &Arrangement,
    config: &Config,
    fields: &FieldSpec,
    device: Device,
    trains: bool,
) -> Result<()> {
    let Arrangement { model, domain, .. } = arrangement;
    let region = || ParallelRegion::new(model.clone());
    let count = || match domain {
        Some(_) => ParamCount::on_mesh(region()),
        None => ParamCount::new(region()),
    };
    // Wrong arguments of the model are found here, too.
    let size = config.model.count(&count)?;
    let choice = config.distributed.checks;
    if choice == CheckChoice::Off {
        return Ok(());
    }
    let copies = match trains {
        // Values, gradients, moments, averages.
        true => 2 + u128::from(config.optimizer.moments()) + config.train.averages().len() as u128,
        false => 1,
    };
    let shards = domain.as_ref().filter(|_| trains).map_or(1, shards);
    let kind = config.train.precision.kind();
    let network = needed(size, copies, shards, (kind, device));
    let ranks = domain.as_ref().map_or(1, |mesh| mesh.shape().into_iter().product::<usize>());
    // Predictions may pass fewer samples to the network at a time.
    let count = if trains { config.task.samples_of_network() } else { 1 };
    let array = largest_array(&config.model, fields, count);
    let sample = array.as_ref().map_or(0, |array| bytes_of(array, ranks, (kind, device)));
    let mut what = format!(
        "{} the network, which has {} parameters on a rank",
        if trains { "training" } else { "predicting with" },
        number(size.trained)
    );
    match array {
        Some(LargestArray { elements, keys }) if sample > network => {
            what += &format!(" and makes an array of {} elements of each sample ({keys}),", number(elements));
        }
        _ => what += ",",
    }
    let mend = "make it smaller (the keys of [model]), or split it over more ranks (as in --set 'distributed.mesh.names=[\"shard\"]'); \
                --set distributed.checks=warn tries all the same";
    compare(world, choice, network.saturating_add(sample), (&what, mend))
}

/// Rejects samples that do not fit into memory, before any is read. Counts the values that each rank keeps, and a portion that it
/// reads. All ranks call.
pub(super) fn check_samples(world: &Group, windows: &[PartWindows; 2], place: &Place<'_>) -> Result<()> {
    let (kind, device) = place.options;
    let kept = match device {
        Device::Cpu => windows.iter().map(|window| window.bytes(kind)).fold(0, u64::saturating_add),
        _ => 0,
    };
    let read = windows.iter().map(PartWindows::bytes_read_at_once).max().unwrap_or_default();
    let what = "keeping all samples in memory (data.cache = \"all\")";
    let mend = "read them while they are needed (--set data.cache=none, or window to keep those that fit data.host_memory), split \
                the fields over more ranks (as in --set 'distributed.mesh.names=[\"domain\"]'), or use fewer samples (--set \
                data.train_samples=…); --set distributed.checks=warn tries all the same";
    compare(world, place.checks, kept.saturating_add(read), (what, mend))
}

/// Compares the bytes that this and the other ranks need with the memory of their hosts. The message begins with `what` and ends
/// with `mend`. All ranks call.
fn compare(world: &Group, choice: CheckChoice, bytes: u64, (what, mend): (&str, &str)) -> Result<()> {
    if choice == CheckChoice::Off {
        return Ok(());
    }
    match checks::memory(world, bytes, what, mend)? {
        Some(lack) if choice == CheckChoice::On => bail!(Exit::Usage.because(lack)),
        Some(lack) if world.rank() == 0 => tracing::warn!("{lack}"),
        _ => {}
    }
    Ok(())
}

/// Returns the largest array that the network allocates for one data sample, of which it receives `count` network samples, such as
/// patches.
fn largest_array(model: &ModelConfig, fields: &FieldSpec, count: usize) -> Option<LargestArray> {
    let array = match &fields.patch_extents {
        Some(patch) => model.largest_array(&FieldSpec { extents: patch.clone(), ..fields.clone() }),
        None => model.largest_array(fields),
    }?;
    if count == 1 {
        return Some(array);
    }
    Some(LargestArray {
        elements: array.elements.saturating_mul(count as u128),
        keys: format!("{}; [task] passes {count} network samples per data sample", array.keys),
    })
}

/// Ranks over which parameters are split.
fn shards(mesh: &DeviceMesh) -> u128 {
    let axes = mesh.names().into_iter().zip(mesh.shape());
    axes.filter(|(name, _)| *name == SHARD_AXIS).map(|(_, ranks)| ranks as u128).product()
}

/// Bytes of host memory that one rank needs at least.
fn needed(size: ModelSize, copies: u128, shards: u128, (kind, device): (Kind, Device)) -> u64 {
    let element = kind.elt_size_in_bytes() as u128;
    // Parameters are created in full, then sharded.
    let trained = size.trained.max((size.trained / shards.max(1)).saturating_mul(copies));
    let elements = match device {
        Device::Cpu => trained.saturating_add(size.buffers).saturating_mul(element),
        _ => 0,
    };
    let bytes = elements.saturating_add(size.tensors.saturating_mul(TENSOR).saturating_mul(copies));
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// Bytes of host memory for the part of an array that each of the ranks sharing a sample holds.
fn bytes_of(array: &LargestArray, ranks: usize, (kind, device): (Kind, Device)) -> u64 {
    if device != Device::Cpu {
        return 0;
    }
    let elements = array.elements / ranks.max(1) as u128;
    u64::try_from(elements.saturating_mul(kind.elt_size_in_bytes() as u128)).unwrap_or(u64::MAX)
}

/// Formats a number that may have many digits.
fn number(count: u128) -> String {
    if count < 1_000_000 { count.to_string() } else { format!("{:.2e}", count as f64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_and_moments_count_and_shards_divide() {
        let size = ModelSize { trained: 1000, buffers: 10, tensors: 2 };
        assert_eq!(needed(size, 1, 1, (Kind::Float, Device::Cpu)), 4 * 1010 + 2048);
        assert_eq!(needed(size, 4, 1, (Kind::Float, Device::Cpu)), 4 * 4010 + 4 * 2048);
        assert_eq!(needed(size, 4, 2, (Kind::Float, Device::Cpu)), 4 * 2010 + 4 * 2048);
        assert_eq!(needed(size, 4, 8, (Kind::Float, Device::Cpu)), 4 * 1010 + 4 * 2048);
        assert_eq!(needed(size, 4, 1, (Kind::Float, Device::Cuda(0))), 4 * 2048);
        let huge = ModelSize { trained: u128::MAX, buffers: u128::MAX, tensors: u128::MAX };
        assert_eq!(needed(huge, 4, 1, (Kind::Float, Device::Cpu)), u64::MAX);
        let array = LargestArray { elements: 1000, keys: String::new() };
        assert_eq!(bytes_of(&array, 4, (Kind::Double, Device::Cpu)), 2000);
        assert_eq!(bytes_of(&array, 4, (Kind::Double, Device::Cuda(0))), 0);
        let array = LargestArray { elements: u128::MAX, ..array };
        assert_eq!(bytes_of(&array, 1, (Kind::Float, Device::Cpu)), u64::MAX);
        assert_eq!([number(999_999), number(82_000_000_000_000)], ["999999", "8.20e13"]);
    }
}
