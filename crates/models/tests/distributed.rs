//! The channel-parallel model against itself on one rank, in double precision.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_array::{Generator, Window};
use isobar_models::{DistributedAfno, DistributedAfnoConfig, Mode};
use isobar_shard::{ParallelRegion, ParamStore, Placement};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

struct Step {
    output: Tensor,
    input_grad: Tensor,
    /// In the order of the parameters.
    grads: Vec<(String, Placement, Vec<i64>, Tensor)>,
}

fn config() -> DistributedAfnoConfig {
    DistributedAfnoConfig {
        out_channels: Some(6),
        patch_size: 4,
        embed_dim: 24,
        depth: 3,
        num_blocks: 12,
        ..DistributedAfnoConfig::new([12, 20], 6)
    }
}

/// Forward and backward with the rank's parts of input, output and cotangent.
fn step(config: &DistributedAfnoConfig, region: ParallelRegion, train: bool) -> Step {
    let random = |seed, channels| {
        Generator::new(seed).normal(&Window::whole(&[3, channels, 12, 20]), 0.0, 1.0, DOUBLE).unwrap()
    };
    let own = |whole: Tensor, parallel: bool| {
        let (start, extent) = if parallel { region.part(whole.size()[1]) } else { (0, whole.size()[1]) };
        whole.narrow(1, start, extent).copy()
    };
    let mut params = ParamStore::new(Generator::new(7))
        .with_options(Kind::Double, Device::Cpu)
        .with_region(region.clone());
    let model = DistributedAfno::new(config, &mut params).unwrap();
    let input = own(random(1, 6), config.channel_parallel_inputs).set_requires_grad(true);
    let generator = Generator::new(5);
    let mode = if train { Mode::train(&generator) } else { Mode::Eval };
    let output = model.forward(&input, mode).unwrap();
    let cotangent = own(random(2, config.out_channels.unwrap() as i64), config.channel_parallel_outputs);
    (&output * cotangent).sum(Kind::Double).backward();
    let grads =
        params.parameters().iter().map(|p| (p.name.clone(), p.placement, p.shape.clone(), p.tensor.grad()));
    Step { output: output.detach(), input_grad: input.grad(), grads: grads.collect() }
}

#[rstest]
#[case::plain(config())]
#[case::parallel_inputs(DistributedAfnoConfig { channel_parallel_inputs: true, ..config() })]
#[case::parallel_outputs(DistributedAfnoConfig { channel_parallel_outputs: true, ..config() })]
#[case::both(DistributedAfnoConfig { channel_parallel_inputs: true, channel_parallel_outputs: true, ..config() })]
#[case::fewer_outputs_than_ranks(DistributedAfnoConfig { out_channels: Some(1), ..config() })]
#[case::dropout(DistributedAfnoConfig { drop_rate: 0.2, drop_path_rate: 0.5, ..config() })]
fn parts_agree_with_the_whole(#[case] config: DistributedAfnoConfig, #[values(2, 3, 4)] ranks: usize) {
    let parallel_ends = config.channel_parallel_inputs || config.channel_parallel_outputs;
    if parallel_ends && 6 % ranks != 0 {
        return expect_refusal(&config, ranks);
    }
    let train = config.drop_rate > 0.0;
    let whole = step(&config, ParallelRegion::single(), train);
    let parts = isobar_collectives::threads::run(ranks, Duration::from_secs(60), |group| {
        let region = ParallelRegion::new(group);
        step(&config, region.clone(), train)
    });
    for (rank, part) in parts.iter().enumerate() {
        let cut = |tensor: &Tensor, dim: usize, parallel: bool| {
            let extent = tensor.size()[dim];
            let sizes = isobar_collectives::balanced(extent, ranks);
            let start: i64 = sizes[..rank].iter().sum();
            if parallel { tensor.narrow(dim as i64, start, sizes[rank]) } else { tensor.shallow_clone() }
        };
        assert!(max_error(&part.output, &cut(&whole.output, 1, config.channel_parallel_outputs)) < 1e-9);
        assert!(
            max_error(&part.input_grad, &cut(&whole.input_grad, 1, config.channel_parallel_inputs)) < 1e-9
        );
        for (got, want) in part.grads.iter().zip(&whole.grads) {
            let error = match got.1 {
                Placement::Shard(dim) => max_error(&got.3, &cut(&want.3, dim, true)),
                _ => max_error(&got.3, &want.3),
            };
            assert!(error < 1e-9, "gradient of {} differs by {error}", got.0);
            if got.1 == Placement::Replicate {
                let same = parts.iter().all(|other| other.grads.iter().any(|g| g.0 == got.0 && g.3 == got.3));
                assert!(same, "gradients of {} differ between ranks", got.0);
            }
        }
    }
}

fn expect_refusal(config: &DistributedAfnoConfig, ranks: usize) {
    let refused = isobar_collectives::threads::run(ranks, Duration::from_secs(60), |group| {
        let mut params = ParamStore::new(Generator::new(7)).with_region(ParallelRegion::new(group));
        DistributedAfno::new(config, &mut params).unwrap_err().to_string()
    });
    for error in refused {
        assert!(error.contains("put_channels") || error.contains("_channels 6 is not divisible"), "{error}");
    }
}

/// With its collectives, in the order of the forward pass.
#[rstest]
#[case::all_channels(config())]
#[case::own_channels_dropped(DistributedAfnoConfig {
    channel_parallel_inputs: true,
    channel_parallel_outputs: true,
    drop_rate: 0.2,
    drop_path_rate: 0.5,
    ..config()
})]
fn what_is_computed_again_is_the_same(#[case] config: DistributedAfnoConfig, #[values(1, 2)] ranks: usize) {
    isobar_collectives::threads::run(ranks, Duration::from_secs(60), move |group| {
        let region = ParallelRegion::new(group);
        let kept = step(&config, region.clone(), true);
        let again = DistributedAfnoConfig { gradient_checkpointing: true, ..config.clone() };
        let again = step(&again, region, true);
        assert_eq!(again.output, kept.output);
        assert!(max_error(&again.input_grad, &kept.input_grad) < 1e-12);
        assert_eq!(again.grads.len(), kept.grads.len());
        for (got, want) in again.grads.iter().zip(&kept.grads) {
            let error = max_error(&got.3, &want.3);
            assert!(error < 1e-12, "gradient of {} differs by {error}", got.0);
        }
    });
}

#[test]
fn training_keeps_replicated_parameters_bitwise_equal() {
    let states = isobar_collectives::threads::run(2, Duration::from_secs(60), |group| {
        let config = config();
        let mut params = ParamStore::new(Generator::new(7)).with_region(ParallelRegion::new(group));
        let model = DistributedAfno::new(&config, &mut params).unwrap();
        let x = Tensor::ones([1, 6, 12, 20], (Kind::Float, Device::Cpu));
        for _ in 0..5 {
            let loss = model.forward(&x, Mode::Eval).unwrap().mse_loss(&x, tch::Reduction::Mean);
            params.zero_grad().unwrap();
            loss.backward();
            tch::no_grad(|| {
                for parameter in params.trainable() {
                    let mut tensor = parameter.tensor.shallow_clone();
                    let _ = tensor.g_sub_(&(tensor.grad() * 0.1));
                }
            });
        }
        let replicated = params.parameters().iter().filter(|p| p.placement == Placement::Replicate);
        replicated.map(|p| (p.name.clone(), p.tensor.detach())).collect::<Vec<_>>()
    });
    assert!(!states[0].is_empty());
    assert_eq!(states[0], states[1]);
}

fn max_error(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    if a.numel() == 0 { 0.0 } else { (a - b).abs().max().double_value(&[]) }
}
