//! The golden cases of the models, outputs and all gradients, on one rank and split over several.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cases;

use std::time::Duration;

use cases::Golden;
use isobar_array::Generator;
use isobar_models::{
    Afno, AfnoConfig, CNextUNet, CNextUNetConfig, DistributedAfno, DistributedAfnoConfig, Fno, FnoConfig,
    FullyConnected, FullyConnectedConfig, ModAfno, ModAfnoConfig, Mode, Pix2Pix, Pix2PixConfig, SrResNet,
    SrResNetConfig, UNet, UNetConfig,
};
use isobar_shard::{ParallelRegion, ParamStore, Params, Placement};
use rstest::rstest;
use tch::{Kind, Tensor};

fn store() -> ParamStore {
    ParamStore::new(Generator::new(1))
}

/// Loads the case's weights, runs forward and backward, and compares everything.
fn check(golden: &Golden, store: ParamStore, forward: impl FnOnce(&Tensor) -> Tensor) {
    check_inputs(golden, ["input"], store, |[input]| forward(input));
}

fn check_inputs<const N: usize>(
    golden: &Golden,
    inputs: [&str; N],
    mut store: ParamStore,
    forward: impl FnOnce([&Tensor; N]) -> Tensor,
) {
    let names: Vec<&str> = store.parameters().iter().map(|parameter| parameter.name.as_str()).collect();
    assert_eq!(names.len(), golden.params.len(), "{names:?}");
    store.load(&golden.state_dict()).unwrap();
    let given = inputs.map(|name| golden.tensor(name).set_requires_grad(true));
    let output = forward(given.each_ref());
    golden.check("output", &output);
    (output * golden.tensor("grad.output")).sum(Kind::Float).backward();
    for (name, input) in inputs.iter().zip(&given) {
        golden.check(&format!("grad.{name}"), &input.grad());
    }
    let region = store.region().clone();
    for parameter in store.trainable() {
        golden.check_part(&format!("grad.{}", parameter.name), &parameter.tensor.grad(), |whole| {
            match parameter.placement {
                Placement::Shard(dim) => {
                    let (start, extent) = region.part(parameter.shape[dim]);
                    whole.narrow(dim as i64, start, extent)
                }
                _ => whole,
            }
        });
    }
}

#[rstest]
fn fully_connected(
    #[values("model_fully_connected_skip", "model_fully_connected_fact_adaptive")] name: &str,
) {
    let golden = Golden::read(name);
    let mut params = store();
    let model = FullyConnected::new(&golden.config::<FullyConnectedConfig>(), &mut params).unwrap();
    check(&golden, params, |x| model.forward(x).unwrap());
}

#[rstest]
fn afno(#[values("afno_small", "model_afno_patch_2x4", "model_afno_thresholded")] name: &str) {
    let golden = Golden::read(name);
    let mut params = store();
    let model = Afno::new(&golden.config::<AfnoConfig>(), &mut params).unwrap();
    let names: Vec<&str> = params.parameters().iter().map(|parameter| parameter.name.as_str()).collect();
    assert_eq!(names, golden.params);
    check(&golden, params, |x| model.forward(x, Mode::Eval).unwrap());
}

#[test]
fn mod_afno() {
    let golden = Golden::read("model_mod_afno_complex");
    let mut params = store();
    let model = ModAfno::new(&golden.config::<ModAfnoConfig>(), &mut params).unwrap();
    let names: Vec<&str> = params.parameters().iter().map(|parameter| parameter.name.as_str()).collect();
    assert_eq!(names, golden.params);
    let untrained: Vec<_> = params.parameters().iter().filter(|parameter| !parameter.trainable).collect();
    for buffer in untrained {
        golden.check(&buffer.name, &buffer.tensor);
    }
    check_inputs(&golden, ["x", "mod"], params, |[x, modulation]| {
        model.forward(x, modulation, Mode::Eval).unwrap()
    });
}

#[rstest]
fn fno(#[values("fno2d_small", "model_fno_1d", "model_fno_2d", "model_fno_3d")] name: &str) {
    let golden = Golden::read(name);
    let mut params = store();
    let model = Fno::new(&golden.config::<FnoConfig>(), &mut params).unwrap();
    let names: Vec<&str> = params.parameters().iter().map(|parameter| parameter.name.as_str()).collect();
    assert_eq!(names, golden.params);
    let trained: Vec<&str> = params.trainable().map(|parameter| parameter.name.as_str()).collect();
    let grads: Vec<&str> = names.into_iter().filter(|name| golden.has(&format!("grad.{name}"))).collect();
    assert_eq!(trained, grads);
    check(&golden, params, |x| model.forward(x).unwrap());
}

#[test]
fn unet() {
    let golden = Golden::read("model_unet_group_norm");
    let mut params = store();
    let model = UNet::new(&golden.config::<UNetConfig>(), &mut params).unwrap();
    let names: Vec<&str> = params.parameters().iter().map(|parameter| parameter.name.as_str()).collect();
    assert_eq!(names, golden.params);
    check(&golden, params, |x| model.forward(x, Mode::Eval).unwrap());
}

#[test]
fn sr_res_net() {
    let golden = Golden::read("model_sr_res_net_x2");
    let mut params = store();
    let model = SrResNet::new(&golden.config::<SrResNetConfig>(), &mut params).unwrap();
    let names: Vec<&str> = params.parameters().iter().map(|parameter| parameter.name.as_str()).collect();
    assert_eq!(names, golden.params);
    assert_eq!(*params.tied(), golden.tied);
    check(&golden, params, |x| model.forward(x, Mode::Eval).unwrap());
}

#[rstest]
fn cnext_unet(
    #[values("sphere_cnext_unet_2d", "sphere_cnext_unet_2d_deep", "sphere_cnext_unet_3d")] name: &str,
) {
    let golden = Golden::read(name);
    let mut params = store().with_options(golden.tensor("input").kind(), tch::Device::Cpu);
    let model = CNextUNet::new(&golden.config::<CNextUNetConfig>(), &mut params).unwrap();
    let names: Vec<&str> = params.parameters().iter().map(|parameter| parameter.name.as_str()).collect();
    let sorted = |mut names: Vec<&str>| -> Vec<String> {
        names.sort_unstable();
        names.into_iter().map(str::to_owned).collect()
    };
    assert_eq!(sorted(names), sorted(golden.params.iter().map(String::as_str).collect()));
    let trained: Vec<&str> = params.trainable().map(|parameter| parameter.name.as_str()).collect();
    assert!(trained.iter().all(|name| golden.has(&format!("grad.{name}"))), "{trained:?}");
    check(&golden, params, |x| model.forward(x, Mode::Eval).unwrap());
}

#[test]
fn pix2pix() {
    let golden = Golden::read("model_pix2pix_reflect2d");
    let mut params = store();
    let model = Pix2Pix::new(&golden.config::<Pix2PixConfig>(), &mut params).unwrap();
    let names: Vec<&str> = params.parameters().iter().map(|parameter| parameter.name.as_str()).collect();
    assert_eq!(names, golden.params);
    check(&golden, params, |x| model.forward(x, Mode::Eval).unwrap());
}

#[rstest]
fn distributed_afno(#[values(1, 2, 4)] ranks: usize) {
    isobar_collectives::threads::run(ranks, Duration::from_secs(60), |group| {
        let golden = Golden::read("distributed_afno_small");
        let mut params = store().with_region(ParallelRegion::new(group));
        let model = DistributedAfno::new(&golden.config::<DistributedAfnoConfig>(), &mut params).unwrap();
        let names: Vec<&str> = params.parameters().iter().map(|parameter| parameter.name.as_str()).collect();
        assert_eq!(names, golden.params);
        check(&golden, params, |x| model.forward(x, Mode::Eval).unwrap());
    });
}

#[test]
fn a_size_that_the_model_cannot_have_is_an_error_on_all_ranks() {
    let errors = isobar_collectives::threads::run(3, Duration::from_secs(60), |group| {
        let golden = Golden::read("distributed_afno_small");
        let mut params = store().with_region(ParallelRegion::new(group));
        DistributedAfno::new(&golden.config::<DistributedAfnoConfig>(), &mut params).unwrap_err().to_string()
    });
    for error in errors {
        assert_eq!(
            error,
            "distributed_afno: embed_dim 16 is not divisible by the number of model-parallel ranks 3"
        );
    }
}
