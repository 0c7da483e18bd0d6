//! `isobar bench`: times of collectives, operators, checkpoints, files and models, under the launcher that it is started with.
//!
//! It prints times; `cargo xtask bench` compares them with those of other libraries.

mod afno;
mod checkpoint;
mod clock;
mod collectives;
mod data;
mod fft;
mod models;
mod operators;
mod shard;

use anyhow::{Context, Result, bail};
use clap::Args;
use indexmap::IndexMap;
use isobar_collectives::Group;
use isobar_manager::DistributedManager;
use isobar_shard::Placement;
use serde::Serialize;
use tch::Tensor;

use self::clock::Times;
use isobar_command::exit::{Because, Exit};
use isobar_command::{start, terminal};

/// Arguments of `isobar bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Only these cases; by default all except `attention/forward_N`, `attention/backward_N` and `data/…`, which read files of
    /// `cargo xtask bench --data`
    #[arg(long, value_delimiter = ',', value_name = "CASE,…")]
    cases: Vec<String>,
    /// Print the names of all cases, and run none
    #[arg(long)]
    list: bool,
    /// Number of timed rounds of each case, after the warm-up rounds
    #[arg(long, default_value_t = 7, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Number of warm-up rounds, which are not timed
    #[arg(long, default_value_t = 2, value_name = "N")]
    warm_ups: u32,
    /// Make all cases ready, then time them in turns: for cases that are compared with each other
    #[arg(long)]
    in_turns: bool,
    /// Print one JSON object, and nothing else, to standard output
    #[arg(long)]
    json: bool,
}

/// A case: its name, and what makes it ready.
struct Case {
    name: &'static str,
    prepare: fn(&Group) -> Result<Prepared>,
}

/// A case of [`CASES`], or the training step of a model of `benches/models.json`.
enum Selected {
    Listed(&'static Case),
    /// `models/NAME`: over all ranks; `models/NAME/one_rank`: each rank has the full batch for itself.
    Model {
        name: String,
        alone: bool,
    },
    /// `attention/forward_N` or `attention/backward_N`: attention of N tokens over all ranks, forward only or with gradients.
    Attention {
        tokens: i64,
        backward: bool,
    },
}

/// A case that was checked and is ready to be timed.
struct Prepared {
    timed: Timed,
    /// A tensor like what the collective gives, whose copy is timed beside it.
    output: Option<Tensor>,
}

/// Timed code, on every rank.
enum Timed {
    /// The time of a call.
    Step(Box<dyn FnMut() -> Result<()>>),
    /// Call that measures itself, in seconds.
    Measured(Box<dyn FnMut() -> Result<f64>>),
}

const REPLICATE: Placement = Placement::Replicate;
const ROWS: Placement = Placement::Shard(0);
const COLUMNS: Placement = Placement::Shard(1);

const CASES: [Case; 33] = [
    Case { name: "all_gather_v/dim0", prepare: |group| collectives::all_gather(group, 0) },
    Case { name: "all_gather_v/dim1", prepare: |group| collectives::all_gather(group, 1) },
    Case { name: "all_gather_v/fwd_bwd", prepare: collectives::all_gather_fwd_bwd },
    Case { name: "scatter_v", prepare: collectives::scatter },
    Case { name: "indexed_all_to_all_v/fwd_bwd", prepare: collectives::indexed_all_to_all_fwd_bwd },
    Case { name: "afno/train_step", prepare: afno::train_step },
    Case { name: "overhead/recording", prepare: collectives::recording },
    Case { name: "overhead/step_a_collective", prepare: models::step_for_each_collective },
    Case { name: "overhead/mul", prepare: shard::mul },
    Case { name: "overhead/linear", prepare: shard::linear },
    Case { name: "overhead/from_local", prepare: shard::from_local },
    Case { name: "redistribute/s0_r_4MiB", prepare: |group| shard::redistribute(group, ROWS, REPLICATE, 4) },
    Case {
        name: "redistribute/s0_r_64MiB",
        prepare: |group| shard::redistribute(group, ROWS, REPLICATE, 64),
    },
    Case { name: "redistribute/s0_s1_4MiB", prepare: |group| shard::redistribute(group, ROWS, COLUMNS, 4) },
    Case { name: "redistribute/s0_s1_64MiB", prepare: |group| shard::redistribute(group, ROWS, COLUMNS, 64) },
    Case {
        name: "redistribute/r_s0_64MiB",
        prepare: |group| shard::redistribute(group, REPLICATE, ROWS, 64),
    },
    Case { name: "overhead/reshape", prepare: shard::reshape },
    Case { name: "shard/conv2d_fwd_bwd", prepare: |group| operators::conv2d(group, true) },
    Case { name: "shard/conv2d_exchange", prepare: |group| operators::conv2d(group, true) },
    Case { name: "shard/conv2d_no_exchange", prepare: |group| operators::conv2d(group, false) },
    Case { name: "fft/rfft2_irfft2", prepare: |group| fft::of_shards(group, 1) },
    Case { name: "fft/rfft2_irfft2_transposed", prepare: |group| fft::of_shards(group, 1) },
    Case { name: "fft/rfft2_irfft2_in_pieces", prepare: |group| fft::of_shards(group, 4) },
    Case { name: "fft/rfft2_irfft2_split_last", prepare: fft::split_last },
    Case { name: "checkpoint/sync", prepare: |group| checkpoint::save(group, checkpoint::Mode::Sync) },
    Case { name: "checkpoint/async", prepare: |group| checkpoint::save(group, checkpoint::Mode::Async) },
    Case { name: "attention/ring_4096", prepare: |group| ring(group, 4096, false) },
    Case { name: "attention/one_rank_4096", prepare: |group| ring(group, 4096, true) },
    Case { name: "attention/ring_16384", prepare: |group| ring(group, 16384, false) },
    Case { name: "attention/one_rank_16384", prepare: |group| ring(group, 16384, true) },
    Case { name: "data/zarr_windows", prepare: |group| data::windows(group, "u.zarr", "zarr") },
    Case { name: "data/netcdf_windows", prepare: |group| data::windows(group, "u.nc", "netcdf") },
    Case { name: "data/hdf5_windows", prepare: |group| data::windows(group, "u.h5", "hdf5") },
];

/// Attention of `[1, 8, tokens, 64]` with its gradients.
fn ring(group: &Group, tokens: i64, alone: bool) -> Result<Prepared> {
    operators::attention(group, &operators::Tokens { count: tokens, features: 64, backward: true }, alone)
}

/// Results of a run, in the format of the scripts that it is compared with.
#[derive(Debug, Serialize)]
struct Report {
    system: String,
    world: usize,
    cases: IndexMap<String, Times>,
}

/// Runs the command.
///
/// # Errors
///
/// An unknown case; ranks that cannot start or are lost; a result that is wrong.
pub fn run(args: &BenchArgs) -> Result<Exit> {
    if args.list {
        let names: Vec<String> = all()?.iter().map(Selected::name).collect();
        terminal::line(&format!("{}\n{FORWARD}N\n{BACKWARD}N", names.join("\n")));
        return Ok(Exit::Good);
    }
    let cases = select(&args.cases)?;
    let manager = start::plain()?;
    let world = manager.group(None)?;
    let mut report = Report { system: system(&world), world: world.size(), cases: IndexMap::new() };
    for cases in cases.chunks(if args.in_turns { cases.len() } else { 1 }) {
        let prepared = cases.iter().map(|case| case.prepare(&world));
        let times =
            clock::time(&world, args.warm_ups, args.repeats, &mut prepared.collect::<Result<Vec<_>>>()?)?;
        report.cases.extend(cases.iter().map(Selected::name).zip(times));
    }
    if world.rank() == 0 {
        terminal::line(&if args.json { serde_json::to_string_pretty(&report)? } else { report.table() });
    }
    DistributedManager::cleanup(true)?;
    Ok(Exit::Good)
}

impl Selected {
    fn name(&self) -> String {
        match self {
            Self::Listed(case) => case.name.to_owned(),
            Self::Model { name, alone: false } => format!("models/{name}"),
            Self::Model { name, alone: true } => format!("models/{name}/one_rank"),
            Self::Attention { tokens, backward: false } => format!("{FORWARD}{tokens}"),
            Self::Attention { tokens, backward: true } => format!("{BACKWARD}{tokens}"),
        }
    }

    fn prepare(&self, group: &Group) -> Result<Prepared> {
        match self {
            Self::Listed(case) => (case.prepare)(group),
            Self::Model { name, alone } => models::step(group, &models::row(name)?, *alone)
                .with_context(|| format!("the case `{}`", self.name())),
            &Self::Attention { tokens, backward } => {
                let tokens = operators::Tokens { count: tokens, features: 32, backward };
                operators::attention(group, &tokens, false)
            }
        }
    }
}

/// Prefix of the names of cases that read files of `cargo xtask bench --data`.
const FILES: &str = "data/";
/// Prefixes of the names of cases that end with a number of tokens.
const FORWARD: &str = "attention/forward_";
const BACKWARD: &str = "attention/backward_";

/// Returns the case of this name if it is attention of a number of tokens.
fn attention(name: &str) -> Option<Selected> {
    let tokens = |number: &str| number.parse().ok().filter(|tokens| (1..=1 << 24).contains(tokens));
    let [forward, backward] = [FORWARD, BACKWARD].map(|start| name.strip_prefix(start).and_then(tokens));
    let case = |tokens, backward| Selected::Attention { tokens, backward };
    forward.map(|tokens| case(tokens, false)).or(backward.map(|tokens| case(tokens, true)))
}

/// Returns all cases except those with a number of tokens.
fn all() -> Result<Vec<Selected>> {
    let mut all: Vec<Selected> = CASES.iter().map(Selected::Listed).collect();
    for name in models::names()? {
        all.extend([false, true].map(|alone| Selected::Model { name: name.clone(), alone }));
    }
    Ok(all)
}

/// Returns the cases of these names; without names, all except those with a number of tokens and those that read files.
fn select(names: &[String]) -> Result<Vec<Selected>> {
    let mut all = all()?;
    if names.is_empty() {
        all.retain(|case| !case.name().starts_with(FILES));
        return Ok(all);
    }
    let mut selected = Vec::new();
    for name in names {
        if selected.iter().any(|case: &Selected| case.name() == *name) {
            bail!(Exit::Usage.because(format!("the case `{name}` is named twice; name it once")));
        }
        if let Some(case) = attention(name).filter(|case| case.name() == *name) {
            selected.push(case);
            continue;
        }
        match all.iter().position(|case| case.name() == *name) {
            Some(index) => selected.push(all.remove(index)),
            None => {
                let known: Vec<String> = all.iter().map(Selected::name).collect();
                bail!(Exit::Usage.because(format!(
                    "there is no case `{name}`; expected one of {}, {FORWARD}N, {BACKWARD}N",
                    known.join(", ")
                )));
            }
        }
    }
    Ok(selected)
}

fn system(world: &Group) -> String {
    format!("isobar {} / {}", env!("CARGO_PKG_VERSION"), world.backend())
}

impl Report {
    fn table(&self) -> String {
        let ranks = if self.world == 1 { "1 rank".to_owned() } else { format!("{} ranks", self.world) };
        let mut table = format!("{}, {ranks}; milliseconds of the slowest rank\n", self.system);
        table += &format!(
            "{:30} {:>9} {:>9} {:>9} {:>9} {:>9}",
            "case", "median", "min", "max", "memcpy", "ratio"
        );
        for (name, times) in &self.cases {
            let digits = if times.median_s < 1e-4 { 5 } else { 2 };
            let ms = |seconds: f64| format!("{:9.digits$}", seconds * 1e3);
            table += &format!("\n{name:30} {} {} {}", ms(times.median_s), ms(times.min_s), ms(times.max_s));
            if let (Some(copy), Some(ratio)) = (times.memcpy_s, times.memcpy_ratio) {
                table += &format!(" {} {ratio:9.2}", ms(copy));
            }
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_found_by_name() {
        let names = |names: &[&str]| -> Vec<String> {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            select(&names).unwrap().iter().map(Selected::name).collect()
        };
        assert!(names(&[]).len() > CASES.len());
        let some = ["scatter_v", "attention/backward_1024", "models/afno/one_rank", "models/afno"];
        assert_eq!(names(&some), some);
        let refusal = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            select(&names).err().unwrap().to_string()
        };
        let unknown = refusal(&["allgather"]);
        assert!(unknown.starts_with("there is no case `allgather`; expected one of all_gather_v/dim0, "));
        let twice = refusal(&["models/afno", "scatter_v", "models/afno"]);
        assert_eq!(twice, "the case `models/afno` is named twice; name it once");
    }
}
