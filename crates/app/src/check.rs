//! `isobar check`, and what `isobar train` looks at before it starts.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use isobar_manager::checks::{self, Facts, Finding, Options, Report, Severity};
use isobar_manager::config::{CheckChoice, DistributedConfig, agree};
use isobar_manager::{DistributedManager, format_bytes};

use crate::config;
use crate::run::PER_RANK_KEYS;
use isobar_command::exit::{Because, Exit};
use isobar_command::{start, terminal};

/// Arguments of `isobar check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// The TOML file of a run, whose folder is looked at too
    #[arg(value_name = "CONFIG")]
    file: Option<PathBuf>,
    /// Override a key of the configuration; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Runs the command. All ranks call.
pub(crate) fn run(args: &CheckArgs) -> Result<Exit> {
    let resolved = config::load(args.file.as_deref(), &args.set)?;
    let config = &resolved.value;
    let folder = args.file.is_some().then(|| config.run.folder());
    let manager = start::with(&config.distributed)?;
    agree(&resolved, &manager.group(None)?, &PER_RANK_KEYS)?;
    let report =
        checks::examine(&manager, &config.distributed, &Options { folder: folder.clone(), clocks: true })?;
    if manager.rank() == 0 {
        terminal::line(&table(&report.ranks, folder.as_deref()));
        terminal::line(&format!(
            "torch   libtorch {}, CPU kernels for {}",
            isobar_torch::libtorch_version(),
            isobar_torch::cpu_capability()
        ));
        for finding in &report.findings {
            let kind = match finding.severity {
                Severity::Error => "error",
                Severity::Warning => "warning",
            };
            terminal::line(&format!("{kind}: {finding}"));
        }
        if report.findings.is_empty() {
            terminal::line("nothing is wrong");
        }
    }
    DistributedManager::cleanup(true)?;
    Ok(if report.of(Severity::Error).next().is_some() { Exit::Usage } else { Exit::Good })
}

/// Before a run: what is found that would lose its results is an error, on all ranks alike. All ranks call, and tell
/// [`warn`] what is left once messages have a place to go.
pub(crate) fn before(
    manager: &DistributedManager,
    config: &DistributedConfig,
    folder: &Path,
) -> Result<Vec<Finding>> {
    if config.checks == CheckChoice::Off {
        return Ok(Vec::new());
    }
    let options = Options { folder: Some(folder.to_owned()), clocks: false };
    let report = checks::examine(manager, config, &options)?;
    refuse(&report, config.checks)?;
    Ok(report.findings)
}

fn refuse(report: &Report, choice: CheckChoice) -> Result<()> {
    let errors: Vec<String> = report.of(Severity::Error).map(|error| error.text.clone()).collect();
    if errors.is_empty() || choice != CheckChoice::On {
        return Ok(());
    }
    bail!(
        Exit::Usage
            .because(format!("{} (--set distributed.checks=warn continues all the same)", errors.join("; ")))
    )
}

/// Warns once, of a job.
pub(crate) fn warn(manager: &DistributedManager, findings: &[Finding]) {
    if manager.rank() == 0 {
        findings.iter().for_each(|finding| tracing::warn!("{finding}"));
    }
}

/// A line a rank, and what is beside it.
fn table(ranks: &[Facts], folder: Option<&Path>) -> String {
    let head =
        ["rank", "host", "local", "by", "over", "device", "cores", "threads", "memory", "clock", "free"];
    let rows: Vec<[String; 11]> =
        std::iter::once(head.map(str::to_owned)).chain(ranks.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |row: &[String; 11]| {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let mut text = rows.iter().map(line).collect::<Vec<_>>().join("\n");
    if let Some(first) = ranks.first() {
        let cuda = match first.mpi_takes_cuda {
            Some(true) => "takes CUDA memory",
            Some(false) => "does not take CUDA memory",
            None => "does not say whether it takes CUDA memory",
        };
        let mpi = first.mpi.as_ref().map_or("not used".to_owned(), |library| format!("{library}, {cuda}"));
        let pmix = if first.pmix { "there" } else { "not there" };
        text += &format!("\nMPI     {mpi}\nPMIx    {pmix}");
    }
    if let Some(folder) = folder {
        text += &format!("\nfolder  {}", folder.display());
    }
    text
}

fn row(rank: &Facts) -> [String; 11] {
    let folder = rank.folder.as_ref();
    let bytes = |count: Option<u64>| count.map_or_else(|| "-".to_owned(), format_bytes);
    [
        rank.rank.to_string(),
        rank.host.clone(),
        rank.local_rank.to_string(),
        rank.method.clone(),
        if rank.nccl { format!("{} and nccl", rank.backend) } else { rank.backend.clone() },
        rank.gpu.as_ref().map_or_else(|| "cpu".to_owned(), |gpu| format!("cuda:{gpu}")),
        rank.cores.len().to_string(),
        rank.threads.to_string(),
        bytes(rank.memory),
        rank.clock_ahead_s.map_or_else(|| "-".to_owned(), |ahead| format!("{ahead:+.3} s")),
        bytes(folder.and_then(|folder| folder.free)),
    ]
}

#[cfg(test)]
mod tests {
    use isobar_manager::checks::FolderFacts;

    use super::*;

    #[test]
    fn a_line_a_rank() {
        let rank = |rank: usize| Facts {
            rank,
            local_rank: rank,
            host: "node7".to_owned(),
            method: "OPENMPI".to_owned(),
            backend: "mpi".to_owned(),
            nccl: rank == 0,
            mpi: Some("Open MPI v4.1.4".to_owned()),
            mpi_takes_cuda: Some(false),
            pmix: true,
            gpu: (rank == 0).then(|| "0".to_owned()),
            gpus: 1,
            cores: (0..8).collect(),
            threads: 4,
            memory: Some(64 << 30),
            clock_ahead_s: Some(rank as f64 * 0.0012),
            folder: Some(FolderFacts { free: Some(123_000_000), ..FolderFacts::default() }),
            ..Facts::default()
        };
        insta::assert_snapshot!(table(&[rank(0), rank(1)], Some(Path::new("runs/x"))), @"
        rank  host   local  by       over          device  cores  threads  memory    clock     free
        0     node7  0      OPENMPI  mpi and nccl  cuda:0  8      4        64.0 GiB  +0.000 s  117.3 MiB
        1     node7  1      OPENMPI  mpi           cpu     8      4        64.0 GiB  +0.001 s  117.3 MiB
        MPI     Open MPI v4.1.4, does not take CUDA memory
        PMIx    there
        folder  runs/x
        ");
    }

    #[test]
    fn errors_end_a_run_unless_told_otherwise() {
        let finding = |severity| Finding { severity, text: "it rains".to_owned() };
        let mut report = empty();
        report.findings = vec![finding(Severity::Error), finding(Severity::Warning)];
        let error = refuse(&report, CheckChoice::On).unwrap_err();
        assert_eq!(isobar_command::exit::of(&error), Exit::Usage);
        assert!(error.to_string().starts_with("it rains (--set distributed.checks=warn"), "{error}");
        assert!(refuse(&report, CheckChoice::Warn).is_ok());
        report.findings.remove(0);
        assert!(refuse(&report, CheckChoice::On).is_ok());
    }

    fn empty() -> Report {
        let _rank = DistributedManager::bind_thread(&isobar_collectives::Group::single());
        let manager = DistributedManager::get().unwrap();
        checks::examine(&manager, &DistributedConfig::default(), &Options::default()).unwrap()
    }
}
