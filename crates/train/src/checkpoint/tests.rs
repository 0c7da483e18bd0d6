use std::time::Duration;

use isobar_collectives::threads;
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use super::*;
use crate::optim::{AdamW, AdamWConfig};
use crate::{Error, Parameter};

const DEADLINE: Duration = Duration::from_secs(60);

struct Model {
    params: Parameters,
    buffers: Vec<(String, Tensor)>,
    adamw: AdamW,
}

impl Model {
    fn of(params: Parameters) -> Self {
        let adamw = AdamW::new(&params, &AdamWConfig::default()).unwrap();
        Self { params, buffers: vec![("running_mean".into(), Tensor::from_slice(&[0.5f32]))], adamw }
    }

    fn new(fill: f64) -> Self {
        let tensor =
            |shape: &[i64], kind| Tensor::full(shape, fill, (kind, Device::Cpu)).set_requires_grad(true);
        let weight = tensor(&[2, 3], Kind::Float);
        let bias = tensor(&[3], Kind::BFloat16);
        let spectral = tensor(&[2, 2], Kind::ComplexFloat);
        let named = [("w", weight), ("b", bias), ("s", spectral)];
        Self::of(Parameters::new(named.iter().map(|(n, t)| Parameter::replicated(*n, t)).collect()).unwrap())
    }

    fn contents(&mut self) -> Contents<'_> {
        Contents { params: &self.params, buffers: &self.buffers, optimizer: &mut self.adamw }
    }

    fn train(&mut self) {
        for param in &self.params {
            param.tensor.abs().pow_tensor_scalar(2).sum(None).backward();
        }
        crate::optim::Optimizer::step(&mut self.adamw, 0.1).unwrap();
    }

    fn bytes(&self) -> Vec<u8> {
        let state = crate::optim::Optimizer::state(&self.adamw);
        let params = self.params.iter().map(|p| (p.name.clone(), p.tensor.shallow_clone()));
        let slots =
            state.tensors.iter().map(|t| (format!("{}.{}", t.slot, t.param), t.tensor.shallow_clone()));
        tensors::encode(&params.chain(slots).collect::<Vec<_>>()).unwrap()
    }
}

fn state(step: u64) -> RunState {
    let extra = serde_json::json!({"mean": 0.1, "std": 1.0 / 3.0});
    RunState {
        step,
        epoch: 1,
        seed: 42,
        best: Some(0.1 + 0.2),
        config: "[run]\n".into(),
        extra,
        ..Default::default()
    }
}

#[test]
fn restores_every_bit() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path(), 0, &Group::single());
    let mut model = Model::new(1.0);
    model.train();
    let path = checkpoints.save(&mut model.contents(), &state(5), false).unwrap();
    let mut other = Model::new(7.0);
    assert_eq!(checkpoints.load(folder.path(), &mut other.contents()).unwrap(), state(5));
    assert_eq!(other.bytes(), model.bytes());
    assert_eq!(read_run_state(&path).unwrap(), state(5));

    let third = Model::new(9.0);
    load_state_dict(&path, &third.params, &third.buffers).unwrap();
    assert_eq!(third.params.get("w").unwrap().tensor, model.params.get("w").unwrap().tensor);
}

#[test]
fn keeps_the_newest_and_the_best() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path(), 2, &Group::single());
    let mut model = Model::new(1.0);
    std::fs::create_dir_all(folder.path().join(".step_00000001.1.tmp")).unwrap();
    for step in 1..=5 {
        checkpoints.save(&mut model.contents(), &state(step), step == 2).unwrap();
    }
    checkpoints.save(&mut model.contents(), &state(5), false).unwrap();
    let mut names: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["best", "latest", "step_00000002", "step_00000004", "step_00000005"]);
    assert!(checkpoints.latest().unwrap().ends_with("step_00000005"));
    assert!(checkpoints.best().unwrap().ends_with("step_00000002"));
}

#[rstest]
#[case::cut("model.safetensors", |bytes: &mut Vec<u8>| bytes.truncate(100), "torn: it has 100 bytes")]
#[case::flipped("model.safetensors", |bytes: &mut Vec<u8>| *bytes.last_mut().unwrap() ^= 1, "damaged: its CRC-32C")]
#[case::optimizer("optimizer.safetensors", |bytes: &mut Vec<u8>| bytes.push(0), "torn: it has")]
#[case::metadata("metadata.json", |bytes: &mut Vec<u8>| bytes.truncate(40), "torn or foreign: EOF")]
#[case::foreign("metadata.json", |bytes: &mut Vec<u8>| *bytes = b"{\"format\": \"x\"}".to_vec(), "its format is Some(\"x\")")]
#[case::version("metadata.json", |bytes: &mut Vec<u8>| *bytes = replace(bytes, "\"version\": 2", "\"version\": 9"),
    "its version is 9, this program reads 2")]
fn damaged_files_are_refused(#[case] file: &str, #[case] damage: fn(&mut Vec<u8>), #[case] reason: &str) {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path(), 0, &Group::single());
    let mut model = Model::new(1.0);
    let path = checkpoints.save(&mut model.contents(), &state(1), false).unwrap();
    let mut bytes = std::fs::read(path.join(file)).unwrap();
    damage(&mut bytes);
    std::fs::write(path.join(file), bytes).unwrap();

    let mut other = Model::new(7.0);
    let before = other.bytes();
    let error = checkpoints.load(&path, &mut other.contents()).unwrap_err();
    assert!(matches!(error, Error::Checkpoint { .. }), "{error}");
    assert!(error.to_string().contains(reason), "{error}");
    assert!(error.to_string().contains(file), "{error}");
    assert_eq!(other.bytes(), before, "nothing was changed");
}

fn replace(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    String::from_utf8_lossy(bytes).replace(from, to).into_bytes()
}

#[test]
fn another_models_checkpoint_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path(), 0, &Group::single());
    checkpoints.save(&mut Model::new(1.0).contents(), &state(1), false).unwrap();
    let tensor = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let entries = [("w", tensor(&[2, 4])), ("b", tensor(&[3])), ("new", tensor(&[1]))];
    let entries = entries.iter().map(|(n, t)| Parameter::replicated(*n, t)).collect();
    let mut other = Model::of(Parameters::new(entries).unwrap());
    let error = checkpoints.load(folder.path(), &mut other.contents()).unwrap_err().to_string();
    let (_, reason) = error.split_once("refused: ").unwrap();
    insta::assert_snapshot!(reason, @r#"it is of another model: "w" is Float [2, 3], the model has Float [2, 4]; "b" is BFloat16 [3], the model has Float [3]; "new" is missing; "s" is not of this model"#);
}

#[test]
fn an_empty_folder_has_none() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path(), 0, &Group::single());
    let error = checkpoints.load(folder.path(), &mut Model::new(1.0).contents()).unwrap_err();
    assert!(matches!(error, Error::NoCheckpoint { .. }), "{error}");
    std::fs::write(folder.path().join("latest"), "step_00000009").unwrap();
    let error = checkpoints.latest().unwrap_err().to_string();
    assert!(error.contains(r#"it names "step_00000009", which is not there"#), "{error}");
}

/// Written by 2 data × 2 model ranks, read by 1 and by 3 model ranks.
#[test]
fn loads_on_another_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let whole = || Tensor::arange(15, (Kind::Float, Device::Cpu)).view([5, 3]);
    let model = |group: &Group, fill: f64| {
        let sizes = isobar_collectives::balanced(5, group.size());
        let start: i64 = sizes[..group.rank()].iter().sum();
        let part = (whole().narrow(0, start, sizes[group.rank()]) + fill).set_requires_grad(true);
        let plain = Tensor::from_slice(&[fill as f32]).set_requires_grad(true);
        let entries = vec![Parameter::sharded("w", &part, 0, sizes), Parameter::replicated("p", &plain)];
        Model::of(Parameters::over(entries, group).unwrap())
    };
    threads::run(4, DEADLINE, |world| {
        let pair = world.split("model", Some(world.rank() / 2), world.rank() as i64).unwrap().unwrap();
        let mut model = model(&pair, 1.0);
        model.train();
        Checkpoints::new(folder.path(), 0, &world).save(&mut model.contents(), &state(3), false).unwrap();
    });
    let mut expected = model(&Group::single(), 1.0);
    expected.train();
    let check = |mut found: Model, world: &Group| {
        Checkpoints::new(folder.path(), 0, world).load(folder.path(), &mut found.contents()).unwrap();
        found
    };
    let single = check(model(&Group::single(), 0.0), &Group::single());
    assert_eq!(single.bytes(), expected.bytes());
    threads::run(3, DEADLINE, |world| {
        let found = check(model(&world, 0.0), &world);
        let sizes = isobar_collectives::balanced(5, 3);
        let start: i64 = sizes[..world.rank()].iter().sum();
        let part = whole().narrow(0, start, sizes[world.rank()]) + 1.0
            - 0.1
            - 0.001 * (whole().narrow(0, start, sizes[world.rank()]) + 1.0);
        assert!(found.params.get("w").unwrap().tensor.allclose(&part, 1e-5, 1e-5, false));
    });
}
