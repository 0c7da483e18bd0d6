//! Every model in mixed precision with bfloat16, on one rank and over split fields, beside single precision; and without values.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_array::{Array, Generator};
use isobar_collectives::threads;
use isobar_mesh::DeviceMesh;
use isobar_models::{Batch, Mode};
use isobar_shard::{
    Layout, MeshParams, ParamStore, Placement, ShardTensor, Sizes, forbid_hidden_communication,
};
use isobar_torch::guard::Autocast;
use isobar_torch::meta;
use rstest::rstest;
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::golden::cases::Golden;

/// Mixed precision rounds weights, inputs and outputs of each product, and single precision with rounded parameters and inputs
/// only the weights: three roundings of one size, and as much again for values that several layers round.
const ROUNDINGS: f64 = 6.0;

/// Unit roundoff of bfloat16.
const ROUNDOFF: f64 = 1.0 / 256.0;

/// Outputs, and gradients of the parameters.
type Results = [Vec<Tensor>; 2];

fn case(name: &str) -> Golden {
    const FIELDS: &[i64] = &[2, 2, 12, 8];
    match name {
        "vit" => {
            let attrs = json!({
                "inp_shape": [12, 8], "in_channels": 2, "out_channels": 2, "patch_size": [2, 2], "embed_dim": 16, "depth": 2,
                "num_heads": 2,
            });
            return Golden::made(name, attrs, &[("fields", FIELDS)], FIELDS);
        }
        "conv_net" => {
            let attrs = json!({ "in_channels": 2, "out_channels": 2, "dimension": 2, "hidden_channels": 8, "depth": 3 });
            return Golden::made(name, attrs, &[("fields", FIELDS)], FIELDS);
        }
        "dhariwal_unet" => {
            let inputs = [("fields", FIELDS), ("noise_labels", &[2][..])];
            return Golden::made(name, dhariwal_unet(), &inputs, FIELDS);
        }
        "edm_preconditioner" => {
            let mut network = dhariwal_unet();
            network["type"] = json!("dhariwal_unet");
            let inputs = [("fields", FIELDS), ("sigma", &[2][..])];
            return Golden::made(name, json!({ "model": network }), &inputs, FIELDS);
        }
        _ => {}
    }
    match name.starts_with("model_") || name.starts_with("sphere_") || name.ends_with("_small") {
        true => Golden::read(name),
        false => Golden::own(name),
    }
}

fn dhariwal_unet() -> serde_json::Value {
    json!({
        "img_resolution": [12, 8], "in_channels": 2, "out_channels": 2, "model_channels": 64, "channel_mult": [1, 1],
        "channel_mult_emb": 1, "num_blocks": 1, "attn_resolutions": [6], "dropout": 0.0,
    })
}

/// A tensor in single precision, or with values of bfloat16.
fn rounded(x: &Tensor, rounds: bool) -> Tensor {
    match (x.is_floating_point(), rounds) {
        (false, _) => x.shallow_clone(),
        (true, false) => x.to_kind(Kind::Float),
        (true, true) => x.to_kind(Kind::BFloat16).to_kind(Kind::Float),
    }
}

fn load(golden: &Golden, store: &mut ParamStore, rounds: bool) {
    let state = golden.state_dict();
    store.load(&state.iter().map(|(name, x)| (name.clone(), rounded(x, rounds))).collect()).unwrap();
}

/// The names of the outputs, in the case and in a batch.
fn outputs(golden: &Golden) -> Vec<(String, String)> {
    let named = golden.model().signature().outputs;
    match golden.has("output") {
        true => vec![("output".to_owned(), named[0].to_owned())],
        false => {
            let there = |i: &usize| golden.has(&format!("output.{i}"));
            let streams = named.len() == 1;
            let array = |i: usize| if streams { format!("{}.{i}", named[0]) } else { named[i].to_owned() };
            (0..).take_while(there).map(|i| (format!("output.{i}"), array(i))).collect()
        }
    }
}

/// Makes an array of a tensor, maybe laid out as another one.
type Lay<'a, A> = &'a dyn Fn(&Tensor, Option<&A>) -> A;

/// Forward and backward of a batch of `array`s. `constant` lays a tensor out as an array is, `full` gathers one.
fn run<A: Array>(
    golden: &Golden,
    store: &ParamStore,
    model: &dyn isobar_models::Model<A>,
    (rounds, mixed): (bool, bool),
    [array, constant]: [Lay<'_, A>; 2],
    backward: impl Fn(&A),
    full: impl Fn(&A) -> Tensor,
) -> Results {
    let signature = golden.model().signature();
    let batch = golden.inputs.iter().fold(Batch::default(), |batch, name| {
        batch.with(signature.array(name), array(&rounded(&golden.tensor(name), rounds), None))
    });
    let generator = Generator::new(2);
    let mode = if golden.training { Mode::train(&generator) } else { Mode::Eval };
    let precision = mixed.then(|| Autocast::new(Device::Cpu, Kind::BFloat16).unwrap());
    let mut given = model.forward(&batch, mode).unwrap();
    drop(precision);
    let mut results = [Vec::new(), Vec::new()];
    let mut loss: Option<A> = None;
    for (name, of_batch) in outputs(golden) {
        let y = given.take(&of_batch).unwrap().to_kind(Kind::Float).unwrap();
        let by = golden.tensor(&format!("grad.{name}")).to_kind(Kind::Float);
        let term = y.mul(&constant(&by, Some(&y))).unwrap().sum().unwrap();
        loss = Some(match &loss {
            Some(loss) => loss.add(&term).unwrap(),
            None => term,
        });
        results[0].push(full(&y).detach());
    }
    backward(&loss.unwrap());
    for parameter in store.trainable() {
        let grad = parameter.tensor.grad();
        results[1].push(if grad.defined() { grad.copy() } else { parameter.tensor.zeros_like() });
    }
    results
}

fn dense(golden: &Golden, rounds: bool, mixed: bool) -> Results {
    let mut store = ParamStore::new(Generator::new(1));
    let model = golden.model().build::<Tensor>(&mut store).unwrap();
    load(golden, &mut store, rounds);
    let same = |x: &Tensor, _: Option<&Tensor>| x.shallow_clone();
    run(golden, &store, &*model, (rounds, mixed), [&same, &same], Tensor::backward, Tensor::shallow_clone)
}

/// On the meta device.
fn without_values(golden: &Golden) -> Results {
    meta::enable().unwrap();
    let mut store = ParamStore::new(Generator::new(1)).with_options(Kind::Float, meta::DEVICE);
    let model = golden.model().build::<Tensor>(&mut store).unwrap();
    let there = |x: &Tensor, _: Option<&Tensor>| x.to_device(meta::DEVICE);
    run(golden, &store, &*model, (false, false), [&there, &there], Tensor::backward, Tensor::shallow_clone)
}

/// On two ranks, each with uneven parts of the longest spatial dim of each input.
fn sharded(name: &'static str) -> Vec<Results> {
    threads::run(2, Duration::from_secs(60), move |group| {
        let golden = case(name);
        let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
        let mut store = ParamStore::new(Generator::new(1));
        let model = golden.model().build(&mut MeshParams::new(&mut store, &mesh)).unwrap();
        load(&golden, &mut store, false);
        let domain = golden.model().signature().domain;
        let array = |x: &Tensor, _: Option<&ShardTensor>| {
            let shape = x.size();
            let longest = domain(shape.len()).into_iter().skip(1).rev().max_by_key(|&dim| shape[dim]);
            let layout = match longest.filter(|&dim| shape[dim] > 2) {
                None => Layout::new(&mesh, &[Placement::Replicate], &shape, &Sizes::Chunk),
                Some(dim) => {
                    let first = shape[dim] / 2 - 1;
                    let sizes = Sizes::Explicit(vec![(dim, vec![first, shape[dim] - first])]);
                    Layout::new(&mesh, &[Placement::Shard(dim)], &shape, &sizes)
                }
            };
            ShardTensor::distribute_as(x, &layout.unwrap()).unwrap()
        };
        let constant = |x: &Tensor, like: Option<&ShardTensor>| {
            ShardTensor::distribute_as(x, &like.unwrap().layout().without_partial()).unwrap()
        };
        let _forbidden = forbid_hidden_communication();
        run(
            &golden,
            &store,
            &*model,
            (false, true),
            [&array, &constant],
            |loss| loss.backward().unwrap(),
            |y| y.full_tensor(None).unwrap(),
        )
    })
}

/// ‖got − want‖ / ‖want‖ of several tensors together.
fn distance(got: &[Tensor], want: &[Tensor]) -> f64 {
    let squares = |tensors: &mut dyn Iterator<Item = Tensor>| -> f64 {
        tensors.map(|t| t.square().sum(Kind::Double).double_value(&[])).sum()
    };
    let apart = squares(&mut got.iter().zip(want).map(|(got, want)| got - want));
    (apart / squares(&mut want.iter().map(Tensor::shallow_clone))).sqrt()
}

/// Outputs and gradients in bfloat16 are as far from those in single precision as rounding parameters and inputs takes them, times
/// the number of roundings; dense and sharded alike. On the meta device they have the same shapes.
#[rstest]
fn near_single_precision_and_of_the_same_shapes(
    #[values(
        "afno_small",
        "aurora",
        "conv_net",
        "dhariwal_unet",
        "distributed_afno_small",
        "edm_precond_positions",
        "edm_precond_super_resolution_plain",
        "edm_preconditioner",
        "fno2d_small",
        "geo_transolver_streams",
        "model_afno_patch_2x4",
        "model_dit_timm",
        "model_dlwp_cube",
        "model_fengwu_tiny",
        "model_flare_irregular",
        "model_fno_1d",
        "model_fno_3d",
        "model_fully_connected_skip",
        "model_geo_transolver_irregular",
        "model_healpix_unet_avg",
        "model_mod_afno_complex",
        "model_pangu_tiny",
        "model_pix2pix_reflect2d",
        "model_song_unet_ddpmpp",
        "model_song_unet_train",
        "model_sr_res_net_x2",
        "model_swin_rnn_tiny",
        "model_transolver_irregular_time",
        "model_transolver_structured2d",
        "model_unet_group_norm",
        "song_unet_pos_embd_learnable",
        "song_unet_pos_lt_embd_train",
        "sphere_cnext_unet_2d",
        "transolver_plus_grid",
        "vit"
    )]
    name: &'static str,
) {
    let golden = case(name);
    let want = dense(&golden, false, false);
    let shapes = |results: &Results| {
        results.each_ref().map(|tensors| tensors.iter().map(Tensor::size).collect::<Vec<_>>())
    };
    // Which points are near each other depends on their values; the rows that faces pick are indices, whose values count.
    if !["geo_transolver_streams", "model_dlwp_cube", "model_healpix_unet_avg"].contains(&name) {
        assert_eq!(shapes(&without_values(&golden)), shapes(&want), "{name} without values");
    }
    let moved = dense(&golden, true, false);
    let runs = std::iter::once(dense(&golden, false, true)).chain(sharded(name));
    for (run, got) in runs.enumerate() {
        for (at, what) in ["outputs", "gradients"].into_iter().enumerate() {
            let bound = ROUNDINGS * distance(&moved[at], &want[at]).max(ROUNDOFF);
            let apart = distance(&got[at], &want[at]);
            assert!(apart <= bound, "{name}, run {run}: {what} differ by {apart}, more than {bound}");
        }
    }
}
