//! Generates a small Darcy data set, and goes through two epochs of it as rank 0 of 2 would.
//!
//! `cargo run --release -p isobar-data --example darcy`

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "an example talks to its reader")]

use std::process::ExitCode;

use isobar_data::generate::{DarcyOptions, darcy};
use isobar_data::{Augment, DarcyFile, InMemory, Normalizer, Sampler, part, split};

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
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("darcy_32.h5");
    let options = DarcyOptions { samples: 40, size: 32, seed: 7, ..DarcyOptions::default() };
    darcy(&options, &path, |_| {})?;

    let file = DarcyFile::open(&path)?;
    let (train, validation) = split(file.len(), 30)?;
    println!("{} training and {} validation samples", train.len(), validation.len());
    let statistics = file.statistics(train.clone())?;
    println!("u: mean {:.6}, standard deviation {:.6}", statistics.u.mean, statistics.u.std);
    let normalizer = Normalizer::from_statistics(&statistics.u)?;

    let train = InMemory::load(&file, train)?;
    let sampler = Sampler::new(train.len(), 8, options.seed, true)?;
    let (rank, size) = (0, 2);
    for epoch in 0..2 {
        for global in sampler.epoch(epoch) {
            let mine = part(&global, rank, size);
            let solution = &train.batch(mine)?.targets[0];
            let solution = Augment::Square.apply(options.seed, epoch, mine, solution)?;
            let target = normalizer.encode(&solution)?;
            println!("epoch {epoch}: {mine:?} of {} samples, target {:?}", global.len(), target.size());
        }
    }
    Ok(())
}
