//! Comparison of training runs.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use isobar_harness::{curve::SingleRun, output_within};
use tch::{Kind, Tensor};
use tempfile::tempdir;

/// Number of perturbed starts that a run in single precision is compared with.
const STARTS: u64 = 2;

/// A training run in single precision on one layout, and how fast rounding grows in it: what runs on other layouts are compared
/// with.
///
/// `train` trains in a folder, `run.output`, with more settings besides its own, to the end; `name` is its `run.name`. `numbers`
/// reads what it recorded there. The run is taken three times, twice of these from weights that are one unit in the last place
/// away.
///
/// # Panics
///
/// When a run fails.
#[must_use]
pub fn single_run(
    isobar: &str,
    name: &str,
    train: impl Fn(&Path, &[&str]),
    numbers: impl Fn(&Path) -> Vec<f64>,
) -> SingleRun {
    let folder = tempdir().unwrap();
    let place = |part: &str| folder.path().join(part);
    train(&place("start"), &["train.max_steps=0"]);
    let weights = place("weights.safetensors");
    export(isobar, &place("start").join(name), &weights);
    let run = |part: &str, more: &[&str]| {
        train(&place(part), more);
        numbers(&place(part))
    };
    let reference = run("reference", &[]);
    let perturbed: Vec<Vec<f64>> = (0..STARTS)
        .map(|seed| {
            let near = nudged(&weights, seed);
            run(&format!("perturbed_{seed}"), &[&format!("checkpoint.init={}", near.display())])
        })
        .collect();
    SingleRun::new(reference, &perturbed)
}

/// `isobar checkpoint export`.
fn export(isobar: &str, run: &Path, out: &Path) {
    let mut command = Command::new(isobar);
    command.args(["checkpoint", "export"]).args([run, out]);
    let output = output_within(&mut command, Duration::from_secs(60)).unwrap().expect("did not end");
    assert!(output.status.success(), "{output:?}");
}

/// A file of weights beside `weights`, each one unit in the last place above or below, by the seed.
fn nudged(weights: &Path, seed: u64) -> PathBuf {
    let mut draw = seed;
    let mut nudge = |value: f32| {
        // Knuth's linear congruential generator; its high bits are the better ones.
        draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if draw >> 63 == 0 { value.next_up() } else { value.next_down() }
    };
    let mut moved = Vec::new();
    for (name, tensor) in Tensor::read_safetensors(weights).unwrap() {
        assert_eq!(tensor.kind(), Kind::Float, "{name}");
        let values = Vec::<f32>::try_from(tensor.flatten(0, -1)).unwrap();
        let values: Vec<f32> = values.into_iter().map(&mut nudge).collect();
        moved.push((name, Tensor::from_slice(&values).view(&tensor.size()[..])));
    }
    let out = weights.with_extension(format!("{seed}.safetensors"));
    Tensor::write_safetensors(&moved, &out).unwrap();
    out
}
