//! Networks that predict changes: scales and loss.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use isobar_array::Generator;
use isobar_collectives::Group;
use isobar_data::{Augment, InMemory, Normalizer};
use isobar_train::config::{CheckpointConfig, SaveMode, TrainConfig};
use isobar_train::loss::{LossKind, Mse, RelativeL2};
use isobar_train::{BoxError, DenseFields, FieldModel, FieldTask, Step, Task, Variable, mean_errors};
use isobar_train::{Error, FitConfig, Parameter, Parameters, Ranks, fit};
use tch::{Device, Kind, Tensor};

/// Two variables, one trajectory: the first grows by 0.5 a step, the second by 30 of 9800.
fn frames() -> Tensor {
    let start = Tensor::from_slice(&[0.0, 1.0, 9700.0, 9900.0]).view([1, 2, 2]);
    let change = Tensor::from_slice(&[0.5, 0.5, 30.0, 30.0]).view([1, 2, 2]);
    let frames: Vec<Tensor> = (0..3).map(|step| &start + &change * f64::from(step)).collect();
    Tensor::stack(&frames, 1)
}

/// A network whose output is `output` everywhere.
fn task(
    output: f64,
    change: Option<Normalizer>,
    loss: impl Into<LossKind>,
) -> FieldTask<DenseFields, impl Fn(&Tensor, Option<Step<'_>>) -> Result<Tensor, BoxError>> {
    let values = Normalizer::of_channels(
        &[0, 1].map(|channel| isobar_data::Statistics::of(&frames().select(2, channel)).unwrap()),
    );
    let values = values.unwrap();
    let model = FieldModel {
        forward: move |x: &Tensor, _: Option<Step<'_>>| Ok(x.zeros_like() + output),
        layout: DenseFields,
        positions: None,
        change,
        input: values.clone(),
        target: values,
        variables: ["u", "h"].map(Variable::new).to_vec(),
        roles: None,
        missing: None,
    };
    FieldTask {
        model,
        train: InMemory::rollouts(&frames(), 1, 1).unwrap().into(),
        validation: InMemory::rollouts(&frames(), 1, 1).unwrap().into(),
        rollouts: Some(InMemory::rollouts(&frames(), 2, 1).unwrap().into()),
        augment: Augment::None,
        loss: loss.into(),
        weights: isobar_train::Weights::default(),
        report: isobar_train::metric::Report::default(),
        seed: 0,
    }
}

fn loss(task: &impl Task) -> f64 {
    let generator = Generator::new(0);
    let step = Step { epoch: 0, offset: 0, total: 2, generator: &generator };
    task.loss(step, &[0, 1]).unwrap().double_value(&[])
}

/// A network that gives one predicts the typical change, in every variable; one that gives zero predicts none.
#[test]
fn outputs_are_in_units_of_the_changes() {
    let scales = || Some(Normalizer::of_scales(&[0.5, 30.0]).unwrap());
    let ones = task(1.0, scales(), Mse {});
    let start = frames().select(1, 0);
    let predicted = ones.model.roll_out(&start, 1, 2).unwrap();
    for (step, found) in predicted.iter().enumerate() {
        let want = frames().select(1, step as i64 + 1);
        assert!(found.allclose(&want, 1e-12, 1e-9, false), "{found}");
    }
    assert!(loss(&ones) < 1e-12);
    let errors = ones.errors(&[0]).unwrap().remove(0);
    assert!(errors.iter().all(|error| error.relative < 1e-12), "{errors:?}");

    // No change is off by one unit, whatever the magnitude of the variable.
    let zeros = task(0.0, scales(), Mse {});
    assert!((loss(&zeros) - 1.0).abs() < 1e-9, "{}", loss(&zeros));
    let relative = loss(&task(0.0, scales(), RelativeL2 {}));
    assert!(relative.is_finite() && relative > 0.1, "{relative}");
    let found = mean_errors(&zeros.errors(&[0, 1]).unwrap());
    for (found, baseline) in found.iter().zip(zeros.baseline().unwrap()) {
        assert!((found.rmse - baseline.rmse).abs() < 1e-9, "{found:?} {baseline:?}");
    }
    let none = zeros.rollout_baseline().unwrap();
    assert!((none[0].rmse - (0.25f64 + 1.0).sqrt() / 2f64.sqrt()).abs() < 1e-9, "{none:?}");
}

/// Checkpoints of earlier versions divide changes by the deviation of the values: they predict as they did.
#[test]
fn the_deviation_of_values_is_the_scale_of_earlier_versions() {
    let values = task(0.0, None, Mse {}).model.input;
    let before = Normalizer::of_scales(values.std()).unwrap();
    let ones = task(1.0, Some(before), RelativeL2 {});
    let start = frames().select(1, 0);
    let found = ones.model.roll_out(&start, 1, 1).unwrap().remove(0);
    let want = values.decode(&(values.encode(&start).unwrap() + 1.0)).unwrap();
    assert_eq!(found, want);
    // The loss too, which was taken on normalised values.
    let encoded = |at| values.encode(&frames().select(1, at)).unwrap();
    let wanted = [0, 1].map(|at| {
        let (prediction, target) = (encoded(at) + 1.0, encoded(at + 1));
        ((prediction - &target).square().sum(None).sqrt() / target.square().sum(None).sqrt())
            .double_value(&[])
    });
    assert!((loss(&ones) - (wanted[0] + wanted[1]) / 2.0).abs() < 1e-12);
}

/// A spectrum is that of the prediction, whatever the units of the other losses' differences.
#[test]
fn the_spectral_loss_is_that_of_the_prediction() {
    let scales = || Normalizer::of_scales(&[0.5, 30.0]).unwrap();
    let of = |loss: &str| {
        let base = task(0.0, Some(scales()), serde_json::from_str::<LossKind>(loss).unwrap());
        let FieldModel { layout, positions, change, input, target, variables, roles, missing, .. } =
            base.model;
        let forward = |x: &Tensor, _: Option<Step<'_>>| Ok(x * 0.5);
        let model =
            FieldModel { forward, layout, positions, change, input, target, variables, roles, missing };
        let FieldTask { train, validation, rollouts, augment, loss, weights, report, seed, .. } = base;
        let task = FieldTask { model, train, validation, rollouts, augment, loss, weights, report, seed };
        self::loss(&task)
    };
    let values = task(0.0, None, Mse {}).model.input;
    let encoded = |at| values.encode(&frames().select(1, at)).unwrap();
    let wanted = [0, 1].map(|at| {
        let change = scales().decode(&(encoded(at) * 0.5)).unwrap();
        let prediction = encoded(at) + Normalizer::of_scales(values.std()).unwrap().encode(&change).unwrap();
        let spectral: LossKind = serde_json::from_str("\"spectral\"").unwrap();
        spectral.of(&prediction, &encoded(at + 1)).unwrap().double_value(&[])
    });
    let wanted = (wanted[0] + wanted[1]) / 2.0;
    let (spectral, mse) = (of("\"spectral\""), of("\"mse\""));
    assert!(wanted > 0.1 && (spectral - wanted).abs() < 1e-9 * wanted, "{spectral}, expected {wanted}");
    let sum = of(r#"[{ "type": "spectral", "weight": 0.5 }, "mse"]"#);
    assert!((sum - 0.5 * spectral - mse).abs() < 1e-9 * sum, "{sum} of {spectral} and {mse}");
}

/// The members would be taken for fields.
#[test]
fn an_ensemble_of_changes_is_refused() {
    let base = task(0.0, Some(Normalizer::of_scales(&[0.5, 30.0]).unwrap()), Mse {});
    let FieldModel { layout, positions, change, input, target, variables, roles, missing, .. } = base.model;
    let forward = |x: &Tensor, _: Option<Step<'_>>| Ok(Tensor::stack(&[x, x], 1));
    let model = FieldModel { forward, layout, positions, change, input, target, variables, roles, missing };
    let error = model.roll_out(&frames().select(1, 0), 1, 1).unwrap_err().to_string();
    assert!(error.contains("--set data.predict=frame"), "{error}");
}

/// Each step of a rollout is handed on before the next is computed.
#[test]
fn a_rollout_is_handed_on_step_by_step() {
    let model = task(1.0, Some(Normalizer::of_scales(&[0.5, 30.0]).unwrap()), Mse {}).model;
    let start = || isobar_train::Start::of_frame(&frames().select(1, 0), 2, &[]);
    let all = model.roll_out_members(start(), 1).unwrap();
    let mut found = Vec::new();
    let each = |at: usize, fields: Tensor| {
        found.push((at, fields));
        Ok(())
    };
    model.roll_out_each(start(), 1, each).unwrap();
    assert_eq!(found, all.into_iter().enumerate().collect::<Vec<_>>());
    let calls = std::cell::Cell::new(0);
    let FieldModel { layout, positions, change, input, target, variables, roles, missing, .. } = model;
    let forward = |x: &Tensor, _: Option<Step<'_>>| {
        calls.set(calls.get() + 1);
        Ok(x.zeros_like())
    };
    let model = FieldModel { forward, layout, positions, change, input, target, variables, roles, missing };
    assert_eq!(model.roll_out_each(start(), 1, |_, _| Err("full".into())).unwrap_err().to_string(), "full");
    assert_eq!(calls.get(), 1);
}

#[test]
fn every_channel_needs_a_name() {
    let mut unnamed = task(0.0, None, Mse {});
    unnamed.model.variables.pop();
    let error = unnamed.errors(&[0]).unwrap_err().to_string();
    assert_eq!(error, "the targets have 2 channels, but 1 variables are named: [\"u\"]; name each channel");
}

/// Keeps the messages of this thread, and of threads that hand them on.
#[derive(Debug, Clone, Default)]
pub(crate) struct Paper(Arc<Mutex<Vec<u8>>>);

impl io::Write for Paper {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Paper {
    pub(crate) fn collect() -> (Self, tracing::subscriber::DefaultGuard) {
        let paper = Self::default();
        let writer = paper.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone());
        (paper, tracing::subscriber::set_default(subscriber.finish()))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

/// Trains a network whose output is a parameter of this value, for one step at a rate that changes nothing.
fn trained(folder: &Path, output: f64, names: [&str; 2], mode: SaveMode) -> String {
    let (paper, _messages) = Paper::collect();
    let weight = Tensor::from(output).to_kind(Kind::Double).set_requires_grad(true);
    let params = Parameters::new(vec![Parameter::replicated("output", &weight)]).unwrap();
    let FieldTask { model, train, validation, rollouts, augment, loss, weights, report, seed } =
        task(output, Some(Normalizer::of_scales(&[0.5, 30.0]).unwrap()), Mse {});
    let model = FieldModel {
        forward: |x: &Tensor, _: Option<Step<'_>>| Ok(x.zeros_like() + &weight),
        layout: model.layout,
        positions: None,
        change: model.change,
        input: model.input,
        target: model.target,
        variables: names.map(Variable::new).to_vec(),
        roles: None,
        missing: None,
    };
    let task = FieldTask { model, train, validation, rollouts, augment, loss, weights, report, seed };
    let adamw = isobar_train::optim::AdamWConfig { lr: 1e-12, ..Default::default() };
    let config = FitConfig {
        folder: folder.to_owned(),
        optimizer: adamw.into(),
        train: TrainConfig { epochs: 1, batch_size: 2, ..TrainConfig::default() },
        checkpoint: CheckpointConfig { mode, ..CheckpointConfig::default() },
        ..FitConfig::default()
    };
    fit(&task, &params, &[], &Ranks::data_parallel(&Group::single()), &config).unwrap();
    paper.text()
}

/// A program of one's own learns at the end of `fit` what is no better than the baseline.
#[test]
fn fit_names_variables_that_are_no_better_than_the_baseline() {
    let folder = tempfile::tempdir().unwrap();
    let said = trained(&folder.path().join("wrong way"), -1.0, ["u", "h"], SaveMode::Sync);
    for what in ["on the validation samples", "over the rollouts"] {
        let warning = format!("no better than predicting no change, {what}: u (");
        assert_eq!(said.matches(&warning).count(), 1, "{said}");
    }
    let said = trained(&folder.path().join("typical change"), 1.0, ["u", "h"], SaveMode::Sync);
    assert!(!said.contains("no better"), "{said}");
}

/// Two variables of one name have columns of their own.
#[test]
fn variables_of_one_name_have_columns_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let said = trained(folder.path(), 0.0, ["u", "u"], SaveMode::Sync);
    assert!(said.contains("reported as \"u_2\""), "{said}");
    let csv = std::fs::read_to_string(folder.path().join("metrics.csv")).unwrap();
    let columns: Vec<&str> = csv.lines().next().unwrap().split(',').collect();
    for kind in ["validation_error", "validation_rmse", "rollout_error", "rollout_rmse", "spectrum_error"] {
        for name in ["u", "u_2"] {
            let key = format!("{kind}/{name}");
            let at = columns.iter().position(|column| *column == key);
            let value = csv.lines().last().unwrap().split(',').nth(at.unwrap()).unwrap();
            assert!(value.parse::<f64>().unwrap() >= 0.0, "{key}: {csv}");
        }
    }
}

/// The thread that writes a checkpoint cannot remove the files of an interrupted one, and warns.
#[test]
fn warnings_of_the_thread_that_writes_checkpoints_are_shown() {
    let folder = tempfile::tempdir().unwrap();
    // A folder where a file was expected.
    std::fs::create_dir_all(folder.path().join("checkpoints/step_00000001/rank_00009.json")).unwrap();
    let said = trained(folder.path(), 0.0, ["u", "h"], SaveMode::Async);
    assert!(said.contains("WARN") && said.contains("rank_00009.json"), "{said}");
}

/// More than any machine has: an error before gradients and the optimizer's state are allocated.
#[test]
fn a_run_that_memory_cannot_hold_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    // A view of one number, so that the parameter itself takes no memory.
    let huge = Tensor::zeros([1], (Kind::Float, Device::Cpu)).expand([1 << 45], false).detach();
    let params = Parameters::new(vec![Parameter::replicated("huge", &huge.set_requires_grad(true))]).unwrap();
    let task = task(0.0, None, Mse {});
    let config = FitConfig { folder: folder.path().join("run"), ..FitConfig::default() };
    let error = fit(&task, &params, &[], &Ranks::data_parallel(&Group::single()), &config).unwrap_err();
    assert!(matches!(error, Error::HostMemory { .. }), "{error}");
    let said = error.to_string();
    assert!(said.contains("of memory") && said.contains("--set distributed.checks=warn"), "{said}");
}
