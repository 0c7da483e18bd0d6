//! Rules that find problems in the facts of all ranks.

use std::collections::{BTreeMap, BTreeSet};

use super::{Facts, Finding, StepFacts};
use crate::format_bytes;

/// Seconds by which clocks may differ.
const CLOCKS: f64 = 1.0;

/// Finds the problems of a job with these ranks, in rank order.
#[must_use]
pub fn findings(ranks: &[Facts]) -> Vec<Finding> {
    let mut found = own(ranks);
    found.extend(several_launchers(ranks));
    found.extend(folders(ranks));
    found.extend(clocks(ranks));
    found.extend(staging(ranks));
    for (host, ranks) in hosts(ranks) {
        found.extend(devices(host, &ranks));
        found.extend(cores(host, &ranks));
    }
    found
}

/// Finds whether a disk with `free` bytes has too little room for three checkpoints of `needed` bytes.
#[must_use]
pub fn disk_space(folder: &str, free: u64, needed: u64) -> Option<Finding> {
    if free == 0 {
        return Some(Finding::error(format!(
            "{folder}: nothing is free on its disk, so that no checkpoint can be written; make room, or use another disk \
             (--set run.output=FOLDER)"
        )));
    }
    if free < needed {
        return Some(Finding::error(format!(
            "{folder}: {} are free on its disk, and one checkpoint of this run needs {}, so that none can be written; make room, or \
             use another disk (--set run.output=FOLDER)",
            format_bytes(free),
            format_bytes(needed)
        )));
    }
    (free < needed.saturating_mul(3)).then(|| {
        Finding::warning(format!(
            "{folder}: {} are free on its disk, and a checkpoint of this run needs {}: two that stay and one that is being written \
             need three times that",
            format_bytes(free),
            format_bytes(needed)
        ))
    })
}

/// Collects the ranks' own findings, without duplicates.
fn own(ranks: &[Facts]) -> Vec<Finding> {
    let mut found: Vec<(&Finding, Vec<usize>)> = Vec::new();
    for rank in ranks {
        for finding in &rank.own {
            match found.iter_mut().find(|(known, _)| *known == finding) {
                Some((_, of)) => of.push(rank.rank),
                None => found.push((finding, vec![rank.rank])),
            }
        }
    }
    let told = |(finding, of): (&Finding, Vec<usize>)| match of.len() == ranks.len() {
        true => finding.clone(),
        false => Finding { text: format!("{}: {}", list(&of), finding.text), ..finding.clone() },
    };
    found.into_iter().map(told).collect()
}

/// mpirun in each task of an srun. (It starts daemons of its own by srun, of which each has ranks, but not on its own host.)
fn several_launchers(ranks: &[Facts]) -> Option<Finding> {
    let steps: Vec<&StepFacts> = ranks.iter().filter_map(|rank| rank.step.as_ref()).collect();
    let first = steps.first().filter(|_| steps.len() == ranks.len())?;
    let by_mpirun = ranks.iter().all(|rank| rank.mpirun);
    let tasks: BTreeSet<usize> = steps.iter().map(|step| step.task).collect();
    let one_step = steps.iter().all(|step| step.name == first.name);
    (by_mpirun && one_step && tasks.len() < first.tasks).then(|| {
        Finding::error(format!(
            "srun started {} processes, and mpirun in each a job of its own of {} ranks, which all write to the same folder; start \
             mpirun once, without srun, or the ranks by `srun --mpi=pmix` without mpirun",
            first.tasks,
            ranks.len()
        ))
    })
}

fn folders(ranks: &[Facts]) -> Vec<Finding> {
    let mut found = Vec::new();
    let Some(first) = ranks.first() else { return found };
    for rank in ranks {
        let Some(folder) = &rank.folder else { continue };
        if let Some(problem) = &folder.problem {
            found.push(Finding::error(format!(
                "{} ({}) cannot write to {}: {problem}; --set run.output=FOLDER to one that it can write to",
                list(&[rank.rank]),
                rank.host,
                folder.path
            )));
        }
        if folder.free == Some(0) && found.is_empty() {
            found.extend(disk_space(&folder.path, 0, 0));
        }
    }
    let apart: Vec<&Facts> =
        ranks.iter().filter(|rank| rank.folder.as_ref().is_some_and(|folder| !folder.shared)).collect();
    if let Some(one) = apart.first() {
        let of: Vec<usize> = apart.iter().map(|rank| rank.rank).collect();
        let path = one.folder.as_ref().map_or("", |folder| folder.path.as_str());
        let do_not = if of.len() == 1 { "does not" } else { "do not" };
        found.push(Finding::error(format!(
            "{} ({}) {do_not} see in {path} what rank 0 ({}) writes there: all ranks write parts of a checkpoint, into a folder that \
             they share; --set run.output=FOLDER to one",
            list(&of),
            one.host,
            first.host
        )));
    }
    found
}

fn clocks(ranks: &[Facts]) -> Vec<Finding> {
    let Some(first) = ranks.first() else { return Vec::new() };
    let off = |rank: &Facts| rank.clock_ahead_s.filter(|ahead| ahead.abs() > CLOCKS);
    let told = |(host, ranks): (&str, Vec<&Facts>)| {
        let ahead = ranks.iter().find_map(|rank| off(rank))?;
        let side = if ahead > 0.0 { "ahead of" } else { "behind" };
        Some(Finding::warning(format!(
            "the clock of {host} ({}) is {:.1} s {side} that of {} (rank 0): times in logs and of checkpoints cannot be compared; let \
             the system set it (NTP)",
            list(&numbers(&ranks)),
            ahead.abs(),
            first.host
        )))
    };
    hosts(ranks).into_iter().filter_map(told).collect()
}

/// MPI gets host memory alone, so that what it can do with CUDA memory is a matter of speed.
fn staging(ranks: &[Facts]) -> Option<Finding> {
    let rank = ranks.iter().find(|rank| rank.gpu.is_some() && !rank.nccl && rank.backend == "mpi")?;
    let library = rank.mpi.as_deref().unwrap_or("MPI");
    let cannot = match rank.mpi_takes_cuda {
        Some(false) => ", which cannot take CUDA memory",
        Some(true) | None => "",
    };
    (ranks.len() > 1).then(|| {
        Finding::warning(format!(
            "tensors on GPUs travel through pinned host memory, over {library}{cannot}; where each rank has a GPU of its own, \
             --set distributed.backend=nccl"
        ))
    })
}

fn devices(host: &str, ranks: &[&Facts]) -> Vec<Finding> {
    let mut of: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for rank in ranks {
        if let Some(gpu) = &rank.gpu {
            of.entry(gpu).or_default().push(rank.rank);
        }
    }
    let mut found = Vec::new();
    let gpus = ranks.iter().map(|rank| rank.gpus).max().unwrap_or_default().max(of.len());
    let with: usize = of.values().map(Vec::len).sum();
    if with > gpus {
        found.push(Finding::warning(format!(
            "{with} ranks of {host} share {gpus} {}: they wait for each other; start as many ranks as there are GPUs",
            if gpus == 1 { "GPU" } else { "GPUs" }
        )));
    } else if let Some((gpu, shared)) = of.iter().find(|(_, ranks)| ranks.len() > 1) {
        found.push(Finding::warning(format!(
            "{} of {host} share GPU {gpu}, and {} of its {gpus} GPUs are without a rank: local ranks are wrong (LOCAL_RANK), or \
             CUDA_VISIBLE_DEVICES is",
            list(shared),
            gpus - of.len()
        )));
    }
    let without: Vec<usize> = ranks.iter().filter(|rank| rank.gpu.is_none()).map(|rank| rank.rank).collect();
    if with > 0 && !without.is_empty() {
        found.push(Finding::warning(format!(
            "without a GPU on {host}: {}, while others there have one; look at CUDA_VISIBLE_DEVICES",
            list(&without)
        )));
    }
    found
}

fn cores(host: &str, ranks: &[&Facts]) -> Option<Finding> {
    let all: BTreeSet<usize> = ranks.iter().flat_map(|rank| rank.cores.iter().copied()).collect();
    let threads: usize = ranks.iter().map(|rank| rank.threads).sum();
    let (there, count) = (all.len(), ranks.len());
    if there == 0 {
        return None;
    }
    if threads > there {
        let who = if count == 1 { "1 rank computes".to_owned() } else { format!("{count} ranks compute") };
        let mend = match there / count {
            0 => "start fewer ranks there".to_owned(),
            share => format!("set OMP_NUM_THREADS={share}"),
        };
        return Some(Finding::warning(format!(
            "on {host} {who} with {threads} threads in all, on the {there} cores that they may use; {mend}"
        )));
    }
    let bound: Vec<usize> =
        ranks.iter().filter(|rank| rank.threads > rank.cores.len()).map(|rank| rank.rank).collect();
    let rank = ranks.iter().find(|rank| bound.first() == Some(&rank.rank))?;
    Some(Finding::warning(format!(
        "{} of {host} may use {} of the {there} cores there, for {} threads: start with `mpirun --bind-to none` (or \
         `srun --cpu-bind=none`), or set OMP_NUM_THREADS={}",
        list(&bound),
        rank.cores.len(),
        rank.threads,
        rank.cores.len()
    )))
}

/// The ranks of each host, in the order of the first rank there.
fn hosts(ranks: &[Facts]) -> Vec<(&str, Vec<&Facts>)> {
    let mut hosts: Vec<(&str, Vec<&Facts>)> = Vec::new();
    for rank in ranks {
        match hosts.iter_mut().find(|(host, _)| *host == rank.host) {
            Some((_, of)) => of.push(rank),
            None => hosts.push((&rank.host, vec![rank])),
        }
    }
    hosts
}

fn numbers(ranks: &[&Facts]) -> Vec<usize> {
    ranks.iter().map(|rank| rank.rank).collect()
}

fn list(ranks: &[usize]) -> String {
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("{noun} {}", numbers.join(", "))
}
