//! Writes weights, inputs and outputs of models in double precision, for `benches/load_weights.py`:
//!
//! ```sh
//! cargo run -p isobar-models --example outputs -- OUT tests/golden/model_*.safetensors crates/models/tests/golden/*.safetensors
//! ```
//!
//! Each file is a case of a model: its configuration, inputs and, unless `--own` is given first, weights. With `--own`, weights start
//! as a fresh model's, with noise added so that those that start at zero count.

#![expect(clippy::print_stderr, reason = "an example talks to its reader")]

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use isobar_array::{Generator, Window};
use isobar_models::{Batch, Mode, ModelConfig};
use isobar_shard::{ParamStore, StateDict, read_safetensors};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    let mut given: Vec<String> = std::env::args().skip(1).collect();
    let fresh = given.first().is_some_and(|first| first == "--own");
    if fresh {
        given.remove(0);
    }
    let Some((out, cases)) = given.split_first() else {
        eprintln!("expected [--own] OUT CASE…");
        return ExitCode::FAILURE;
    };
    let mut code = ExitCode::SUCCESS;
    for case in cases {
        if let Err(error) = write(Path::new(case), Path::new(out), fresh) {
            eprintln!("{case}: {error}");
            code = ExitCode::FAILURE;
        }
    }
    code
}

/// Computes the outputs of one case and writes them.
fn write(path: &Path, out: &Path, fresh: bool) -> Result<()> {
    std::fs::create_dir_all(out)?;
    let bytes = std::fs::read(path)?;
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes)?;
    let metadata = header.metadata().clone().unwrap_or_default();
    let case: Value = serde_json::from_str(metadata.get("case").ok_or("no case")?)?;
    let mut attrs = case["attrs"].clone();
    if let Some(attrs) = attrs.as_object_mut() {
        ["tied", "training"].iter().for_each(|name| drop(attrs.remove(*name)));
        // A network within another is named as the case itself is.
        if let Some(network) = attrs.get_mut("model").and_then(Value::as_object_mut)
            && let Some(name) = network.remove("op")
        {
            let _ = network.insert("type".to_owned(), name);
        }
    }
    let config = ModelConfig::named(case["op"].as_str().unwrap_or_default(), attrs)?;
    let given = read_safetensors(path)?;
    let mut store = ParamStore::new(Generator::new(5)).with_options(DOUBLE.0, DOUBLE.1);
    let model = config.build::<Tensor>(&mut store)?;
    if fresh {
        add_noise(&store)?;
    } else {
        let names = case["params"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let state = names.filter_map(|name| Some((name.to_owned(), given.get(name)?.to_kind(Kind::Double))));
        store.load(&state.collect())?;
    }
    let (signature, mut tensors) = (config.signature(), StateDict::new());
    let mut batch = Batch::default();
    for name in case["inputs"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        let x = given.get(name).ok_or_else(|| format!("no input {name}"))?;
        let x = if x.is_floating_point() { x.to_kind(Kind::Double) } else { x.shallow_clone() };
        batch = batch.with(signature.array(name), x.shallow_clone());
        let _ = tensors.insert(format!("input:{name}"), x);
    }
    let mut outputs = model.forward(&batch, Mode::Eval)?;
    // Those of the source, or those of several streams.
    let known = |name: &&str| signature.outputs.contains(name) || name.starts_with("fields.");
    let names: Vec<String> = outputs.names().filter(known).map(str::to_owned).collect();
    // In the order of the source's results.
    let place = |name: &str| signature.outputs.iter().position(|own| *own == name).unwrap_or(usize::MAX);
    let mut ordered: Vec<&String> = names.iter().collect();
    ordered.sort_by_key(|name| (place(name), (*name).clone()));
    for (at, name) in ordered.into_iter().enumerate() {
        let y = outputs.take(name).ok_or("no output")?;
        let _ = tensors.insert(format!("output:{at}"), y.detach());
    }
    tensors.extend(store.state_dict()?.into_iter().map(|(name, x)| (format!("weight:{name}"), x)));
    let name = path.file_name().ok_or("no file name")?;
    save(&tensors, case, &out.join(name))
}

/// Adds noise of a standard deviation of 0.1 to all trained parameters.
fn add_noise(store: &ParamStore) -> Result<()> {
    for (at, parameter) in store.trainable().enumerate() {
        let noise = Generator::new(at as u64).normal(&Window::whole(&parameter.shape), 0.0, 0.1, DOUBLE)?;
        let mut tensor = parameter.tensor.detach();
        let _ = tensor.f_add_(&noise)?;
    }
    Ok(())
}

fn save(tensors: &StateDict, case: Value, path: &Path) -> Result<()> {
    let mut bytes = BTreeMap::new();
    for (name, x) in tensors {
        let kind = if x.is_floating_point() { Kind::Double } else { Kind::Int64 };
        let x = x.f_to_kind(kind)?.f_contiguous()?;
        let mut data = vec![0u8; x.numel() * 8];
        x.f_copy_data_u8(&mut data, x.numel())?;
        let shape = x.size().iter().map(|&extent| extent as usize).collect::<Vec<usize>>();
        let _ = bytes.insert(name.clone(), (kind, shape, data));
    }
    let views = bytes.iter().map(|(name, (kind, shape, data))| {
        let dtype = if *kind == Kind::Double { Dtype::F64 } else { Dtype::I64 };
        Ok((name.clone(), TensorView::new(dtype, shape.clone(), data)?))
    });
    let views = views.collect::<Result<Vec<_>>>()?;
    let metadata = [("case".to_owned(), serde_json::to_string(&case)?)].into();
    Ok(safetensors::serialize_to_file(views, Some(metadata), path)?)
}
