//! Memory saved by recomputation. A binary of its own, since peaks are those of the process.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_array::Generator;
use isobar_models::{
    Afno, AfnoConfig, DistributedAfno, DistributedAfnoConfig, Fno, FnoConfig, Mode, PerDim, Result,
};
use isobar_shard::ParamStore;
use isobar_torch::memory;
use tch::{Device, Kind, Tensor};

type Forward = Box<dyn Fn(&Tensor) -> Result<Tensor>>;

/// The peak of bytes live in the third step.
fn peak(shape: &[i64], make: impl FnOnce(&mut ParamStore) -> Forward) -> u64 {
    let mut store = ParamStore::new(Generator::new(1));
    let model = make(&mut store);
    let x = Tensor::ones(shape, (Kind::Float, Device::Cpu));
    let step = || {
        store.zero_grad().unwrap();
        model(&x).unwrap().mean(Kind::Float).backward();
    };
    step();
    step();
    memory::reset_peak();
    step();
    memory::peak_bytes()
}

#[test]
fn deep_models_need_less() {
    memory::install_caching_allocator();
    let afno = |gradient_checkpointing| {
        peak(&[1, 2, 128, 128], |store| {
            let sizes = AfnoConfig::new([128, 128], 2, 2);
            let config =
                AfnoConfig { patch_size: [4, 4], embed_dim: 32, depth: 12, gradient_checkpointing, ..sizes };
            let model = Afno::new(&config, store).unwrap();
            Box::new(move |x| model.forward(x, Mode::Eval))
        })
    };
    let distributed_afno = |gradient_checkpointing| {
        peak(&[1, 2, 128, 128], |store| {
            let sizes = DistributedAfnoConfig::new([128, 128], 2);
            let config = DistributedAfnoConfig {
                patch_size: 4,
                embed_dim: 32,
                depth: 12,
                gradient_checkpointing,
                ..sizes
            };
            let model = DistributedAfno::new(&config, store).unwrap();
            Box::new(move |x| model.forward(x, Mode::Eval))
        })
    };
    let fno = |gradient_checkpointing| {
        peak(&[1, 2, 128, 128], |store| {
            let modes = PerDim::All(4);
            let config = FnoConfig {
                num_fno_modes: modes,
                num_fno_layers: 12,
                gradient_checkpointing,
                ..FnoConfig::new(2, 2)
            };
            let model = Fno::new(&config, store).unwrap();
            Box::new(move |x| model.forward(x))
        })
    };
    for (name, peak, limit) in [
        ("afno", &afno as &dyn Fn(bool) -> u64, 0.4),
        ("distributed_afno", &distributed_afno, 0.4),
        ("fno", &fno, 0.7),
    ] {
        let [without, with] = [false, true].map(peak);
        let ratio = with as f64 / without as f64;
        assert!(
            ratio < limit,
            "{name}: {with} bytes of {without} are {ratio:.3}, expected less than {limit}"
        );
    }
}
