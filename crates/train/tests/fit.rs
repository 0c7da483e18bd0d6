//! The engine over thread ranks: the same curve on any number of them, validation, failures.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod checkpoints;

use std::cell::RefCell;
use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, mpsc};
use std::time::Duration;

use isobar_array::Window;
use isobar_collectives::{Group, threads};
use isobar_torch::guard::{is_deterministic, set_deterministic};
use isobar_train::checkpoint::{CheckpointSelector, Checkpoints, Contents, Keep, export, read_run_state};
use isobar_train::config::{CheckpointConfig, MetricsConfig, Resume, SaveMode, TrainConfig};
use isobar_train::{
    BoxError, Error, FitConfig, Parameter, Parameters, Precision, Ranks, Step, Summary, Task, VariableError,
    fit, plan_step,
};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

pub(crate) const DEADLINE: Duration = Duration::from_secs(240);
const OPTIONS: (Kind, Device) = (Kind::Double, Device::Cpu);

/// Action in a step, with the countdown to it.
type Ask = (u64, Box<dyn Fn()>);

/// y = x² by a small network with noise on its hidden layer while training.
pub(crate) struct Square {
    pub(crate) params: Parameters,
    samples: usize,
    fails_at: Option<u64>,
    asks: RefCell<Option<Ask>>,
    /// Change to a step's prediction.
    changed: Option<fn(Tensor) -> Result<Tensor, BoxError>>,
}

impl Square {
    pub(crate) fn new() -> Self {
        let tensor = |shape: &[i64], phase: f64| {
            let base = Tensor::arange(shape.iter().product::<i64>(), OPTIONS) * 0.7 + phase;
            base.sin().view(shape).set_requires_grad(true)
        };
        let named = [("a", tensor(&[8, 1], 0.1)), ("a.bias", tensor(&[8], 0.2)), ("b", tensor(&[1, 8], 0.3))];
        let entries = named.iter().map(|(name, t)| Parameter::replicated(*name, t)).collect();
        Self {
            params: Parameters::new(entries).unwrap(),
            samples: 23,
            fails_at: None,
            asks: RefCell::new(None),
            changed: None,
        }
    }

    /// Calls `ask` in the step of that number, from 0.
    fn asking(at: u64, ask: impl Fn() + 'static) -> Self {
        Self { asks: RefCell::new(Some((at, Box::new(ask)))), ..Self::new() }
    }

    fn forward(&self, samples: &[usize], step: Option<Step<'_>>) -> Result<(Tensor, Tensor), BoxError> {
        let x: Vec<f64> = samples.iter().map(|&i| (i as f64 * 0.37).sin()).collect();
        let x = Tensor::from_slice(&x).view([-1, 1]);
        let get = |name: &str| &self.params.get(name).unwrap().tensor;
        let mut hidden = x.linear(get("a"), Some(get("a.bias"))).tanh();
        if let Some(step) = step {
            let window = Window::whole(&[step.total, 8]).narrow(0, step.offset, samples.len() as i64)?;
            // Not `+=`: it would change in place what the backward pass of tanh needs.
            hidden = hidden.f_add(&step.generator.normal(&window, 0.0, 0.01, OPTIONS)?)?;
        }
        let mut prediction = hidden.linear::<Tensor>(get("b"), None);
        if let Some(part) = self.params.get("part") {
            prediction = prediction.f_add(&part.tensor.f_sum(Kind::Double)?.f_mul_scalar(0.0)?)?;
        }
        Ok((prediction, x.square()))
    }
}

impl Task for Square {
    fn train_samples(&self) -> usize {
        self.samples
    }

    fn validation_samples(&self) -> usize {
        5
    }

    fn loss(&self, step: Step<'_>, samples: &[usize]) -> Result<Tensor, BoxError> {
        if self.fails_at == Some(step.epoch) {
            return Err("the disk is gone".into());
        }
        if let Some((left, ask)) = &mut *self.asks.borrow_mut() {
            if *left == 0 {
                ask();
            }
            *left = left.wrapping_sub(1);
        }
        let (mut prediction, target) = self.forward(samples, Some(step))?;
        if let Some(change) = self.changed {
            prediction = change(prediction)?;
        }
        Ok((prediction - target).square().mean(Kind::Double))
    }

    fn errors(&self, samples: &[usize]) -> Result<Vec<Vec<VariableError>>, BoxError> {
        let (prediction, target) =
            self.forward(&samples.iter().map(|i| 100 + i).collect::<Vec<_>>(), None)?;
        let errors: Vec<f64> = Vec::try_from((prediction - target).abs().view(-1))?;
        Ok(errors.into_iter().map(|error| vec![VariableError::new(error, error)]).collect())
    }
}

pub(crate) fn config(folder: &Path) -> FitConfig {
    FitConfig {
        folder: folder.to_owned(),
        seed: 3,
        // The last batch of an epoch has 3 samples: one of 4 ranks gets none.
        train: TrainConfig { epochs: 4, batch_size: 10, ..Default::default() },
        // Some tests train several times in one folder.
        checkpoint: CheckpointConfig { every_epochs: 1, overwrite: true, ..Default::default() },
        metrics: MetricsConfig { every_steps: 1, ..Default::default() },
        ..Default::default()
    }
}

fn run(world: &Group, config: &FitConfig) -> isobar_train::Result<Summary> {
    let task = Square::new();
    fit(&task, &task.params, &[], &Ranks::data_parallel(world), config)
}

fn read(folder: &Path, name: &str) -> String {
    std::fs::read_to_string(folder.join(name)).unwrap()
}

#[rstest]
fn the_curve_is_the_same_on_any_number_of_ranks(#[values(2, 3, 4)] ranks: usize) {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path());
    let expected = run(&Group::single(), &config).unwrap();
    assert_eq!((expected.steps, expected.epochs, expected.losses.len()), (12, 4, 12));
    let found = threads::run(ranks, DEADLINE, |world| run(&world, &config).unwrap());
    for summary in &found {
        assert_eq!(summary.losses, found[0].losses, "all ranks report the same");
        for (loss, want) in summary.losses.iter().zip(&expected.losses) {
            assert!(
                (loss - want).abs() <= 1e-10 * want,
                "{:?} instead of {:?}",
                summary.losses,
                expected.losses
            );
        }
        let (error, want) = (summary.validation_error.unwrap(), expected.validation_error.unwrap());
        assert!((error - want).abs() <= 1e-10 * want);
    }
    assert!(expected.losses[11] < expected.losses[0]);
}

/// A planned step exchanges what a step of a run does, but for the loss and the requests that ranks tell each other.
#[rstest]
fn a_planned_step_is_a_step_of_a_run(#[values(2, 3)] ranks: usize) {
    let folder = tempfile::tempdir().unwrap();
    let after = |steps: u64| {
        threads::run(ranks, DEADLINE, |world| {
            let mut config = config(folder.path());
            config.train.max_steps = Some(steps);
            let _summary = run(&world, &config).unwrap();
            world.traffic()
        })
    };
    let planned = threads::run(ranks, DEADLINE, |world| {
        let task = Square::new();
        let ranks = Ranks::data_parallel(&world);
        plan_step(&task, &task.params, &[], &ranks, &config(folder.path())).unwrap()
    });
    for ((one, two), plan) in after(1).into_iter().zip(after(2)).zip(planned) {
        assert_eq!(plan.batch, 10);
        assert_eq!(two.operations - one.operations, plan.traffic.operations + 1);
        let told = two.received - one.received - plan.traffic.received;
        assert!((1..100 * ranks as u64).contains(&told), "{told} bytes beside the step");
    }
}

/// Ranks that reduced other buckets, or other numbers of steps, would wait for each other.
#[rstest]
#[case::buckets(|config: &mut FitConfig| config.data_parallel.bucket_mb = 1e-4, "data_parallel.bucket_mb is 0.0001 on rank 1, and 4.0 on rank 0")]
#[case::unused(
    |config: &mut FitConfig| config.data_parallel.find_unused_parameters = true,
    "distributed.find_unused_parameters is true on rank 1, and false on rank 0"
)]
#[case::buffers(
    |config: &mut FitConfig| config.data_parallel.broadcast_buffers = true,
    "distributed.broadcast_buffers is true on rank 1"
)]
#[case::epochs(|config: &mut FitConfig| config.train.epochs = 5, "train.epochs is 5 on rank 1, and 4 on rank 0")]
#[case::clipping(|config: &mut FitConfig| config.train.clip_norm = None, "train.clip_norm is unset on rank 1, and 1.0 on rank 0")]
fn settings_that_differ_between_ranks_are_one_error(#[case] change: fn(&mut FitConfig), #[case] words: &str) {
    let folder = tempfile::tempdir().unwrap();
    let errors = threads::run(3, DEADLINE, |world| {
        let mut config = config(folder.path());
        if world.rank() > 0 {
            change(&mut config);
        }
        run(&world, &config).unwrap_err()
    });
    for error in errors {
        assert!(matches!(error, Error::SettingsDiffer { rank: 1, .. }), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
    assert!(!folder.path().join("checkpoints").exists());
}

/// A setting out of its range on one rank is an error of all, before they wait for it.
#[test]
fn a_setting_out_of_range_on_one_rank_is_an_error_of_all() {
    let folder = tempfile::tempdir().unwrap();
    let errors = threads::run(2, DEADLINE, |world| {
        let mut config = config(folder.path());
        if world.rank() == 1 {
            config.data_parallel.bucket_mb = 0.0;
        }
        run(&world, &config).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("data_parallel.bucket_mb is 0")), "{errors:?}");
}

#[test]
fn a_rank_that_fails_alone_ends_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path());
    let errors = threads::run(2, DEADLINE, |world| {
        let mut task = Square::new();
        task.fails_at = (world.rank() == 1).then_some(1);
        fit(&task, &task.params, &[], &Ranks::data_parallel(&world), &config).unwrap_err().to_string()
    });
    assert_eq!(errors[1], "the loss of a step failed: the disk is gone");
    // Not the error of the deadline.
    assert!(errors[0].contains("the disk is gone"), "{errors:?}");
}

/// A rank that fails still writes its part of a checkpoint to its end; the others hear of it before.
#[test]
fn nobody_waits_for_the_disk_of_a_rank_that_failed() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.checkpoint.mode = SaveMode::Async;
    let (released, ended) = (AtomicBool::new(false), Barrier::new(2));
    let errors = threads::run(2, DEADLINE, |world| {
        // A pipe, whose writer waits for somebody to read.
        let pipe = folder.path().join("checkpoints/step_00000003/rank_00001.safetensors");
        let own = pipe.clone();
        let slow = Square::asking(0, move || {
            std::fs::create_dir_all(own.parent().unwrap()).unwrap();
            assert!(Command::new("mkfifo").arg(&own).status().unwrap().success());
        });
        let task = match world.rank() {
            0 => Square::new(),
            _ => Square { fails_at: Some(1), ..slow },
        };
        let ranks = Ranks::data_parallel(&world);
        let error = fit(&task, &task.params, &[], &ranks, &config).unwrap_err().to_string();
        if world.rank() == 0 {
            released.store(true, Ordering::Relaxed);
            let _reader = File::options().read(true).write(true).open(&pipe).unwrap();
            ended.wait();
        } else {
            assert!(released.load(Ordering::Relaxed), "the write was to wait");
            ended.wait();
        }
        error
    });
    // Not the error of the deadline.
    assert!(errors.iter().all(|error| error.contains("the disk is gone")), "{errors:?}");
}

#[test]
fn a_loss_that_is_not_finite_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.train.clip_norm = None;
    let optimizer = isobar_train::optim::SgdConfig { lr: 1e200, ..Default::default() };
    config.optimizer = isobar_train::optim::OptimizerKind::from(optimizer);
    let errors = threads::run(2, DEADLINE, |world| run(&world, &config).unwrap_err());
    for error in errors {
        assert!(matches!(error, Error::NonFinite { .. }), "{error}");
        let text = error.to_string();
        assert!(text.starts_with("loss is") && text.matches("at step").count() == 1, "{text}");
        for words in ["(--set optimizer.lr=", "(--set train.clip_norm=1.0)", "check the data"] {
            assert!(text.contains(words), "{text}");
        }
    }
}

/// All ranks name the operator of the one rank that produced the values, and the last parameter used.
#[test]
fn what_made_a_value_that_is_not_finite_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path());
    let errors = threads::run(3, DEADLINE, |world| {
        let mut task = Square::new();
        if world.rank() == 1 {
            // Of a root at zero the derivative is infinite; times zero it is NaN, in backward only.
            task.changed = Some(|y| Ok(y.f_sub(&y.f_detach()?)?.f_sqrt()?.f_mul_scalar(0.0)?.f_add(&y)?));
        }
        fit(&task, &task.params, &[], &Ranks::data_parallel(&world), &config).unwrap_err()
    });
    for error in errors {
        let Error::NonFinite { step: 0, what, origin } = &error else { panic!("{error}") };
        assert!(matches!(&**what, Error::NonFiniteGradient { .. }), "{what}");
        assert!(
            origin.starts_with("rank 1: aten::div (backward, at parameter") && !origin.contains("rank 2"),
            "{origin}"
        );
        assert!(origin.contains("made NaN of finite values"), "{origin}");
    }
}

#[rstest]
fn gradients_accumulate_to_those_of_the_batch(
    #[values(1, 3)] ranks: usize,
    #[values(2, 3, 7)] passes: usize,
) {
    let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let expected = run(&Group::single(), &config(whole.path())).unwrap();
    let mut config = config(parts.path());
    config.train.accumulate = passes;
    let all = threads::run(ranks, DEADLINE, |world| run(&world, &config).unwrap());
    for summary in all {
        assert_eq!(summary.steps, expected.steps);
        for (got, want) in summary.losses.iter().zip(&expected.losses) {
            assert!((got - want).abs() < 1e-12 * want.abs(), "{got}, expected {want}");
        }
    }
    config.train.accumulate = 0;
    assert!(run(&Group::single(), &config).unwrap_err().to_string().contains("train.accumulate"));
}

/// A power of two changes nothing but where numbers overflow; steps that do are left out.
#[test]
fn losses_are_scaled_in_half_precision() {
    let [plain, scaled] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let mut config = config(plain.path());
    let expected = run(&Group::single(), &config).unwrap();
    config.folder = scaled.path().to_owned();
    config.train.precision = Precision::Fp16Mixed;
    let got = run(&Group::single(), &config).unwrap();
    assert_eq!((got.losses, got.validation_error), (expected.losses, expected.validation_error));
    let factor = |folder: &Path| read_run_state(folder).unwrap().loss_scale.unwrap().factor();
    assert_eq!(factor(&scaled.path().join("checkpoints")), 65536.0);
    let mut task = Square::new();
    task.changed = Some(|y| Ok(y.f_mul_scalar(1e75)?));
    let got = fit(&task, &task.params, &[], &Ranks::data_parallel(&Group::single()), &config).unwrap();
    assert_eq!(got.steps, expected.steps);
    assert!(factor(&scaled.path().join("checkpoints")) < 65536.0);
    // More steps than the scale can be halved.
    config.train.epochs = 20;
    task.changed = Some(|y| Ok(y.f_mul_scalar(1e120)?));
    let error = fit(&task, &task.params, &[], &Ranks::data_parallel(&Group::single()), &config).unwrap_err();
    assert!(matches!(error, Error::Overflow { .. }), "{error}");
}

/// Averages are validated, saved, and what predictions take; a run that goes on keeps them.
#[test]
fn averaged_parameters_are_validated_and_saved() {
    let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let mut config = config(whole.path());
    let plain = run(&Group::single(), &config).unwrap();
    config.train.average_decay = Some(0.95);
    let expected = run(&Group::single(), &config).unwrap();
    assert_eq!(expected.losses, plain.losses);
    assert_ne!(expected.validation_error, plain.validation_error);
    let all = threads::run(2, DEADLINE, |world| {
        let mut config = FitConfig { folder: parts.path().to_owned(), ..config.clone() };
        config.train.max_steps = Some(5);
        run(&world, &config).unwrap();
        config.train.max_steps = None;
        config.checkpoint.resume = Resume::Must;
        run(&world, &config).unwrap()
    });
    for summary in &all {
        let (got, want) = (summary.validation_error.unwrap(), expected.validation_error.unwrap());
        assert!((got - want).abs() < 1e-9 * want, "{got}, expected {want}");
    }
    // A run leaves its validated parameters; loading without an optimizer gives these too.
    let task = Square::new();
    config.folder = parts.path().to_owned();
    let saved = parts.path().join("checkpoints");
    let group = Group::single();
    let mut contents = Contents { params: &task.params, buffers: &[], optimizer: None };
    Checkpoints::new(&saved, Keep::ALL, &group).load(&CheckpointSelector::Newest, &mut contents).unwrap();
    let errors = tch::no_grad(|| task.errors(&[0, 1, 2, 3, 4]).unwrap());
    let mean = errors.iter().map(|error| error[0].relative).sum::<f64>() / errors.len() as f64;
    assert!((mean - all[0].validation_error.unwrap()).abs() < 1e-12, "{mean}");
    let out = parts.path().join("model.safetensors");
    export(&saved, &out).unwrap();
    let exported = Tensor::read_safetensors(&out).unwrap();
    let (_, b) = exported.iter().find(|(name, _)| name == "b").unwrap();
    assert_eq!(b, &task.params.get("b").unwrap().tensor.detach());
}

/// The averages in all checkpoints of a run give that of a width which the run did not keep, on any number of ranks.
#[test]
fn an_average_of_another_width_is_made_after_the_run() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let train = |world: &Group, folder: &Path, widths: &[f64]| {
        let mut config = config(folder);
        config.train.epochs = 40;
        config.train.average_widths = widths.to_vec();
        config.checkpoint.every_epochs = 2;
        config.checkpoint.keep = 0;
        run(world, &config).unwrap()
    };
    let wanted = 0.15;
    let export = |path: &Path, out: &Path| isobar_train::checkpoint::export_average(path, out, wanted);
    let read = |path: &Path| Tensor::read_safetensors(path).unwrap();
    let [direct, made] = folders.each_ref().map(tempfile::TempDir::path);
    train(&Group::single(), direct, &[wanted]);
    let newest = direct.join("newest.safetensors");
    isobar_train::checkpoint::export(&direct.join("checkpoints"), &newest).unwrap();
    threads::run(2, DEADLINE, |world| train(&world, made, &[0.05, 0.1]));
    let out = made.join("model.safetensors");
    let found = export(&made.join("checkpoints"), &out).unwrap();
    let checkpoints = isobar_train::checkpoint::list(&made.join("checkpoints")).unwrap();
    assert_eq!(found.averages, 2 * checkpoints.len());
    assert!(found.profile_error < 0.02, "{found:?}");
    let expected: std::collections::HashMap<_, _> = read(&newest).into_iter().collect();
    for (name, got) in &read(&out) {
        let want = &expected[name];
        let (off, size) = ((got - want).norm().double_value(&[]), want.norm().double_value(&[]));
        assert!(off < 0.01 * size, "{name}: {off} of {size}");
    }
    // Checkpoints without averages are told from those with them.
    let bare = tempfile::tempdir().unwrap();
    train(&Group::single(), bare.path(), &[]);
    let error = export(&bare.path().join("checkpoints"), &out).unwrap_err().to_string();
    assert!(error.contains("train.average_widths"), "{error}");
}

/// True while the gradients of the next step are to overflow.
static OVERFLOWS: AtomicBool = AtomicBool::new(false);

/// A step that is left out since its gradients overflow separates no averages of the run.
#[test]
fn averages_continue_over_steps_that_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.train.epochs = 40;
    config.train.precision = Precision::Fp16Mixed;
    config.train.average_widths = vec![0.05, 0.1];
    config.checkpoint.every_epochs = 2;
    config.checkpoint.keep = 0;
    let mut task = Square::asking(62, || OVERFLOWS.store(true, Ordering::Relaxed));
    task.changed = Some(|y| match OVERFLOWS.swap(false, Ordering::Relaxed) {
        true => Ok(y.f_mul_scalar(1e153)?),
        false => Ok(y),
    });
    fit(&task, &task.params, &[], &Ranks::data_parallel(&Group::single()), &config).unwrap();
    let saved = folder.path().join("checkpoints");
    let factor = read_run_state(&saved).unwrap().loss_scale.unwrap().factor();
    assert!(factor < 65536.0, "a step was left out: {factor}");
    let out = folder.path().join("model.safetensors");
    let found = isobar_train::checkpoint::export_average(&saved, &out, 0.08).unwrap();
    assert_eq!(found.averages, 2 * isobar_train::checkpoint::list(&saved).unwrap().len());
}

#[test]
fn ranks_whose_parameters_drift_apart_are_found_out() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.train.check_replicas_every = 2;
    let fine = threads::run(3, DEADLINE, |world| run(&world, &config).unwrap().steps);
    assert_eq!(fine, [12; 3]);
    let errors = threads::run(3, DEADLINE, |world| {
        let drifts = Square::new();
        let b = drifts.params.get("b").unwrap().tensor.shallow_clone();
        let ask = move || tch::no_grad(|| drop(b.shallow_clone().f_mul_scalar_(1.0 + 1e-15)));
        let task = if world.rank() == 2 {
            Square { asks: RefCell::new(Some((3, Box::new(ask)))), ..drifts }
        } else {
            drifts
        };
        fit(&task, &task.params, &[], &Ranks::data_parallel(&world), &config).unwrap_err()
    });
    for error in errors {
        assert!(
            matches!(&error, Error::ReplicasDiffer { name, ranks, .. } if name == "b" && *ranks == [2]),
            "{error}"
        );
    }
}

/// Two samples' groups of a model over two ranks: what both have is made alike at the start and compared, their parts are not.
#[test]
fn what_ranks_of_a_split_model_share_is_compared() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.train.check_replicas_every = 2;
    let run = |drifts: bool| {
        threads::run(4, DEADLINE, |world| {
            let split = |name, colour| world.split(name, Some(colour), world.rank() as i64).unwrap().unwrap();
            let (model, data) = (split("model", world.rank() / 2), split("data", world.rank() % 2));
            let task = Square::new();
            let b = task.params.get("b").unwrap().tensor.shallow_clone();
            let shift = move |factor: f64| tch::no_grad(|| drop(b.shallow_clone().f_mul_scalar_(factor)));
            shift(1.0 + world.rank() as f64);
            let part = Tensor::full([1], world.rank() as f64, OPTIONS).set_requires_grad(true);
            let mut entries: Vec<Parameter> = task.params.iter().cloned().collect();
            entries.push(Parameter::sharded("part", &part, 0, vec![1; 2]));
            let params = Parameters::over(entries, &model).unwrap();
            // Whoever has the same samples drifts the same way.
            let ask: Ask = (3, Box::new(move || shift(1.0 + 1e-15)));
            let asks = RefCell::new((drifts && model.rank() == 1).then_some(ask));
            let task = Square { params: params.clone(), asks, ..task };
            let ranks = Ranks { world: world.clone(), data: data.clone(), gradients: data, shards: None };
            let ended = fit(&task, &params, &[], &ranks, &config);
            (ended.map(|summary| summary.losses), part.double_value(&[0]))
        })
    };
    let fine = run(false);
    let values: Vec<_> = fine.iter().map(|(losses, part)| (losses.as_ref().unwrap(), *part)).collect();
    assert!(values.iter().all(|(losses, _)| *losses == values[0].0), "{values:?}");
    assert!(values[0].1 == values[2].1 && values[1].1 == values[3].1 && values[0].1 != values[1].1);
    for (ended, _) in run(true) {
        let error = ended.unwrap_err();
        let found =
            matches!(&error, Error::ReplicasDiffer { name, ranks, .. } if name == "b" && *ranks == [1, 3]);
        assert!(found, "{error}");
    }
}

#[test]
fn kernels_are_deterministic_where_that_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    let [before, during] = [false, true].map(|deterministic| {
        config.train.deterministic = deterministic;
        let (told, asked) = mpsc::channel();
        let task = Square::asking(0, move || told.send(is_deterministic()).unwrap());
        fit(&task, &task.params, &[], &Ranks::data_parallel(&Group::single()), &config).unwrap();
        asked.recv().unwrap()
    });
    set_deterministic(false).unwrap();
    assert!(!before && during);
}

#[test]
fn where_memory_went_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path());
    let errors = threads::run(2, DEADLINE, |world| {
        let mut task = Square::new();
        if world.rank() == 1 {
            task.changed = Some(|_| Ok(Tensor::f_zeros([1 << 46], OPTIONS)?));
        }
        fit(&task, &task.params, &[], &Ranks::data_parallel(&world), &config).unwrap_err()
    });
    let Error::OutOfMemory { rank: 1, held, .. } = &errors[1] else { panic!("{}", errors[1]) };
    assert!(held.contains("exp_avg of \"b\" [1, 8]"), "{held}");
    assert!(errors[0].to_string().contains("no memory left"), "{}", errors[0]);
}

/// Not how long a rank takes, but for which one the others wait.
#[test]
fn the_rank_that_others_wait_for_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.train.epochs = 40;
    let all = threads::run(3, DEADLINE, |world| {
        let mut task = Square::new();
        if world.rank() == 2 {
            task.changed = Some(|y| {
                std::thread::sleep(Duration::from_millis(20));
                Ok(y)
            });
        }
        fit(&task, &task.params, &[], &Ranks::data_parallel(&world), &config).unwrap().straggler.unwrap()
    });
    for straggler in all {
        assert_eq!((straggler.rank, straggler.steps), (2, 100));
        assert!(straggler.seconds > 0.02 && straggler.median < straggler.seconds, "{straggler}");
    }
}
