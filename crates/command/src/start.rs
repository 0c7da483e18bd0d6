//! Start of every command that joins a launch.

use std::path::Path;

use anyhow::Result;
use isobar_manager::DistributedManager;
use isobar_manager::config::DistributedConfig;

/// Joins the ranks that the launcher started, with default settings.
///
/// # Errors
///
/// Those of [`DistributedManager::initialize_with`], and a failed exchange of host names.
pub fn plain() -> Result<DistributedManager> {
    with(&DistributedConfig::default())
}

/// Starts a run, whose folder takes the flight records unless the configuration names another.
///
/// # Errors
///
/// Those of [`DistributedManager::initialize_with`], and a failed exchange of host names.
pub fn for_run(config: &DistributedConfig, folder: &Path) -> Result<DistributedManager> {
    let manager = with(config)?;
    if config.flight_dir.is_none() {
        manager.set_flight_dir(folder.join("flight"));
    }
    Ok(manager)
}

/// Joins the ranks that the launcher started, and shares the cores of this machine among its ranks.
///
/// # Errors
///
/// Those of [`DistributedManager::initialize_with`], and a failed exchange of host names.
pub fn with(config: &DistributedConfig) -> Result<DistributedManager> {
    isobar_torch::memory::install_caching_allocator();
    let manager = DistributedManager::initialize_with(config)?;
    if std::env::var_os("OMP_NUM_THREADS").is_none() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let ranks = local_ranks(&manager)?;
        tch::set_num_threads((cores / ranks).max(1) as i32);
    }
    Ok(manager)
}

/// The number of ranks on this machine.
fn local_ranks(manager: &DistributedManager) -> Result<usize> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let hosts = manager.group(None)?.all_gather_bytes(host.as_bytes())?;
    Ok(hosts.iter().filter(|other| **other == host.as_bytes()).count())
}
