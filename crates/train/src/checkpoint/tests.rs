use std::path::PathBuf;
use std::time::Duration;

use isobar_array::{Generator, Window};
use isobar_collectives::threads;
use isobar_manager::DeviceMesh;
use isobar_shard::{Init, ParamStore, Params, Placement};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use super::*;
use crate::optim::{AdamW, AdamWConfig, AverageRule, Averaged, Optimizer, OptimizerState};
use crate::{Error, Parameter, Parameters};

const DEADLINE: Duration = Duration::from_secs(60);

pub(super) struct Model {
    params: Parameters,
    buffers: Vec<(String, Tensor)>,
    adamw: AdamW,
}

impl Model {
    pub(super) fn of(params: Parameters) -> Self {
        let adamw = AdamW::new(&params, &AdamWConfig::default()).unwrap();
        Self { params, buffers: vec![("running_mean".into(), Tensor::from_slice(&[0.5f32]))], adamw }
    }

    pub(super) fn new(fill: f64) -> Self {
        let tensor =
            |shape: &[i64], kind| Tensor::full(shape, fill, (kind, Device::Cpu)).set_requires_grad(true);
        let weight = tensor(&[2, 3], Kind::Float);
        let bias = tensor(&[3], Kind::BFloat16);
        let spectral = tensor(&[2, 2], Kind::ComplexFloat);
        let scalar = tensor(&[], Kind::Double);
        let named = [("w", weight), ("b", bias), ("s", spectral), ("scale", scalar)];
        Self::of(Parameters::new(named.iter().map(|(n, t)| Parameter::replicated(*n, t)).collect()).unwrap())
    }

    pub(super) fn contents(&mut self) -> Contents<'_> {
        Contents { params: &self.params, buffers: &self.buffers, optimizer: Some(&mut self.adamw) }
    }

    pub(super) fn train(&mut self) {
        for param in &self.params {
            param.tensor.abs().pow_tensor_scalar(2).sum(None).backward();
        }
        self.adamw.step(0.1).unwrap();
    }

    /// All values, to the last bit.
    pub(super) fn bytes(&mut self) -> Vec<u8> {
        self.contents().shards().unwrap().iter().flat_map(|shard| values(&shard.tensor)).collect()
    }
}

fn values(tensor: &Tensor) -> Vec<u8> {
    let tensor = tensor.detach().contiguous();
    let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.copy_data_u8(&mut bytes, tensor.numel());
    bytes
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

fn scored(step: u64, error: f64) -> RunState {
    RunState { validation_error: Some(error), ..state(step) }
}

pub(super) fn alone(folder: &Path, keep: Keep) -> Checkpoints {
    Checkpoints::new(folder, keep, &Group::single())
}

/// A folder with one checkpoint, and the model that is in it.
pub(super) fn saved() -> (tempfile::TempDir, PathBuf, Model) {
    let folder = tempfile::tempdir().unwrap();
    let mut model = Model::new(1.0);
    model.train();
    let path = alone(folder.path(), Keep::ALL).save(&model.contents(), &state(1)).unwrap();
    (folder, path, model)
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn restores_every_bit() {
    let (folder, path, mut model) = saved();
    let checkpoints = alone(folder.path(), Keep::ALL);
    for which in [
        CheckpointSelector::Newest,
        CheckpointSelector::At(path.clone()),
        CheckpointSelector::At(folder.path().to_owned()),
    ] {
        let mut other = Model::new(7.0);
        let loaded = checkpoints.load(&which, &mut other.contents()).unwrap();
        assert_eq!((loaded.path, loaded.state), (path.clone(), state(1)));
        assert_eq!(other.bytes(), model.bytes());
    }
    assert_eq!(read_run_state(folder.path()).unwrap(), state(1));
    assert_eq!(names(&path), ["manifest.json", "rank_00000.safetensors"]);

    // Without an optimizer, the weights alone; and what other programs read of the file.
    let third = Model::new(9.0);
    let mut contents = Contents { params: &third.params, buffers: &third.buffers, optimizer: None };
    checkpoints.load(&CheckpointSelector::Newest, &mut contents).unwrap();
    let saved = &model.params.get("w").unwrap().tensor;
    assert_eq!(third.params.get("w").unwrap().tensor, *saved);
    let file = std::fs::read(path.join("rank_00000.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&file).unwrap();
    let read = file.tensor("model.w").unwrap();
    assert_eq!((read.dtype(), read.shape()), (safetensors::Dtype::F32, &[2, 3][..]));
    assert_eq!(read.data(), values(saved));
}

#[test]
fn keeps_the_newest_and_the_best() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = alone(folder.path(), Keep { newest: 2, best: 1 });
    let mut model = Model::new(1.0);
    let left = folder.path().join("step_00000009");
    std::fs::create_dir_all(&left).unwrap();
    std::fs::write(left.join("rank_00000.safetensors"), "half").unwrap();
    let foreign = folder.path().join("step_00000008");
    std::fs::create_dir_all(&foreign).unwrap();
    std::fs::write(foreign.join("notes.txt"), "mine").unwrap();
    for (step, error) in [(1, 0.3), (2, 0.1), (3, 0.2), (4, 0.4), (5, 0.5)] {
        checkpoints.save(&model.contents(), &scored(step, error)).unwrap();
    }
    checkpoints.save(&model.contents(), &scored(5, 0.6)).unwrap();
    assert_eq!(names(folder.path()), ["step_00000002", "step_00000004", "step_00000005", "step_00000008"]);
    let step = |which| checkpoints.load(&which, &mut Model::new(1.0).contents()).unwrap().state;
    assert_eq!(
        (step(CheckpointSelector::Newest), step(CheckpointSelector::Best)),
        (scored(5, 0.6), scored(2, 0.1))
    );
    assert_eq!(names(&folder.path().join("step_00000005")).len(), 2, "what was replaced is gone");
}

/// Optimizer with averages, and true if all tensors of the last state that it loaded were in its own memory or took none.
struct Watched(Averaged, bool);

impl Watched {
    fn new(params: &Parameters, rules: &[AverageRule]) -> Self {
        let adamw = AdamW::new(params, &AdamWConfig::default()).unwrap();
        Self(Averaged::new(Box::new(adamw), params, rules).unwrap(), false)
    }
}

impl Optimizer for Watched {
    fn step(&mut self, lr: f64) -> Result<()> {
        self.0.step(lr)
    }

    fn state(&self) -> OptimizerState {
        self.0.state()
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<()> {
        self.0.load_state(state)?;
        let own: Vec<_> = self.state().tensors.iter().map(|tensor| tensor.tensor.data_ptr()).collect();
        // Placeholders repeat one zero.
        let takes_none =
            |tensor: &Tensor| tensor.stride().iter().all(|stride| *stride == 0) || tensor.numel() <= 1;
        self.1 = state
            .tensors
            .iter()
            .all(|saved| own.contains(&saved.tensor.data_ptr()) || takes_none(&saved.tensor));
        Ok(())
    }
}

const WIDTHS: [AverageRule; 2] = [AverageRule::Width(0.05), AverageRule::Width(0.1)];
const DECAYS: [AverageRule; 2] = [AverageRule::Decay(0.1), AverageRule::Decay(0.2)];

/// A resumed run reads the optimizer's state and its averages into the memory that they have, in whatever order it lists them, and
/// does not read averages that it no longer has.
#[rstest]
#[case::alike(&WIDTHS, &WIDTHS)]
#[case::in_another_order(&WIDTHS, &[AverageRule::Width(0.1), AverageRule::Width(0.05)])]
#[case::fewer(&WIDTHS, &[AverageRule::Width(0.1)])]
#[case::none(&WIDTHS, &[])]
#[case::decays(&DECAYS, &DECAYS)]
#[case::decays_in_another_order(&DECAYS, &[AverageRule::Decay(0.2), AverageRule::Decay(0.1)])]
#[case::fewer_decays(&DECAYS, &[AverageRule::Decay(0.2)])]
fn the_optimizers_state_is_read_into_its_own_memory(
    #[case] saved: &[AverageRule],
    #[case] rules: &[AverageRule],
) {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = alone(folder.path(), Keep::ALL);
    let of = |model: &Model, rules: &[AverageRule]| Watched::new(&model.params, rules);
    let model = Model::new(1.0);
    let mut optimizer = of(&model, saved);
    for _ in 0..3 {
        model.params.iter().for_each(|p| p.tensor.abs().pow_tensor_scalar(2).sum(None).backward());
        optimizer.step(0.1).unwrap();
    }
    let contents =
        Contents { params: &model.params, buffers: &model.buffers, optimizer: Some(&mut optimizer) };
    checkpoints.save(&contents, &state(1)).unwrap();

    let other = Model::new(7.0);
    let mut resumed = of(&other, rules);
    let mut contents =
        Contents { params: &other.params, buffers: &other.buffers, optimizer: Some(&mut resumed) };
    checkpoints.load(&CheckpointSelector::Newest, &mut contents).unwrap();
    assert!(resumed.1, "in memory of its own");
    let (found, saved) = (resumed.state(), optimizer.state());
    assert_eq!(found.steps, saved.steps);
    for (at, rule) in rules.iter().enumerate() {
        let slot = |place: usize| if place == 0 { "average" } else { "average_2" };
        let place = saved.averages.iter().position(|average| average.rule == *rule).unwrap();
        for param in &model.params {
            let (own, want) = (found.find(slot(at), param).unwrap(), saved.find(slot(place), param).unwrap());
            assert_eq!(values(own), values(want));
        }
    }
    for slot in ["exp_avg", "exp_avg_sq"] {
        for param in &model.params {
            assert_eq!(values(found.find(slot, param).unwrap()), values(saved.find(slot, param).unwrap()));
        }
    }
}

/// Tensors that are copied before they are written, such as transposed ones or those of a GPU, are copied one by one while the file
/// is written: a synchronous save holds no copy before.
#[test]
fn a_synchronous_save_copies_nothing_before_it_writes() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = alone(folder.path(), Keep::ALL);
    let transposed = || {
        let weight = Tensor::arange(12, (Kind::Float, Device::Cpu)).view([3, 4]).tr().set_requires_grad(true);
        Model::of(Parameters::new(vec![Parameter::replicated("w", &weight)]).unwrap())
    };
    let mut model = transposed();
    let job = checkpoints.job(&model.contents(), &state(1), false).unwrap();
    let held: Vec<_> = model.contents().shards().unwrap().iter().map(|s| s.tensor.data_ptr()).collect();
    assert_eq!(job.items.len(), held.len());
    assert!(job.items.iter().all(|item| held.contains(&item.tensor.data_ptr())));
    let copied = checkpoints.job(&model.contents(), &state(1), true).unwrap();
    assert!(copied.items.iter().all(|item| !held.contains(&item.tensor.data_ptr())));

    model.train();
    checkpoints.save(&model.contents(), &state(1)).unwrap();
    let mut found = transposed();
    checkpoints.load(&CheckpointSelector::Newest, &mut found.contents()).unwrap();
    assert_eq!(found.bytes(), model.bytes());
}

#[test]
fn a_save_in_the_background_is_of_the_moment_when_it_began() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = alone(folder.path(), Keep::ALL);
    let mut model = Model::new(1.0);
    let before = model.bytes();
    checkpoints.save_in_background(&model.contents(), &state(1)).unwrap();
    model.train();
    let after = model.bytes();
    checkpoints.save_in_background(&model.contents(), &state(2)).unwrap();
    model.train();
    checkpoints.finish().unwrap();
    for (step, want) in [(1, before), (2, after)] {
        let mut found = Model::new(7.0);
        let path = folder.path().join(folder::step_folder(step));
        checkpoints.load(&CheckpointSelector::At(path), &mut found.contents()).unwrap();
        assert_eq!(found.bytes(), want);
    }
}

#[test]
fn writes_in_the_background_that_fail_are_tried_again_and_told_to_all() {
    let folder = tempfile::tempdir().unwrap();
    let errors = threads::run(2, DEADLINE, |world| {
        // A file where the folder should be.
        let place = folder.path().join("checkpoints");
        if world.rank() == 0 {
            std::fs::write(&place, "").unwrap();
        }
        world.barrier().unwrap();
        let mut checkpoints = Checkpoints::new(&place, Keep::ALL, &world);
        let mut model = Model::new(1.0);
        checkpoints.save_in_background(&model.contents(), &state(1)).unwrap();
        checkpoints.save_in_background(&model.contents(), &state(2)).unwrap();
        let third = checkpoints.save_in_background(&model.contents(), &state(3)).unwrap_err().to_string();
        let sync = checkpoints.save(&model.contents(), &state(4)).unwrap_err().to_string();
        checkpoints.save_in_background(&model.contents(), &state(5)).unwrap();
        let last = checkpoints.finish().unwrap_err().to_string();
        checkpoints.save_in_background(&model.contents(), &state(6)).unwrap();
        while checkpoints.background.poll() {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Whatever was in the way is gone: what is asked for now is written.
        world.barrier().unwrap();
        if world.rank() == 0 {
            std::fs::remove_file(&place).unwrap();
        }
        world.barrier().unwrap();
        let written = checkpoints.save(&model.contents(), &state(7)).unwrap();
        assert!(folder::is_checkpoint(&written));
        [third, sync, last]
    });
    for errors in errors {
        assert!(errors[0].contains("2 checkpoints in a row could not be written"), "{errors:?}");
        assert!(errors.iter().all(|error| error.contains("could not make the folder")), "{errors:?}");
    }
}

/// A link to itself fails to open, as a file does on a network file system that is not answering.
#[test]
fn a_checkpoint_whose_manifest_cannot_be_looked_at_stays() {
    let (folder, path, _) = saved();
    let manifest = path.join("manifest.json");
    std::fs::remove_file(&manifest).unwrap();
    std::os::unix::fs::symlink("manifest.json", &manifest).unwrap();
    folder::sweep(folder.path(), None).unwrap();
    assert!(path.join("rank_00000.safetensors").exists());
    let error = folder::checkpoints(folder.path()).unwrap_err().to_string();
    assert!(error.contains("could not look at") && error.contains("manifest.json"), "{error}");
}

#[rstest]
#[case::cut("rank_00000.safetensors", |bytes: &mut Vec<u8>| bytes.truncate(100), "torn: it has 100 bytes")]
#[case::flipped("rank_00000.safetensors", |bytes: &mut Vec<u8>| *bytes.last_mut().unwrap() ^= 1, "damaged: the BLAKE3 of bytes 0 to")]
#[case::longer("rank_00000.safetensors", |bytes: &mut Vec<u8>| bytes.push(0), "torn: it has")]
#[case::manifest("manifest.json", |bytes: &mut Vec<u8>| bytes.truncate(40), "torn or foreign: EOF")]
#[case::manifest_end("manifest.json", |bytes: &mut Vec<u8>| { bytes.pop(); }, "torn or damaged: its BLAKE3")]
#[case::foreign("manifest.json", |bytes: &mut Vec<u8>| *bytes = b"{\"format\": \"x\"}".to_vec(), "its format is \"x\"")]
fn damaged_files_are_refused(#[case] file: &str, #[case] damage: fn(&mut Vec<u8>), #[case] reason: &str) {
    let (folder, path, _) = saved();
    let mut bytes = std::fs::read(path.join(file)).unwrap();
    damage(&mut bytes);
    std::fs::write(path.join(file), bytes).unwrap();

    let mut other = Model::new(7.0);
    let before = other.bytes();
    let checkpoints = alone(folder.path(), Keep::ALL);
    for error in [
        checkpoints.load(&CheckpointSelector::Newest, &mut other.contents()).unwrap_err(),
        verify(&path).unwrap_err(),
    ] {
        assert!(matches!(error, Error::Checkpoint { .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
        assert!(error.to_string().contains(file), "{error}");
    }
    assert_eq!(other.bytes(), before, "nothing was changed");
    let listed = list(folder.path()).unwrap();
    assert_eq!(listed[0].found.is_err(), !reason.contains("of bytes 0"), "{listed:?}");
}

#[test]
fn other_versions_are_refused_as_such() {
    let (folder, path, _) = saved();
    let manifest = manifest::Manifest::read(&path).unwrap();
    let next = manifest::Manifest { version: 4, ..manifest }.encode().unwrap();
    std::fs::write(path.join("manifest.json"), next).unwrap();
    let load =
        || alone(folder.path(), Keep::ALL).load(&CheckpointSelector::Newest, &mut Model::new(1.0).contents());
    assert!(load().unwrap_err().to_string().contains("its version is 4, this program reads 3"));
    std::fs::remove_file(path.join("manifest.json")).unwrap();
    std::fs::write(path.join("metadata.json"), "{}").unwrap();
    assert!(load().unwrap_err().to_string().contains("of an earlier version, this program reads 3"));
}

/// The newest is torn on all ranks, the one before is damaged where rank 1 reads alone: all take the third.
#[test]
fn the_newest_whole_one_is_loaded_by_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let model = |world: &Group, fill: f64| {
        let part = Tensor::full([1, 2], fill, (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let entries = vec![Parameter::sharded("w", &part, 0, vec![1; 2])];
        Model::of(Parameters::over(entries, world).unwrap())
    };
    let found = threads::run(2, DEADLINE, |world| {
        let mut checkpoints = Checkpoints::new(folder.path(), Keep::ALL, &world);
        for step in 1..=3 {
            checkpoints.save(&model(&world, step as f64).contents(), &state(step)).unwrap();
        }
        if world.rank() == 0 {
            std::fs::remove_file(folder.path().join("step_00000003/rank_00001.safetensors")).unwrap();
            let file = folder.path().join("step_00000002/rank_00001.safetensors");
            let mut bytes = std::fs::read(&file).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            std::fs::write(&file, bytes).unwrap();
        }
        world.barrier().unwrap();
        let mut fresh = model(&world, 0.0);
        let loaded = checkpoints.load(&CheckpointSelector::Newest, &mut fresh.contents()).unwrap();
        (loaded.state.step, fresh.params.get("w").unwrap().tensor.double_value(&[0, 1]))
    });
    assert_eq!(found, [(1, 1.0), (1, 1.0)]);
}

#[test]
fn another_models_checkpoint_is_refused() {
    let (folder, ..) = saved();
    let tensor = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let entries = [("w", tensor(&[2, 4])), ("b", tensor(&[3])), ("new", tensor(&[1]))];
    let entries = entries.iter().map(|(n, t)| Parameter::replicated(*n, t)).collect();
    let mut other = Model::of(Parameters::new(entries).unwrap());
    let error =
        alone(folder.path(), Keep::ALL).load(&CheckpointSelector::Newest, &mut other.contents()).unwrap_err();
    assert!(matches!(error, Error::CheckpointUnfit { .. }));
    let error = error.to_string();
    let (_, reason) = error.split_once("refused: ").unwrap();
    insta::assert_snapshot!(reason, @r#"it is of another model: "w" is Float [2, 3], the model has Float [2, 4]; "b" is BFloat16 [3], the model has Float [3]; "new" is missing; "s" is not of this model; "scale" is not of this model; and 6 more"#);
}

#[test]
fn an_empty_folder_has_none() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = alone(folder.path(), Keep::ALL);
    for which in [
        CheckpointSelector::Newest,
        CheckpointSelector::Best,
        CheckpointSelector::At(folder.path().to_owned()),
    ] {
        let error = checkpoints.load(&which, &mut Model::new(1.0).contents()).unwrap_err();
        assert!(matches!(error, Error::NoCheckpoint { .. }), "{error}");
    }
    assert!(matches!(list(folder.path()), Err(Error::NoCheckpoint { .. })));
}

fn whole() -> Tensor {
    Tensor::arange(15, (Kind::Float, Device::Cpu)).view([5, 3])
}

/// A model whose weight is split over `group` along `dim`.
fn split(group: &Group, dim: i64, fill: f64) -> Model {
    let sizes = isobar_collectives::balanced(whole().size()[dim as usize], group.size());
    let start: i64 = sizes[..group.rank()].iter().sum();
    let part = (whole().narrow(dim, start, sizes[group.rank()]) + fill).contiguous().set_requires_grad(true);
    let plain = Tensor::from_slice(&[fill as f32]).set_requires_grad(true);
    let entries = vec![Parameter::sharded("w", &part, dim, sizes), Parameter::replicated("p", &plain)];
    Model::of(Parameters::over(entries, group).unwrap())
}

/// Written by 2 data × 2 model ranks, read by one rank, and by 3, 4 and 7 that split it along either dim.
#[rstest]
fn loads_on_any_number_of_ranks_and_layout(
    #[values(1, 3, 4, 7)] ranks: usize,
    #[values(0, 1)] dim: i64,
    #[values(None, Some(1), Some(2), Some(5))] resharded: Option<usize>,
) {
    let folder = tempfile::tempdir().unwrap();
    threads::run(4, DEADLINE, |world| {
        let pair = world.split("model", Some(world.rank() / 2), world.rank() as i64).unwrap().unwrap();
        let mut model = split(&pair, 0, 1.0);
        model.train();
        Checkpoints::new(folder.path(), Keep::ALL, &world).save(&model.contents(), &state(3)).unwrap();
    });
    let mut from = folder.path().join("step_00000003");
    if let Some(ranks) = resharded {
        let out = folder.path().join("resharded");
        reshard(folder.path(), &out, ranks).unwrap();
        assert_eq!(verify(&out).unwrap().ranks, ranks);
        let refused = reshard(folder.path(), &out, ranks).unwrap_err().to_string();
        assert!(refused.contains("is not empty"), "{refused}");
        from = out;
    }
    threads::run(ranks, DEADLINE, |world| {
        let mut found = split(&world, dim, 0.0);
        let checkpoints = Checkpoints::new(folder.path(), Keep::ALL, &world);
        checkpoints.load(&CheckpointSelector::At(from.clone()), &mut found.contents()).unwrap();
        let mut expected = split(&world, dim, 1.0);
        expected.train();
        assert_eq!(found.bytes(), expected.bytes());
    });
}

#[test]
fn weights_go_to_other_programs_and_come_from_them() {
    let (folder, _, mut model) = saved();
    let out = folder.path().join("model.safetensors");
    assert_eq!(export(folder.path(), &out).unwrap().tensors, 5);
    let bytes = std::fs::read(&out).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(read.tensor("w").unwrap().data(), values(&model.params.get("w").unwrap().tensor));
    let mut found = read.names();
    found.sort_unstable();
    assert_eq!(found, ["b", "running_mean", "s", "scale", "w"]);

    let mut other = Model::new(7.0);
    let untrained = other.bytes().len();
    let load = |contents: &mut Contents<'_>| {
        alone(folder.path(), Keep::ALL).load(&CheckpointSelector::At(out.clone()), contents)
    };
    load(&mut Contents { params: &other.params, buffers: &other.buffers, optimizer: None }).unwrap();
    for param in &other.params {
        assert_eq!(param.tensor, model.params.get(&param.name).unwrap().tensor);
    }
    assert_eq!(model.bytes().len(), untrained);
    let bytes = std::fs::read(&out).unwrap();
    std::fs::write(&out, &bytes[..bytes.len() - 1]).unwrap();
    let mut contents = Contents { params: &other.params, buffers: &other.buffers, optimizer: None };
    let error = load(&mut contents).unwrap_err().to_string();
    assert!(error.contains("not a safetensors file"), "{error}");
}

/// Of what PyTorch's batch norms keep, the count of batches alone is passed over.
#[rstest]
#[case::count("norm.num_batches_tracked", true)]
#[case::other("norm.running_var", false)]
fn counts_of_batches_are_left_out(#[case] name: &str, #[case] fits: bool) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights.safetensors");
    let (saved, count) = (Tensor::from_slice(&[1.0f32, 2.0]), Tensor::from(5_i64));
    Tensor::write_safetensors(&[("w", &saved), (name, &count)], &file).unwrap();
    let weight = saved.zeros_like().set_requires_grad(true);
    let params = Parameters::new(vec![Parameter::replicated("w", &weight)]).unwrap();
    let mut contents = Contents { params: &params, buffers: &[], optimizer: None };
    let loaded = alone(folder.path(), Keep::ALL).load(&CheckpointSelector::At(file), &mut contents);
    match loaded {
        Ok(_) => assert!(fits && weight.detach() == saved),
        Err(error) => {
            assert!(!fits && error.to_string().contains("\"norm.running_var\" is not of this model"))
        }
    }
}

/// Tools take the newest whole one, and leave nothing of what they could not finish; a torn one does not make an older one go.
#[test]
fn torn_ones_are_passed_over_by_tools_and_by_pruning() {
    let (folder, _, mut model) = saved();
    let old = values(&model.params.get("w").unwrap().tensor);
    model.train();
    let mut checkpoints = alone(folder.path(), Keep { newest: 1, best: 0 });
    let torn = Checkpoints::new(folder.path(), Keep::ALL, &Group::single())
        .save(&model.contents(), &state(2))
        .unwrap();
    let file = torn.join("rank_00000.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    let out = folder.path().join("model.safetensors");
    export(folder.path(), &out).unwrap();
    let written = std::fs::read(&out).unwrap();
    let exported = safetensors::SafeTensors::deserialize(&written).unwrap();
    assert_eq!(exported.tensor("w").unwrap().data(), old);
    // A flipped byte shows only when it is read.
    let mut flipped = bytes.clone();
    *flipped.last_mut().unwrap() ^= 1;
    std::fs::write(&file, flipped).unwrap();
    let (cut, other) = (folder.path().join("cut"), folder.path().join("other.safetensors"));
    assert!(reshard(&torn, &cut, 2).is_err() && export(&torn, &other).is_err());
    let mut left = names(folder.path());
    assert_eq!(left, ["model.safetensors", "step_00000001", "step_00000002"]);
    std::fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    checkpoints.save(&model.contents(), &state(1)).unwrap();
    left = names(folder.path());
    assert_eq!(
        left,
        ["model.safetensors", "step_00000001", "step_00000002"],
        "the torn one counts for nothing"
    );
}

/// Ranks with boxes that are no placement of a parameter: the entry for other layouts.
#[test]
fn any_boxes_are_saved_and_loaded() {
    struct Boxes(Vec<(Region, Tensor)>);

    impl Checkpointed for Boxes {
        fn shards(&self) -> Result<Vec<TensorShard>> {
            let shard = |(region, tensor): &(Region, Tensor)| TensorShard {
                name: "flat".into(),
                shape: vec![4, 6],
                region: region.clone(),
                tensor: tensor.shallow_clone(),
            };
            Ok(self.0.iter().map(shard).collect())
        }

        fn facts(&self) -> Result<serde_json::Value> {
            Ok(serde_json::json!({"steps": 3}))
        }

        fn wanted(&self, saved: &CheckpointIndex) -> Result<Vec<ReadRequest>> {
            assert_eq!(saved.tensor("flat").unwrap().shape, [4, 6]);
            Ok(self
                .0
                .iter()
                .map(|(region, _)| ReadRequest { name: "flat".into(), region: region.clone() })
                .collect())
        }

        fn restore(&mut self, facts: Option<&serde_json::Value>, saved: &SavedShards<'_>) -> Result<()> {
            assert_eq!(facts.unwrap()["steps"], 3);
            self.0.clear();
            saved.read(0..saved.wanted().len(), |_, shard| {
                self.0.push((shard.region, shard.tensor));
                Ok(())
            })
        }
    }

    let cut = |start: [i64; 2], shape: [i64; 2]| {
        let whole = Tensor::arange(24, (Kind::Int64, Device::Cpu)).view([4, 6]);
        let values = whole.narrow(0, start[0], shape[0]).narrow(1, start[1], shape[1]);
        (Region { start: start.to_vec(), shape: shape.to_vec() }, values)
    };
    let folder = tempfile::tempdir().unwrap();
    threads::run(2, DEADLINE, |world| {
        let mut checkpoints = Checkpoints::new(folder.path(), Keep::ALL, &world);
        // A flat cut after the ninth element, as boxes: a row and a piece, a piece and two rows.
        let mut own = Boxes(match world.rank() {
            0 => vec![cut([0, 0], [1, 6]), cut([1, 0], [1, 3])],
            _ => vec![cut([1, 3], [1, 3]), cut([2, 0], [2, 6])],
        });
        checkpoints.save(&own, &state(1)).unwrap();
        let (region, want) = cut([0, world.rank() as i64], [4, 5]);
        own.0 = vec![(region, Tensor::new())];
        checkpoints.load(&CheckpointSelector::Newest, &mut own).unwrap();
        assert_eq!(own.0[0].1, want);
    });
}

/// A model in single or double precision, of one parameter.
fn model_in(kind: Kind, fill: f64) -> Model {
    let weight = Tensor::full([5, 3], fill, (kind, Device::Cpu)).set_requires_grad(true);
    Model::of(Parameters::new(vec![Parameter::replicated("w", &weight)]).unwrap())
}

#[rstest]
#[case(Kind::Float, Kind::Double, "float32")]
#[case(Kind::Double, Kind::Float, "float64")]
fn weights_are_converted_and_runs_resume_in_their_precision(
    #[case] saved: Kind,
    #[case] own: Kind,
    #[case] precision: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = alone(folder.path(), Keep::ALL);
    checkpoints.save(&model_in(saved, 0.3).contents(), &state(1)).unwrap();

    let mut model = model_in(own, 0.0);
    let mut weights = Contents { optimizer: None, ..model.contents() };
    checkpoints.load(&CheckpointSelector::Newest, &mut weights).unwrap();
    let loaded = &model.params.get("w").unwrap().tensor;
    assert_eq!((loaded.kind(), loaded.double_value(&[4, 2])), (own, f64::from(0.3f32)));

    let mut resumed = model_in(own, 0.0);
    let error =
        checkpoints.load(&CheckpointSelector::Newest, &mut resumed.contents()).unwrap_err().to_string();
    let (_, reason) = error.split_once("refused: ").unwrap();
    assert_eq!(
        reason,
        format!(
            "its parameters are {saved:?}, those of this run {own:?}; resume in the same precision (--set \
             train.precision={precision}), or start a new run from these weights (--set run.name=NAME --set \
             checkpoint.init=CHECKPOINT)"
        )
    );
    assert_eq!(resumed.params.get("w").unwrap().tensor.double_value(&[0, 0]), 0.0, "nothing was loaded");
}

/// A weight and, with `offset`, a computed buffer of the row-major numbers of its elements plus the offset.
fn store_with_grid(offset: Option<f64>) -> ParamStore {
    let mut store = ParamStore::new(Generator::new(1));
    let _ = store.param("w", &[2], Init::Constant(1.0), Placement::Replicate).unwrap();
    if let Some(offset) = offset {
        let values = move |part: &Window| {
            let all = Tensor::arange(24, (Kind::Float, Device::Cpu)).view([1, 8, 3]) + offset;
            Ok(all.narrow(1, part.offset()[1], part.shape()[1]))
        };
        store.computed_buffer("grid", &[1, 8, 3], std::sync::Arc::new(values)).unwrap();
    }
    store
}

fn contents_of(of: &(Parameters, Vec<(String, Tensor)>)) -> Contents<'_> {
    Contents { params: &of.0, buffers: &of.1, optimizer: None }
}

#[test]
fn computed_buffers_are_written_by_parts_exported_and_compared() {
    let folder = tempfile::tempdir().unwrap();
    let paths = threads::run(4, DEADLINE, |world| {
        let mesh = DeviceMesh::new(&world, &[4], &["domain"]).unwrap();
        let of = Parameters::on_mesh(&store_with_grid(Some(0.0)), &mesh).unwrap();
        assert!(of.1.is_empty());
        let contents = contents_of(&of);
        let shards = contents.shards().unwrap();
        let grid = shards.iter().find(|shard| shard.name == "buffer.grid").unwrap();
        assert_eq!((grid.tensor.size(), grid.region.start[1]), (vec![1, 2, 3], 2 * world.rank() as i64));
        Checkpoints::new(folder.path(), Keep::ALL, &world).save(&contents, &state(1)).unwrap()
    });
    let out = folder.path().join("model.safetensors");
    export(&paths[0], &out).unwrap();
    let full = Tensor::arange(24, (Kind::Float, Device::Cpu)).view([1, 8, 3]);
    let written = std::fs::read(&out).unwrap();
    let exported = safetensors::SafeTensors::deserialize(&written).unwrap();
    assert_eq!(exported.tensor("grid").unwrap().data(), values(&full));

    let load = |root: &Path, at: CheckpointSelector, offset: Option<f64>| {
        let of = Parameters::of(&store_with_grid(offset)).unwrap();
        let loaded = alone(root, Keep::ALL).load(&at, &mut contents_of(&of));
        loaded.map(drop).map_err(|error| error.to_string())
    };
    for at in [CheckpointSelector::Newest, CheckpointSelector::At(out)] {
        load(folder.path(), at.clone(), Some(0.0)).unwrap();
        let error = load(folder.path(), at.clone(), Some(0.5)).unwrap_err();
        assert!(error.contains("buffer \"grid\" of the checkpoint"), "{error}");
        assert!(load(folder.path(), at, None).unwrap_err().contains("\"grid\" is not of this model"));
    }
    // A checkpoint may lack it.
    let other = tempfile::tempdir().unwrap();
    let of = Parameters::of(&store_with_grid(None)).unwrap();
    alone(other.path(), Keep::ALL).save(&contents_of(&of), &state(1)).unwrap();
    load(other.path(), CheckpointSelector::Newest, Some(0.0)).unwrap();
}
