//! Copies some samples of a Darcy file into a small one of the same layout: what `tests/data/darcy_excerpt.h5` was made
//! with, from the project's data set.
//!
//! `cargo run --release -p isobar-data --example darcy_excerpt -- ../shared/data/darcy_64.h5 tests/data/darcy_excerpt.h5 0 1 2 100 101 200 254 255`

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "an example talks to its reader")]

use std::process::ExitCode;

use isobar_data::{DarcyFile, DarcyWriter};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", isobar_torch::error_text(&*error));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), isobar_torch::BoxError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [source, target, samples @ ..] = arguments.as_slice() else {
        return Err("expected: SOURCE TARGET SAMPLE…".into());
    };
    let samples = samples.iter().map(|sample| sample.parse()).collect::<Result<Vec<usize>, _>>()?;

    let file = DarcyFile::open(source)?;
    if file.rows() != file.cols() {
        return Err(
            format!("{source} is on {} x {} points, not on a square grid", file.rows(), file.cols()).into()
        );
    }
    let batch = file.read(&samples, 0..file.rows(), 0..file.cols())?;
    let values = |tensor: &tch::Tensor| Vec::<f32>::try_from(tensor.f_flatten(0, -1)?);
    let mut writer = DarcyWriter::create(target, samples.len(), file.rows(), file.beta())?;
    writer.append(&values(&batch.nu)?, &values(&batch.u)?)?;
    writer.finish()?;

    let statistics = DarcyFile::open(target)?.statistics(0..samples.len())?;
    println!("{statistics:#?}");
    Ok(())
}
