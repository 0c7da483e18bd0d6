//! The golden cases of the models, outputs and all gradients, on one rank and split over several.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

pub(crate) mod cases;
mod registered;

use std::collections::BTreeSet;
use std::time::Duration;

use cases::Golden;
use isobar_array::{Generator, Window};
use isobar_models::{
    Afno, AfnoConfig, Aurora, AuroraConfig, CNextUNet, CNextUNetConfig, DistributedAfno,
    DistributedAfnoConfig, Dit, DitConfig, Dlwp, DlwpConfig, Fengwu, FengwuConfig, Fno, FnoConfig,
    FullyConnected, FullyConnectedConfig, HealpixUNet, HealpixUNetConfig, ModAfno, ModAfnoConfig, Mode,
    Pangu, PanguConfig, Pix2Pix, Pix2PixConfig, SrResNet, SrResNetConfig, SwinRnn, SwinRnnConfig, UNet,
    UNetConfig,
};
use isobar_shard::{ComputedBuffer, ParallelRegion, ParamStore, Params, Placement};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

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
fn dlwp() {
    let golden = Golden::read("model_dlwp_cube");
    let mut params = store();
    let model = Dlwp::new(&golden.config::<DlwpConfig>(), &mut params).unwrap();
    check(&golden, params, |x| model.forward(x, Mode::Eval).unwrap());
}

#[test]
fn healpix_unet() {
    let golden = Golden::read("model_healpix_unet_avg");
    let mut params = store();
    let model = HealpixUNet::new(&golden.config::<HealpixUNetConfig>(), &mut params).unwrap();
    let names: Vec<&str> = params.parameters().iter().map(|parameter| parameter.name.as_str()).collect();
    assert_eq!(names, golden.params);
    assert_eq!(*params.tied(), golden.tied);
    check_inputs(&golden, ["inputs.0", "inputs.1", "inputs.2"], params, |[x, prescribed, constants]| {
        model.forward(x, Some(prescribed), Some(constants), None, Mode::Eval).unwrap()
    });
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

/// Loads the weights of a case of several outputs, runs forward and backward, and compares everything.
fn check_several(golden: &Golden, mut store: ParamStore, forward: impl FnOnce(&Tensor) -> Vec<Tensor>) {
    let computed = store.computed_buffers().iter().map(ComputedBuffer::name);
    let names: BTreeSet<&str> =
        store.parameters().iter().map(|parameter| parameter.name.as_str()).chain(computed).collect();
    assert_eq!(names, golden.params.iter().map(String::as_str).collect());
    store.load(&golden.state_dict()).unwrap();
    let input = golden.tensor("input").set_requires_grad(true);
    let mut loss = Tensor::from(0.0f32);
    for (i, output) in forward(&input).into_iter().enumerate() {
        let name = format!("output.{i}");
        golden.check(&name, &output);
        loss += (output * golden.tensor(&format!("grad.{name}"))).sum(Kind::Float);
    }
    loss.backward();
    golden.check("grad.input", &input.grad());
    for parameter in store.trainable() {
        golden.check(&format!("grad.{}", parameter.name), &parameter.tensor.grad());
    }
}

/// Windows that cover a grid with margins, and a grid smaller than a window.
#[test]
fn aurora() {
    let golden = Golden::own("aurora");
    let mut params = store().with_options(Kind::Double, Device::Cpu);
    let model = Aurora::new(&golden.config::<AuroraConfig>(), &mut params).unwrap();
    check_inputs(&golden, ["input"], params, |[x]| {
        model.forward(x, &golden.tensor("t"), Mode::Eval).unwrap()
    });
}

#[test]
fn pangu() {
    let golden = Golden::read("model_pangu_tiny");
    let mut params = store();
    let model = Pangu::new(&golden.config::<PanguConfig>(), &mut params).unwrap();
    check_masks(&golden, &params);
    check_several(&golden, params, |x| {
        let (surface, upper_air) = model.forward(x, Mode::Eval).unwrap();
        [surface, upper_air.unwrap()].into()
    });
}

#[test]
fn fengwu() {
    let golden = Golden::read("model_fengwu_tiny");
    let mut params = store();
    let model = Fengwu::new(&golden.config::<FengwuConfig>(), &mut params).unwrap();
    check_masks(&golden, &params);
    check_several(&golden, params, |x| model.forward(x, Mode::Eval).unwrap().into());
}

/// Masks are those of the source, and nothing stores them.
fn check_masks(golden: &Golden, store: &ParamStore) {
    let masks = store.computed_buffers();
    assert!(!masks.is_empty() && store.parameters().iter().all(|parameter| parameter.trainable));
    for mask in masks {
        let values = mask.values(&Window::whole(mask.shape())).unwrap();
        assert_eq!(values, golden.tensor(mask.name()), "{}", mask.name());
    }
}

#[test]
fn swin_rnn() {
    let golden = Golden::read("model_swin_rnn_tiny");
    let mut params = store();
    let model = SwinRnn::new(&golden.config::<SwinRnnConfig>(), &mut params).unwrap();
    let mut names: Vec<&str> = params.parameters().iter().map(|parameter| parameter.name.as_str()).collect();
    let mut given: Vec<&str> = golden.params.iter().map(String::as_str).collect();
    names.sort_unstable();
    given.sort_unstable();
    assert_eq!(names, given);
    check(&golden, params, |x| model.forward(x, Mode::Eval).unwrap());
}

#[test]
fn dit() {
    let golden = Golden::read("model_dit_timm");
    let mut params = store();
    let model = Dit::new(&golden.config::<DitConfig>(), &mut params).unwrap();
    let names: Vec<&str> = params.parameters().iter().map(|parameter| parameter.name.as_str()).collect();
    assert_eq!(names, golden.params);
    for buffer in params.parameters().iter().filter(|parameter| !parameter.trainable) {
        golden.check(&buffer.name, &buffer.tensor);
    }
    check_inputs(&golden, ["x", "t", "condition"], params, |[x, t, condition]| {
        model.forward(x, t, Some(condition), Mode::Eval).unwrap()
    });
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
