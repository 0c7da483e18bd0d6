//! Golden cases of models by their names in the registry: the values of the published code in double precision.

use isobar_array::Generator;
use isobar_models::{Batch, Mode};
use isobar_shard::{ComputedBuffer, ParamStore};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use super::cases::Golden;

/// Values that a case of large weights need not store: sines, of a phase for each number.
fn wave(shape: &[i64], number: usize) -> Tensor {
    let count = shape.iter().product::<i64>();
    let at = Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.37 + number as f64;
    at.sin().reshape(shape) * 0.1
}

/// Fills all trained parameters, in the order of their names; weights of norms with values around 1. Buffers are those of the case.
fn waves(store: &ParamStore, golden: &Golden) {
    for buffer in store.parameters().iter().filter(|parameter| !parameter.trainable) {
        buffer.tensor.detach().copy_(&golden.tensor(&buffer.name));
    }
    let mut parameters: Vec<_> = store.trainable().collect();
    parameters.sort_by(|a, b| a.name.cmp(&b.name));
    for (number, parameter) in parameters.into_iter().enumerate() {
        let of_norm = parameter.shape.len() == 1 && parameter.name.ends_with(".weight");
        let values = wave(&parameter.shape, number) + f64::from(u8::from(of_norm));
        parameter.tensor.detach().copy_(&values);
    }
}

/// Outputs and all gradients of the registered model that a case names, its state dict in the source's words.
#[rstest]
fn registered(
    #[values(
        "dhariwal_unet",
        "dit_legacy_condition",
        "dit_mask_tokens",
        "edm_precond_positions",
        "edm_precond_super_resolution_lead_time",
        "edm_precond_super_resolution_plain",
        "edm_precond_super_resolution_positions",
        "edm_preconditioner_dhariwal_unet",
        "geo_transolver_concrete",
        "geo_transolver_concrete_train",
        "geo_transolver_concrete_train_fa",
        "geo_transolver_plus",
        "geo_transolver_streams",
        "song_unet_pos_embd_bands",
        "song_unet_pos_embd_learnable",
        "song_unet_pos_embd_learnable_patches",
        "song_unet_pos_embd_linear",
        "song_unet_pos_embd_octave",
        "song_unet_pos_embd_patches",
        "song_unet_pos_embd_sinusoidal",
        "song_unet_pos_embd_test",
        "song_unet_pos_lt_embd_alone",
        "song_unet_pos_lt_embd_eval",
        "song_unet_pos_lt_embd_patches",
        "song_unet_pos_lt_embd_train",
        "transolver_plus",
        "transolver_plus_grid",
        "transolver_unified"
    )]
    name: &str,
) {
    let golden = Golden::own(name);
    let mut store = ParamStore::new(Generator::new(1)).with_options(Kind::Double, Device::Cpu);
    let (config, mut outputs) = (golden.model(), Vec::new());
    let model = config.build::<Tensor>(&mut store).unwrap();
    let mut names: Vec<&str> = store.parameters().iter().map(|parameter| parameter.name.as_str()).collect();
    let mut wanted: Vec<&str> = golden.params.iter().map(String::as_str).collect();
    names.extend(store.computed_buffers().iter().map(ComputedBuffer::name));
    names.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(names, wanted);
    match golden.waves {
        true => waves(&store, &golden),
        false => store.load(&golden.state_dict()).unwrap(),
    }
    let inputs: Vec<(&str, Tensor)> = golden
        .inputs
        .iter()
        .map(|name| {
            let trained = golden.has(&format!("grad.{name}"));
            (name.as_str(), golden.tensor(name).set_requires_grad(trained))
        })
        .collect();
    let signature = config.signature();
    let batch = inputs
        .iter()
        .fold(Batch::default(), |batch, (name, x)| batch.with(signature.array(name), x.shallow_clone()));
    let generator = Generator::new(2);
    let mode = if golden.training { Mode::train(&generator) } else { Mode::Eval };
    let mut results = model.forward(&batch, mode).unwrap();
    match golden.has("output") {
        true => outputs.push(("output".to_owned(), results.take("fields").unwrap())),
        false => {
            let each =
                (0..).map_while(|i| Some((format!("output.{i}"), results.take(&format!("fields.{i}"))?)));
            outputs.extend(each);
        }
    }
    let mut loss = Tensor::from(0.0f64);
    for (name, output) in outputs {
        golden.check(&name, &output);
        loss += (output * golden.tensor(&format!("grad.{name}"))).sum(Kind::Double);
    }
    if let Some(term) = model.regularization().unwrap() {
        golden.check("regularization", &term);
        loss += term;
    }
    loss.backward();
    for (name, input) in inputs.iter().filter(|(_, input)| input.requires_grad()) {
        golden.check(&format!("grad.{name}"), &input.grad());
    }
    for parameter in store.trainable().filter(|parameter| golden.has(&format!("grad.{}", parameter.name))) {
        let grad = parameter.tensor.grad();
        let grad = if golden.waves { (&grad * wave(&parameter.shape, 0)).sum(Kind::Double) } else { grad };
        golden.check(&format!("grad.{}", parameter.name), &grad);
    }
}
