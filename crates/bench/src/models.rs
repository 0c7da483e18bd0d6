//! Training steps of the models of `benches/models.json`, with fields and points that all ranks share.
//!
//! `benches/models.py` reads the same table and times the same steps in PyTorch.

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use indexmap::IndexMap;
use isobar_array::{Binary, Generator};
use isobar_collectives::Group;
use isobar_manager::DeviceMesh;
use isobar_models::{Batch, Mode, Model, ModelArray, ModelConfig};
use isobar_shard::{MeshParams, ParamStore, Placement, ShardTensor};
use isobar_torch::guard::NoGrad;
use isobar_train::optim::{AdamW, AdamWConfig, Optimizer};
use isobar_train::{DataParallel, DataParallelConfig, Parameters};
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

use super::{Prepared, Timed};

const TABLE: &str = include_str!("../../../benches/models.json");

const LR: f64 = 1e-3;

/// The model and the batch of `configs/darcy_afno.toml`.
const DEMO: &str = r#"{
    "model": { "type": "afno", "inp_shape": [64, 64], "in_channels": 1, "out_channels": 1, "patch_size": [4, 4],
               "embed_dim": 128, "depth": 4, "num_blocks": 8 },
    "inputs": { "fields": { "shape": [8, 1, 64, 64], "split": 2 } }
}"#;

/// A model and its inputs.
#[derive(Debug, Deserialize)]
pub(crate) struct Row {
    model: ModelConfig,
    /// Arrays of its batch.
    inputs: IndexMap<String, Input>,
}

#[derive(Debug, Deserialize)]
struct Input {
    shape: Vec<i64>,
    /// Dim that the ranks share; replicated if missing.
    split: Option<usize>,
}

/// Returns the table by the models' names.
fn rows() -> Result<IndexMap<String, Row>> {
    serde_json::from_str(TABLE).context("benches/models.json")
}

/// Returns the names of the models.
pub(crate) fn names() -> Result<Vec<String>> {
    Ok(rows()?.into_keys().collect())
}

/// Returns the row of a model.
pub(crate) fn row(name: &str) -> Result<Row> {
    rows()?.swap_remove(name).with_context(|| format!("no model `{name}` in benches/models.json"))
}

/// A training step over all ranks; `alone`, each rank has the full batch for itself, all at the same time.
pub(crate) fn step(group: &Group, row: &Row, alone: bool) -> Result<Prepared> {
    let group = if alone { Group::single() } else { group.clone() };
    tch::manual_seed(0);
    let mesh = DeviceMesh::new(&group, &[group.size() as i64], &["domain"])?;
    let mut full = Batch::default();
    let mut batch = Batch::default();
    for (name, input) in &row.inputs {
        let whole = Tensor::f_randn(&input.shape, (Kind::Float, Device::Cpu))?;
        let placement = input.split.map_or(Placement::Replicate, Placement::Shard);
        let split = ShardTensor::distribute(&whole, &mesh, &[placement])?;
        // The shard in memory of its own, as training reads it.
        let own = ShardTensor::from_parts(&split.local().f_contiguous()?.f_detach_copy()?, split.layout())?;
        (full, batch) = (full.with(name, whole), batch.with(name, own));
    }
    let mut store = ParamStore::new(Generator::new(0));
    let layouts = row.model.sharding().parameter_layouts().clone();
    let model = row
        .model
        .build::<ShardTensor>(&mut MeshParams::new(&mut store, &mesh).laid_out(&layouts).pending())?;
    check(row, &full, &*model, &batch)?;
    let (params, _) = Parameters::on_mesh(&store, &mesh)?;
    let mut optimizer = AdamW::new(&params, &AdamWConfig { lr: LR, ..AdamWConfig::default() })?;
    // The loss is that of the global batch, on every rank: one sample of one.
    let parallel = DataParallel::new(&params, &[], &group, &DataParallelConfig::default())?;
    let step = move || {
        parallel.zero_grad()?;
        let loss = loss(&model.forward(&batch, Mode::Eval)?, &batch)?.full_tensor(None)?;
        parallel.backward(Some(&loss), 1, 1)?;
        optimizer.step(LR)?;
        Ok(())
    };
    Ok(Prepared { timed: Timed::Step(Box::new(step)), output: None })
}

/// Sum over the outputs of their mean squared difference from the input fields, or from zero where shapes differ.
fn loss<A: ModelArray>(outputs: &Batch<A>, inputs: &Batch<A>) -> Result<A> {
    let fields = inputs.get(Batch::<A>::FIELDS);
    let mut sum: Option<A> = None;
    for output in outputs.names().filter_map(|name| outputs.get(name)) {
        let term = match fields.filter(|fields| fields.shape() == output.shape()) {
            Some(fields) => output.mse_loss(fields)?,
            None => output.mul(output)?.mean()?,
        };
        sum = Some(match sum {
            Some(sum) => sum.binary(Binary::Add, &term)?,
            None => term,
        });
    }
    sum.context("the model returned no output")
}

/// Compares the outputs with those of one rank.
fn check(
    row: &Row,
    full: &Batch<Tensor>,
    model: &dyn Model<ShardTensor>,
    batch: &Batch<ShardTensor>,
) -> Result<()> {
    let _no_grad = NoGrad::new();
    let dense = row.model.build::<Tensor>(&mut ParamStore::new(Generator::new(0)))?;
    let want = dense.forward(full, Mode::Eval)?;
    let got = model.forward(batch, Mode::Eval)?;
    for name in want.names() {
        let (Some(want), Some(got)) = (want.get(name), got.get(name)) else {
            bail!("the model has no output `{name}` on these ranks");
        };
        ensure!(
            got.full_tensor(None)?.f_allclose(want, 1e-3, 1e-4, false)?,
            "the output `{name}` differs from that of one rank"
        );
    }
    Ok(())
}

/// Measures the time of a step per collective, for the demo's model with sharded fields.
pub(crate) fn step_for_each_collective(group: &Group) -> Result<Prepared> {
    let row: Row = serde_json::from_str(DEMO)?;
    let Timed::Step(mut step) = step(group, &row, false)?.timed else { bail!("a step is timed as one") };
    let group = group.clone();
    let begun = move || group.flight().entries(1, false).last().map_or(0, |entry| entry.number);
    let measure = move || {
        let (before, start) = (begun(), Instant::now());
        step()?;
        let seconds = start.elapsed().as_secs_f64();
        let collectives = begun() - before;
        ensure!(collectives > 0, "a step has no collective; expected more ranks than one");
        Ok(seconds / collectives as f64)
    };
    Ok(Prepared { timed: Timed::Measured(Box::new(measure)), output: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Also the check of the table: every model builds, and its inputs fit.
    #[test]
    fn every_row_is_a_registered_model_that_counts_its_parameters() {
        for (name, row) in rows().unwrap() {
            let size = row.model.count(&Default::default).unwrap();
            assert!(size.trained > 1000, "{name}: {size:?}");
            // A variant of a model has its name and a word of its own.
            assert!(name.starts_with(row.model.name()), "{name}: {}", row.model.name());
        }
    }
}
