//! Networks that predict changes: scales and loss.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_data::{Augment, InMemory, Normalizer};
use isobar_shard::Generator;
use isobar_train::loss::Loss;
use isobar_train::{BoxError, DenseFields, FieldModel, FieldTask, Step, Task, Variable, mean_errors};
use tch::Tensor;

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
    loss: Loss,
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
    };
    FieldTask {
        model,
        train: InMemory::rollouts(&frames(), 1, 1).unwrap(),
        validation: InMemory::rollouts(&frames(), 1, 1).unwrap(),
        rollouts: Some(InMemory::rollouts(&frames(), 2, 1).unwrap()),
        augment: Augment::None,
        loss,
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
    let ones = task(1.0, scales(), Loss::Mse);
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
    let zeros = task(0.0, scales(), Loss::Mse);
    assert!((loss(&zeros) - 1.0).abs() < 1e-9, "{}", loss(&zeros));
    let relative = loss(&task(0.0, scales(), Loss::RelativeL2));
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
    let values = task(0.0, None, Loss::Mse).model.input;
    let before = Normalizer::of_scales(values.std()).unwrap();
    let ones = task(1.0, Some(before), Loss::RelativeL2);
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

#[test]
fn every_channel_needs_a_name() {
    let mut unnamed = task(0.0, None, Loss::Mse);
    unnamed.model.variables.pop();
    let error = unnamed.errors(&[0]).unwrap_err().to_string();
    assert_eq!(error, "the targets have 2 channels, but 1 variables are named: [\"u\"]; name each channel");
}
