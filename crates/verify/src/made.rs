//! Cases that tests make of dense models.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use isobar_array::{Generator, Window};
use isobar_models::{Batch, Mode, ModelConfig};
use isobar_shard::ParamStore;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::bytes::pack;

/// An input: its name in the model's source, its shape, and the dims along which it is sharded.
pub(crate) type Input<'a> = (&'a str, &'a [i64], &'a [usize]);

/// Writes a case of a registered model in float64, with random weights and inputs, and returns its file.
pub(crate) fn write(folder: &Path, op: &str, attrs: &Value, inputs: &[Input<'_>]) -> PathBuf {
    let config = ModelConfig::named(op, attrs.clone()).unwrap();
    let mut store = ParamStore::new(Generator::new(1)).with_options(Kind::Double, Device::Cpu);
    let model = config.build::<Tensor>(&mut store).unwrap();
    let params: Vec<String> = store.parameters().iter().map(|own| own.name.clone()).collect();
    let mut tensors = BTreeMap::new();
    for (seed, own) in (2..).zip(store.parameters()) {
        if own.trainable {
            // Weights that start as zeros would hide what a model computes.
            let _ = tch::no_grad(|| {
                own.tensor.shallow_clone().f_add_(&(normal(seed, &own.shape) * 0.1)).unwrap()
            });
        }
        tensors.insert(own.name.clone(), own.tensor.shallow_clone());
    }
    let mut batch = Batch::default();
    for (seed, (name, shape, _)) in (1_000_000..).zip(inputs) {
        let values = normal(seed, shape).set_requires_grad(true);
        batch = batch.with(config.signature().array(name), values.shallow_clone());
        tensors.insert((*name).to_owned(), values);
    }
    let output = model.forward(&batch, Mode::Eval).unwrap().take("fields").unwrap();
    let cotangent = normal(0, &output.size());
    (&output * &cotangent).sum(Kind::Double).backward();
    let gradients = tensors.iter().filter(|(_, tensor)| tensor.grad().defined());
    let gradients: Vec<_> = gradients.map(|(name, tensor)| (format!("grad.{name}"), tensor.grad())).collect();
    tensors.extend(gradients);
    tensors.extend([("output".to_owned(), output), ("grad.output".to_owned(), cotangent)]);

    let names: Vec<&str> = inputs.iter().map(|(name, ..)| *name).collect();
    let shard_dims: BTreeMap<_, _> = inputs.iter().map(|(name, _, dims)| (*name, *dims)).collect();
    let header = json!({
        "op": op, "attrs": attrs, "inputs": names, "params": params, "outputs": ["output"],
        "shard_dims": shard_dims, "complex": [], "rtol": 1e-9, "atol": 1e-9
    });
    let tensors: Vec<(&str, &Tensor)> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let path = folder.join(format!("{op}.safetensors"));
    std::fs::write(&path, pack(&tensors, Some(("case", &header.to_string()))).unwrap()).unwrap();
    path
}

fn normal(seed: u64, shape: &[i64]) -> Tensor {
    Generator::new(seed).normal(&Window::whole(shape), 0.0, 1.0, (Kind::Double, Device::Cpu)).unwrap()
}
