//! Reading golden cases and comparing with them.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use isobar_array::{Generator, Window};
use isobar_models::ModelConfig;
use isobar_shard::{ParamStore, StateDict, read_safetensors};
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use crate::common::perturb;

/// A case of `tests/golden`: its description and its tensors.
pub(crate) struct Golden {
    attrs: Map<String, Value>,
    pub(crate) params: Vec<String>,
    /// Further names of parameters.
    pub(crate) tied: BTreeMap<String, String>,
    /// Inputs, by their names in the source.
    pub(crate) inputs: Vec<String>,
    pub(crate) op: String,
    pub(crate) training: bool,
    /// Weights are sines, and gradients of weights are given as their sums with sines.
    pub(crate) waves: bool,
    tensors: StateDict,
    rtol: f64,
    atol: f64,
}

impl Golden {
    pub(crate) fn read(name: &str) -> Self {
        Self::read_in("../../tests/golden", name)
    }

    /// Reads a case that is kept beside these tests: the values of the model's published code in double precision.
    pub(crate) fn own(name: &str) -> Self {
        Self::read_in("tests/golden", name)
    }

    /// Makes a case of a model without published code: perturbed weights, and random inputs and gradient of the output. It has no
    /// reference output.
    pub(crate) fn made(op: &str, attrs: Value, inputs: &[(&str, &[i64])], output: &[i64]) -> Self {
        let Value::Object(attrs) = attrs else { panic!("arguments are a table") };
        let model = ModelConfig::named(op, Value::Object(attrs.clone())).unwrap();
        let mut store = ParamStore::new(Generator::new(5)).with_options(Kind::Double, Device::Cpu);
        let _ = model.build::<Tensor>(&mut store).unwrap();
        perturb(&store, 6);
        let weights = store.parameters().iter().map(|own| (own.name.clone(), own.tensor.detach().copy()));
        let mut tensors: StateDict = weights.collect();
        let params = tensors.keys().cloned().collect();
        let drawn = inputs.iter().copied().chain([("output", output), ("grad.output", output)]);
        for (seed, (name, shape)) in (7..).zip(drawn) {
            let options = (Kind::Double, Device::Cpu);
            let values = Generator::new(seed).normal(&Window::whole(shape), 0.0, 1.0, options).unwrap();
            // Noise levels are above 0.
            let values = if name == "sigma" { values.exp() } else { values };
            tensors.insert(name.to_owned(), values);
        }
        Self {
            attrs,
            params,
            tied: BTreeMap::new(),
            inputs: inputs.iter().map(|(name, _)| (*name).to_owned()).collect(),
            op: op.to_owned(),
            training: false,
            waves: false,
            tensors,
            rtol: 0.0,
            atol: 0.0,
        }
    }

    fn read_in(folder: &str, name: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(folder);
        let path = path.join(format!("{name}.safetensors"));
        let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let case: Value = serde_json::from_str(&header.metadata().as_ref().unwrap()["case"]).unwrap();
        let mut attrs = case["attrs"].as_object().unwrap().clone();
        // These two are no constructor arguments.
        let tied = attrs.remove("tied").map(|tied| serde_json::from_value(tied).unwrap());
        let training = attrs.remove("training").is_some_and(|training| training == true);
        Self {
            attrs,
            tied: tied.unwrap_or_default(),
            inputs: serde_json::from_value(case["inputs"].clone()).unwrap(),
            op: case["op"].as_str().unwrap().to_owned(),
            training,
            waves: case["waves"] == true,
            params: serde_json::from_value(case["params"].clone()).unwrap(),
            rtol: case["rtol"].as_f64().unwrap(),
            atol: case["atol"].as_f64().unwrap(),
            tensors: read_safetensors(&path).unwrap(),
        }
    }

    pub(crate) fn config<C: serde::de::DeserializeOwned>(&self) -> C {
        serde_json::from_value(Value::Object(self.attrs.clone())).unwrap()
    }

    /// The configuration of the registered model that the case names.
    pub(crate) fn model(&self) -> ModelConfig {
        ModelConfig::named(&self.op, Value::Object(self.attrs.clone())).unwrap()
    }

    pub(crate) fn tensor(&self, name: &str) -> Tensor {
        self.tensors[name].shallow_clone()
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    pub(crate) fn state_dict(&self) -> StateDict {
        self.params.iter().map(|name| (name.clone(), self.tensor(name))).collect()
    }

    pub(crate) fn check(&self, name: &str, got: &Tensor) {
        self.check_part(name, got, |whole| whole);
    }

    /// Compares with the part of a saved tensor that `part` cuts out.
    pub(crate) fn check_part(&self, name: &str, got: &Tensor, part: impl Fn(Tensor) -> Tensor) {
        let want = part(self.tensor(name)).to_kind(Kind::Double);
        let got = got.detach().to_kind(Kind::Double);
        assert_eq!(got.size(), want.size(), "{name}");
        if want.numel() == 0 {
            return;
        }
        let worst = ((&got - &want).abs() / (want.abs() * self.rtol + self.atol)).max().double_value(&[]);
        assert!(worst <= 1.0, "{name} is {worst} times the tolerance away");
    }
}
