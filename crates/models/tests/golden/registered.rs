//! Golden cases of models by their names in the registry: the values of the published code in double precision.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_array::Generator;
use isobar_models::{Batch, Mode};
use isobar_shard::ParamStore;
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use super::cases::Golden;

/// Outputs and all gradients of the registered model that a case names, its state dict in the source's words.
#[rstest]
fn registered(
    #[values(
        "dit_legacy_condition",
        "edm_precond_positions",
        "edm_precond_super_resolution_lead_time",
        "edm_precond_super_resolution_plain",
        "edm_precond_super_resolution_positions",
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
        "transolver_plus_grid"
    )]
    name: &str,
) {
    let golden = Golden::own(name);
    let mut store = ParamStore::new(Generator::new(1)).with_options(Kind::Double, Device::Cpu);
    let (config, mut outputs) = (golden.model(), Vec::new());
    let model = config.build::<Tensor>(&mut store).unwrap();
    let mut names: Vec<&str> = store.parameters().iter().map(|parameter| parameter.name.as_str()).collect();
    let mut wanted: Vec<&str> = golden.params.iter().map(String::as_str).collect();
    names.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(names, wanted);
    store.load(&golden.state_dict()).unwrap();
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
    loss.backward();
    for (name, input) in inputs.iter().filter(|(_, input)| input.requires_grad()) {
        golden.check(&format!("grad.{name}"), &input.grad());
    }
    for parameter in store.trainable().filter(|parameter| golden.has(&format!("grad.{}", parameter.name))) {
        golden.check(&format!("grad.{}", parameter.name), &parameter.tensor.grad());
    }
}
