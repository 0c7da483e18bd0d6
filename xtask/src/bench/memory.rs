//! `cargo xtask bench --memory`: peak memory of a training step of each model, on one rank and on four.

use anyhow::{Context, Result};

use super::{models, our_run, times};

/// Prints a table of the peaks: bytes live in libtorch's CPU allocator on the rank with the most, weights and inputs included.
pub(super) fn run(repeats: usize) -> Result<()> {
    println!("| model | 1 rank, MiB | 4 ranks, MiB | ratio |\n|---|---|---|---|");
    for name in models::table()?.keys() {
        let case = format!("models/{name}");
        let peak = |ranks: &str| -> Result<f64> {
            let report = times(&mut our_run(ranks, &[&case], repeats))?;
            report["cases"][&case]["peak_bytes"].as_f64().with_context(|| format!("{case} reports no peak"))
        };
        let (one, four) = (peak("1")?, peak("4")?);
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        println!("| `{name}` | {:.0} | {:.0} | {:.2} |", mib(one), mib(four), four / one);
    }
    Ok(())
}
