//! Numeric tests on emulated processors: numeric libraries limited to older instruction sets, and other numbers of threads.
//!
//! A processor with other vector registers sums in another order. A tolerance that holds on one processor only is found
//! here before it fails elsewhere.

use anyhow::Result;
use isobar_harness::THREADS;

use super::{Session, Tests, report, suites::Suites};

/// A processor to emulate.
struct Processor {
    name: &'static str,
    /// The instruction set that it needs, by its name in `/proc/cpuinfo`.
    needs: &'static str,
    /// Values for libtorch's own kernels, oneDNN and MKL.
    limits: [&'static str; 3],
    threads: usize,
}

const LIMITS: [&str; 3] = ["ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"];
const AVX2: [&str; 3] = ["avx2", "AVX2", "AVX2"];
const SSE4: [&str; 3] = ["default", "SSE41", "SSE4_2"];

const PROCESSORS: [Processor; 4] = [
    Processor { name: "AVX2, 1 thread", needs: "avx2", limits: AVX2, threads: 1 },
    Processor { name: "AVX2, 2 threads", needs: "avx2", limits: AVX2, threads: 2 },
    Processor { name: "SSE4, 1 thread", needs: "sse4_2", limits: SSE4, threads: 1 },
    Processor { name: "SSE4, 2 threads", needs: "sse4_2", limits: SSE4, threads: 2 },
];

/// Packages all of whose tests compute.
const PACKAGES: [&str; 5] = ["isobar-array", "isobar-shard", "isobar-nn", "isobar-models", "isobar-train"];

/// Modules of `isobar-tests` with whole runs that compare numbers.
const RUNS: [&str; 4] = ["curves", "domain", "train", "verify"];

/// Runs the numeric tests on each of the emulated processors.
pub(super) fn run(session: &mut Session<'_>, suites: &Suites) -> Result<()> {
    let (_, sets) = report::describe(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default());
    for processor in &PROCESSORS {
        if !sets.split(' ').any(|set| set == processor.needs) {
            let skip = format!("processor {}: this one lacks {}", processor.name, processor.needs);
            session.summary.skips.push(skip);
            continue;
        }
        let variables = processor.variables();
        let torch = suites.isobar.as_deref().and_then(|isobar| report::libtorch(isobar, &variables));
        println!("emulated processor: {}; {}", processor.name, torch.unwrap_or_default());
        let runs = ["-p", "isobar-tests", "--test", "main"].map(str::to_owned).to_vec();
        let tests =
            [(packages(), Vec::new(), 1), (runs, modules(), 2)].map(|(chosen, filters, at_once)| Tests {
                label: format!("{}: ", processor.name),
                chosen,
                filters,
                variables: variables.clone(),
                at_once,
            });
        session.test(&tests, suites)?;
    }
    Ok(())
}

fn packages() -> Vec<String> {
    let mut words: Vec<_> = PACKAGES.iter().flat_map(|package| ["-p", package]).map(str::to_owned).collect();
    words.push("--tests".to_owned());
    words
}

fn modules() -> Vec<String> {
    RUNS.map(|module| format!("{module}::")).to_vec()
}

impl Processor {
    fn variables(&self) -> Vec<(&'static str, String)> {
        let limits = LIMITS.into_iter().zip(self.limits.map(str::to_owned));
        limits.chain([(THREADS, self.threads.to_string())]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of packages and modules here are those of the workspace.
    #[test]
    fn what_is_chosen_exists() {
        let root = isobar_harness::workspace();
        for module in RUNS {
            assert!(root.join("tests/tests").join(module).with_extension("rs").exists(), "{module}");
        }
        for package in PACKAGES {
            assert!(
                root.join(package.replace("isobar-", "crates/")).join("Cargo.toml").exists(),
                "{package}"
            );
        }
    }

    #[test]
    fn processors_differ() {
        let mut all: Vec<_> = PROCESSORS.iter().map(Processor::variables).collect();
        all.sort();
        all.dedup();
        assert!(all.len() == PROCESSORS.len() && all.len() >= 3);
    }
}
