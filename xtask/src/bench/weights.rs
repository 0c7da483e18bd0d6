//! `cargo xtask bench --weights`: weights of Isobar's models in the classes of their sources.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::run::{ROOT, run as run_command};
use crate::setup::Machine;

/// Folders with cases of models.
const CASES: [&str; 2] = ["tests/golden", "crates/models/tests/golden"];

/// Cases that are left out.
const LEFT_OUT: [&str; 5] = [
    // No models of the registry.
    "model_edm_loss_song",
    "model_mesh_graph_net_sum",
    "patches",
    // Its features are in another dim than the model's.
    "model_fully_connected_fact_adaptive",
    // The source needs NATTEN, hence a GPU.
    "dit_mask_tokens",
];

/// Computes the outputs of each case with weights of Isobar, loads the weights into the source's class in the environment `peers`, and
/// compares its outputs.
pub(super) fn run(machine: &Machine, peers: &Path) -> Result<()> {
    let outputs = ROOT.join("target/outputs");
    // An earlier run may have written other cases.
    if outputs.exists() {
        fs::remove_dir_all(&outputs).with_context(|| format!("cannot remove {}", outputs.display()))?;
    }
    let mut write = machine.cargo(&["run", "--package", "isobar-models", "--example", "outputs"]);
    write.args(["--", "--own"]).arg(&outputs);
    for folder in CASES {
        let folder = ROOT.join(folder);
        let entries = folder.read_dir().with_context(|| format!("cannot list {}", folder.display()))?;
        let mut cases: Vec<_> = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
        cases.retain(|path| {
            path.extension().is_some_and(|extension| extension == "safetensors") && is_model(path)
        });
        cases.sort();
        write.args(cases);
    }
    run_command(&mut write)?;
    let mut compare = Command::new(peers.join("bin/python"));
    run_command(
        compare.env("TORCHDYNAMO_DISABLE", "1").arg(ROOT.join("benches/load_weights.py")).arg(outputs),
    )
}

/// Returns whether the model's source can run a case on a CPU.
fn is_model(path: &Path) -> bool {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let is_one = path.starts_with(ROOT.join(CASES[1]))
        || name.starts_with("model_")
        || name.starts_with("sphere_cnext_unet");
    is_one && !LEFT_OUT.contains(&&*name)
}
