//! Runs the suite of the collectives, or one of its endings, as one rank of a world that a launcher has started.
//!
//! `suite BACKEND WHAT [MAX_MESSAGE MIN_ROW]`: the backend is `mpi` or `gloo`; what is `all`, `errors` or the name of an
//! ending; the numbers are those of `mpi::Options`.
#![expect(clippy::print_stdout, reason = "its report is its standard output")]

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use isobar_collectives::Group;
use isobar_tests::suite::{self, Options, endings};

/// Endings wait for their deadline.
const SHORT: Duration = Duration::from_secs(4);
const LONG: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("failed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[String]) -> Result<()> {
    let [backend, what, numbers @ ..] = args else {
        bail!("usage: suite BACKEND WHAT [MAX_MESSAGE MIN_ROW]")
    };
    let numbers =
        numbers.iter().map(|n| n.parse().context("a number was expected")).collect::<Result<Vec<usize>>>()?;
    let ending = endings::ALL.iter().find(|(name, _)| name == what);
    let deadline = if ending.is_some() { SHORT } else { LONG };
    let group = join(backend, deadline, &numbers)?;
    let report = match (what.as_str(), ending) {
        ("all", _) => suite::run(&group, &Options::default()).map(|report| format!("{report:?}")),
        ("errors", _) => suite::errors::run(&group, &Options::default()).map(|report| format!("{report:?}")),
        ("memory-training", _) => suite::memory::training(&group),
        (memory, _) if memory.starts_with("memory-") => {
            suite::memory::run(memory.trim_start_matches("memory-"), &group)
        }
        (_, Some((_, ending))) => ending(&group).map(|()| what.clone()),
        _ => bail!("there is no test {what}"),
    };
    println!("ok: {}", report.map_err(|problems| anyhow!("{problems}"))?);
    leave(backend, &group, ending.is_some() && what != "dropped");
    Ok(())
}

fn join(backend: &str, deadline: Duration, numbers: &[usize]) -> Result<Group> {
    match backend {
        #[cfg(feature = "mpi")]
        "mpi" => {
            use isobar_collectives::mpi;
            let mut options = mpi::Options { deadline, ..Default::default() };
            if let [max_message, min_row] = numbers {
                (options.max_message, options.min_row) = (*max_message, *min_row);
            }
            Ok(mpi::world(options)?)
        }
        "gloo" => {
            use std::net::Ipv4Addr;

            use isobar_collectives::gloo;
            use isobar_rendezvous::Token;

            let options = gloo::Options {
                listen: vec![Ipv4Addr::LOCALHOST.into()],
                token: Token::none(),
                addr: variable("MASTER_ADDR")?,
                port: variable("MASTER_PORT")?.parse()?,
                rank: variable("RANK")?.parse()?,
                size: variable("WORLD_SIZE")?.parse()?,
                process: format!("process {}", std::process::id()),
                deadline,
                interface: None,
            };
            Ok(gloo::world(&options)?)
        }
        _ => bail!("there is no backend {backend} here, or it takes no numbers like {numbers:?}"),
    }
}

fn variable(name: &str) -> Result<String> {
    std::env::var(name).with_context(|| format!("{name} is not set"))
}

/// Ends the transport; where the group has failed on some rank, once every rank has had the time to report.
fn leave(backend: &str, group: &Group, failed: bool) {
    if failed {
        std::thread::sleep(group.deadline() * 3);
    }
    #[cfg(feature = "mpi")]
    match (backend, failed) {
        ("mpi", true) => isobar_collectives::mpi::abort(0),
        ("mpi", false) => isobar_collectives::mpi::finalize(),
        _ => {}
    }
    if backend == "gloo" && !failed {
        // The store lives in the process of rank 0.
        drop(group.barrier());
    }
}
