//! A rank of a job whose last rank calls otherwise than the others: `caller WHAT [SET...]`. What is `shape`, `kind`, `reduction`,
//! `count`, `operation`, `order` or `absent`, or several of them joined by commas; each SET an assignment to the configuration.
//!
//! Prints what each call came to, and ends with the first error that ends the group, and with its code.
#![expect(clippy::print_stderr, reason = "a program of tests, read by them")]

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use isobar_collectives::{Error, Group, ReduceOp, all_gather_v, all_reduce, broadcast};
use isobar_manager::config::{self, DistributedConfig, Sources};
use isobar_manager::{DistributedManager, ExitReason};
use tch::{Device, Kind, Tensor};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let text = format!("{error:#}");
            eprintln!("error: {text}");
            DistributedManager::leave(&text);
            ExitReason::of(error.as_ref()).unwrap_or(ExitReason::Failed).into()
        }
    }
}

fn run() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [what, sets @ ..] = &args[..] else { bail!("usage: caller WHAT [SET...]") };
    let sources = sets.iter().fold(Sources::from_process(), Sources::set);
    let configured = config::load::<BTreeMap<String, DistributedConfig>>(&sources)?;
    let distributed = configured.value.get("distributed").context("no table distributed")?;
    let manager = DistributedManager::initialize_with(distributed)?;
    let world = manager.group(None)?;
    let all: Vec<usize> = (0..world.size()).collect();
    let other = world.subgroup("other", &all)?.context("no group of all ranks")?;
    // A sample of the calls has none of those that follow.
    while world.sequence() % 64 != 1 {
        world.barrier()?;
    }
    for what in what.split(',') {
        // A rank that only sends may get the error in its next call.
        match call(what, &world, &other).and_then(|()| world.barrier()) {
            Ok(()) => eprintln!("{what}: nothing is wrong"),
            Err(error @ (Error::Argument { .. } | Error::Peer { ended: false, .. })) => {
                eprintln!("{what}: {error}");
            }
            Err(error) => return Err(error).context(what.to_owned()),
        }
    }
    DistributedManager::cleanup(true)?;
    Ok(())
}

/// A call in which the last rank does something else.
fn call(what: &str, world: &Group, other: &Group) -> Result<(), Error> {
    let last = world.size() - 1;
    let differs = world.rank() == last;
    let ones = |extent: i64, kind: Kind| Tensor::f_ones([extent], (kind, Device::Cpu));
    let _ = match what {
        "shape" => all_reduce(&ones(if differs { 9 } else { 8 }, Kind::Float)?, ReduceOp::Sum, world)?,
        "kind" => {
            let kind = if differs { Kind::Int } else { Kind::Float };
            all_reduce(&ones(8, kind)?, ReduceOp::Sum, world)?
        }
        "reduction" => {
            let op = if differs { ReduceOp::Max } else { ReduceOp::Sum };
            all_reduce(&ones(8, Kind::Float)?, op, world)?
        }
        "count" => {
            let mut counts = vec![2; world.size()];
            counts[last] += i64::from(differs);
            all_gather_v(&ones(counts[world.rank()], Kind::Float)?, Some(&counts), 0, true, world)?
        }
        "operation" if differs => broadcast(&ones(8, Kind::Float)?, last, world)?,
        "operation" => all_reduce(&ones(8, Kind::Float)?, ReduceOp::Sum, world)?,
        "order" => {
            let [first, second] = if differs { [other, world] } else { [world, other] };
            let _ = all_reduce(&ones(8, Kind::Float)?, ReduceOp::Sum, first)?;
            all_reduce(&ones(8, Kind::Float)?, ReduceOp::Sum, second)?
        }
        // The watchdog of the other ranks ends it.
        _ if differs => {
            thread::sleep(Duration::from_secs(3600));
            return Ok(());
        }
        _ => all_reduce(&ones(8, Kind::Float)?, ReduceOp::Sum, world)?,
    };
    Ok(())
}
