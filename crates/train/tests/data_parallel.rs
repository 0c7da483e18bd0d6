//! Data parallelism over thread ranks: the same training on any number of ranks.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_collectives::{Group, threads};
use isobar_train::optim::{AdamW, AdamWConfig, Optimizer};
use isobar_train::{
    DataParallel, DataParallelConfig, Error, Overlap, Parameter, Parameters, clip_grad_norm, grad_norm,
};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

const DEADLINE: Duration = Duration::from_secs(240);

/// A network of two layers in float64, with values that don't depend on the rank unless `shift` does.
struct Model {
    params: Parameters,
}

impl Model {
    fn new(shift: f64) -> Self {
        let tensor = |shape: &[i64], phase: f64| {
            let count: i64 = shape.iter().product();
            let base = Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.7 + phase;
            (base.sin() * 0.5 + shift).view(shape).set_requires_grad(true)
        };
        let named = [
            ("a.weight", tensor(&[6, 4], 0.1)),
            ("a.bias", tensor(&[6], 0.2)),
            ("b.weight", tensor(&[2, 6], 0.3)),
        ];
        let entries = named.iter().map(|(name, t)| Parameter::replicated(*name, t)).collect();
        Self { params: Parameters::new(entries).unwrap() }
    }

    fn get(&self, name: &str) -> &Tensor {
        &self.params.get(name).unwrap().tensor
    }

    fn loss(&self, samples: std::ops::Range<i64>) -> Option<Tensor> {
        if samples.is_empty() {
            return None;
        }
        let rows = samples.end - samples.start;
        let base = Tensor::arange_start(samples.start * 4, samples.end * 4, (Kind::Double, Device::Cpu));
        let x = (base * 1.3).cos().view([rows, 4]);
        let y = x.narrow(1, 0, 2).square();
        let hidden = x.linear(self.get("a.weight"), Some(self.get("a.bias"))).tanh();
        let out = hidden.linear::<Tensor>(self.get("b.weight"), None);
        Some((out - y).square().mean(Kind::Double))
    }

    fn values(&self) -> Vec<u8> {
        self.params
            .iter()
            .flat_map(|p| Vec::<f64>::try_from(p.tensor.detach().flatten(0, -1)).unwrap())
            .flat_map(f64::to_le_bytes)
            .collect()
    }
}

fn part(global: i64, rank: i64, ranks: i64) -> std::ops::Range<i64> {
    global * rank / ranks..global * (rank + 1) / ranks
}

/// The loss of each step and the last parameters.
fn train(group: &Group, config: &DataParallelConfig) -> (Vec<f64>, Vec<u8>) {
    let model = Model::new(group.rank() as f64);
    let parallel = DataParallel::new(&model.params, &[], group, config).unwrap();
    let mut adamw = AdamW::new(&model.params, &AdamWConfig::default()).unwrap();
    let mut losses = Vec::new();
    for step in 0..8 {
        // Batches that 2, 3 and 4 don't divide, and one smaller than the number of ranks.
        let global = [7, 5, 2, 8][step % 4];
        let own = part(global, group.rank() as i64, group.size() as i64);
        let own = own.start + step as i64 * 8..own.end + step as i64 * 8;
        let local = (own.end - own.start) as u64;
        parallel.zero_grad().unwrap();
        let loss = model.loss(own);
        parallel.backward(loss.as_ref(), local, global as u64).unwrap();
        clip_grad_norm(&model.params, 0.5).unwrap();
        adamw.step(0.05).unwrap();
        let sum = loss.map_or(0.0, |loss| loss.double_value(&[])) * local as f64;
        let sums = group.all_gather_bytes(&sum.to_le_bytes()).unwrap();
        losses.push(
            sums.iter().map(|b| f64::from_le_bytes(b[..].try_into().unwrap())).sum::<f64>() / global as f64,
        );
    }
    (losses, model.values())
}

#[test]
fn ranks_with_other_buckets_are_refused() {
    let errors = threads::run(2, DEADLINE, |group| {
        let config = DataParallelConfig { bucket_mb: 1.0 + group.rank() as f64, ..Default::default() };
        DataParallel::new(&Model::new(0.0).params, &[], &group, &config).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("data_parallel.bucket_mb is 2.0 on rank 1, and 1.0 on rank 0"), "{error}");
    }
}

#[rstest]
fn the_curve_does_not_depend_on_the_number_of_ranks(
    #[values(1, 2, 3, 4)] ranks: usize,
    #[values(Overlap::Off, Overlap::On)] overlap: Overlap,
    #[values(1e-4, 4.0)] bucket_mb: f64,
) {
    let config = DataParallelConfig { bucket_mb, overlap, ..Default::default() };
    let (expected, _) = train(&Group::single(), &config);
    let found = threads::run(ranks, DEADLINE, |group| train(&group, &config));
    for (losses, values) in &found {
        assert_eq!(*values, found[0].1, "parameters are bitwise equal on all ranks");
        for (loss, want) in losses.iter().zip(&expected) {
            assert!((loss - want).abs() <= 1e-10 * want.abs(), "{losses:?} instead of {expected:?}");
        }
    }
    assert!(expected[4] < expected[0], "it learns");
}

#[test]
fn passes_of_a_step_add_up() {
    let grads = threads::run(2, DEADLINE, |group| {
        let gradient = |passes: &[std::ops::Range<i64>]| {
            let model = Model::new(0.0);
            let parallel =
                DataParallel::new(&model.params, &[], &group, &DataParallelConfig::default()).unwrap();
            for _ in 0..2 {
                parallel.zero_grad().unwrap();
                let (last, first) = passes.split_last().unwrap();
                let own = |pass: &std::ops::Range<i64>| {
                    pass.start + 6 * group.rank() as i64..pass.end + 6 * group.rank() as i64
                };
                for pass in first {
                    let count = (pass.end - pass.start) as u64;
                    parallel.backward_no_sync(model.loss(own(pass)).as_ref(), count, 12).unwrap();
                }
                let count = (last.end - last.start) as u64;
                parallel.backward(model.loss(own(last)).as_ref(), count, 12).unwrap();
            }
            model.get("a.weight").grad()
        };
        (gradient(std::slice::from_ref(&(0..6))), gradient(&[0..2, 2..5, 5..6]))
    });
    for (whole, parts) in &grads {
        assert!(whole.allclose(parts, 1e-12, 1e-14, false));
        assert_eq!(*parts, grads[0].1);
    }
}

#[test]
fn a_missing_gradient_is_an_error_on_all_ranks_or_counts_as_zeros() {
    let run = |group: &Group, find_unused_parameters| {
        let model = Model::new(0.0);
        let config = DataParallelConfig { find_unused_parameters, ..Default::default() };
        let parallel = DataParallel::new(&model.params, &[], group, &config).unwrap();
        parallel.zero_grad().unwrap();
        // Only rank 1 leaves the bias out.
        let bias = (group.rank() != 1).then(|| model.get("a.bias").shallow_clone());
        let loss = (model.get("a.weight").sum(None)
            + model.get("b.weight").sum(None)
            + bias.map_or(Tensor::from(0.0), |b| b.sum(None)))
            * 1.0;
        let samples = group.size() as u64;
        let result = parallel.backward(Some(&loss), 1, samples);
        // The ranks are still in step.
        parallel.zero_grad().unwrap();
        parallel.backward(model.loss(0..1).as_ref(), 1, samples).unwrap();
        (result, model.get("a.bias").grad())
    };
    for ranks in [1, 2] {
        for (result, _) in threads::run(ranks, DEADLINE, |group| run(&group, true)) {
            result.unwrap();
        }
    }
    for (result, _) in threads::run(2, DEADLINE, |group| run(&group, false)) {
        let error = result.unwrap_err();
        assert!(
            matches!(&error, Error::MissingGradient { name, rank: 1, .. } if name == "a.bias"),
            "{error}"
        );
    }
}

#[test]
fn unused_on_one_rank_counts_as_zeros() {
    let grads = threads::run(2, DEADLINE, |group| {
        let model = Model::new(0.0);
        let config = DataParallelConfig { find_unused_parameters: true, ..Default::default() };
        let parallel = DataParallel::new(&model.params, &[], &group, &config).unwrap();
        parallel.zero_grad().unwrap();
        let used = if group.rank() == 0 { "a.bias" } else { "b.weight" };
        let loss = model.get(used).sum(None);
        parallel.backward(Some(&loss), 1, 2).unwrap();
        ["a.weight", "a.bias", "b.weight"]
            .map(|name| model.get(name).grad().mean(Kind::Double).double_value(&[]))
    });
    assert_eq!(grads, [[0.0, 0.5, 0.5]; 2]);
}

#[test]
fn different_models_are_refused() {
    let errors = threads::run(2, DEADLINE, |group| {
        let tensor =
            Tensor::zeros([2, 2 + group.rank() as i64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let params = Parameters::new(vec![Parameter::replicated("w", &tensor)]).unwrap();
        DataParallel::new(&params, &[], &group, &DataParallelConfig::default()).unwrap_err().to_string()
    });
    for error in errors {
        assert!(
            error.contains(r#"rank 0 has "w" Float [2, 2] Replicate, rank 1 has "w" Float [2, 3] Replicate"#),
            "{error}"
        );
    }
}

#[test]
fn a_failing_rank_ends_the_others_wait() {
    let errors = threads::run(2, DEADLINE, |group| {
        let model = Model::new(0.0);
        let parallel = DataParallel::new(&model.params, &[], &group, &DataParallelConfig::default()).unwrap();
        parallel.zero_grad().unwrap();
        let loss = model.loss(0..1).unwrap();
        if group.rank() == 1 {
            loss.backward(); // frees the graph, so that the next pass fails
        }
        parallel.backward(Some(&loss), 1, 2).unwrap_err().to_string()
    });
    assert!(errors[1].contains("second time"), "{errors:?}");
    // Not the error of the deadline.
    assert!(errors[0].contains("second time"), "rank 0 is told why: {errors:?}");
}

#[test]
fn wrong_counts_are_refused() {
    let model = Model::new(0.0);
    let parallel =
        DataParallel::new(&model.params, &[], &Group::single(), &DataParallelConfig::default()).unwrap();
    let loss = model.loss(0..1);
    for (loss, local, global) in [(loss.as_ref(), 0, 2), (None, 1, 2), (loss.as_ref(), 3, 2)] {
        assert!(matches!(parallel.backward_no_sync(loss, local, global), Err(Error::Invalid { .. })));
    }
}

#[test]
fn buffers_follow_rank_0_where_asked_for() {
    let run = |broadcast_buffers| {
        threads::run(2, DEADLINE, |group| {
            let config = DataParallelConfig { broadcast_buffers, ..Default::default() };
            let model = Model::new(0.0);
            let buffer = Tensor::from_slice(&[group.rank() as i64]);
            let buffers = [("count".to_owned(), buffer.shallow_clone())];
            let parallel = DataParallel::new(&model.params, &buffers, &group, &config).unwrap();
            let first = buffer.int64_value(&[0]);
            let _ = buffer.shallow_clone().fill_(10 + group.rank() as i64);
            parallel.sync_buffers().unwrap();
            (first, buffer.int64_value(&[0]))
        })
    };
    // The results are the same from the start.
    assert_eq!(run(true), [(0, 10); 2]);
    assert_eq!(run(false), [(0, 10), (0, 11)]);
}

/// 2 data × 2 model ranks: the sharded weight counts once, whole, and gradients stay within the data group.
#[test]
fn the_norm_is_that_of_the_whole_model() {
    let grad = |x: &Tensor, scale: f64| (x.square().sum(None) * scale).backward();
    // Made anew by each rank: a tensor belongs to one thread at a time.
    let whole = || Tensor::arange(10, (Kind::Double, Device::Cpu)).view([5, 2]) + 1.0;
    let shared = || Tensor::from_slice(&[3.0, -1.0]).set_requires_grad(true);
    let (dense_whole, dense_shared) = (whole().set_requires_grad(true), shared());
    let entries = vec![Parameter::replicated("w", &dense_whole), Parameter::replicated("s", &dense_shared)];
    let dense = Parameters::new(entries).unwrap();
    grad(&dense_whole, 1.0);
    grad(&dense_shared, 1.0);
    let expected = grad_norm(&dense).unwrap();

    let norms = threads::run(4, DEADLINE, |world| {
        let (data, model) = (world.rank() / 2, world.rank() % 2);
        let model_group = world.split("model", Some(data), 0).unwrap().unwrap();
        let data_group = world.split("data", Some(model), 0).unwrap().unwrap();
        let part = whole().narrow(0, [0, 2][model], [2, 3][model]).contiguous().set_requires_grad(true);
        let own = shared();
        let entries = vec![Parameter::sharded("w", &part, 0, vec![2, 3]), Parameter::replicated("s", &own)];
        let params = Parameters::over(entries, &model_group).unwrap();
        let parallel = DataParallel::new(&params, &[], &data_group, &DataParallelConfig::default()).unwrap();
        parallel.zero_grad().unwrap();
        let loss = (part.square().sum(None) + own.square().sum(None)) * [0.5, 1.5][data];
        parallel.backward(Some(&loss), 4, 8).unwrap();
        let norm = clip_grad_norm(&params, 1.0).unwrap();
        let clipped = grad_norm(&params).unwrap();
        (norm, clipped)
    });
    for (norm, clipped) in &norms {
        assert_eq!(norm.to_bits(), norms[0].0.to_bits(), "the same to the last bit");
        assert!((norm - expected).abs() < 1e-12 * expected, "{norm} instead of {expected}");
        assert!((clipped - 1.0).abs() < 1e-6);
    }
}

#[test]
fn a_gradient_that_is_not_finite_is_named_on_every_rank() {
    let errors = threads::run(2, DEADLINE, |group| {
        let part = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
        let fine = Tensor::from_slice(&[1.0]).set_requires_grad(true);
        let entries =
            vec![Parameter::replicated("fine", &fine), Parameter::sharded("w", &part, 0, vec![2, 2])];
        let params = Parameters::over(entries, &group).unwrap();
        let scale = if group.rank() == 1 { f64::INFINITY } else { 1.0 };
        ((part.sum(None) * scale) + fine.sum(None)).backward();
        clip_grad_norm(&params, 1.0).unwrap_err()
    });
    for error in errors {
        assert!(matches!(&error, Error::NonFiniteGradient { name, rank: 1, .. } if name == "w"), "{error}");
    }
}
