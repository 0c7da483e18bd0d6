//! SongUNet, its preconditioning, the loss and samplers: on shards against one rank, and against their definitions.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_array::{Array, Generator, Window};
use isobar_collectives::threads;
use isobar_mesh::DeviceMesh;
use isobar_models::{
    Activation, Architecture, Batch, BatchPart, DecoderType, DhariwalUNet, DhariwalUNetConfig, EdmLoss,
    EdmPrecond, EdmPrecondConfig, EdmPreconditioner, EdmPreconditionerConfig, EdmSampler, EdmSchedule,
    EmbeddingType, EncoderType, FieldSpec, LossReduction, Mode, ModelConfig, PerDim, Result, SamplerKind,
    SigmaData, SongNetwork, SongUNet, SongUNetConfig,
};
use isobar_shard::{
    Layout, MeshParams, ParamStore, Placement, ShardTensor, Sizes, forbid_hidden_communication,
};
use rstest::rstest;
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::common::perturb;
use crate::common::twin::{Axis, Twin, split, with_conditions};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);
const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn small(extents: [usize; 2]) -> SongUNetConfig {
    SongUNetConfig {
        model_channels: 4,
        channel_mult: vec![1, 2],
        channel_mult_emb: 1,
        num_blocks: 1,
        attn_resolutions: vec![extents[0] / 2],
        dropout: 0.0,
        ..SongUNetConfig::new(extents, 2, 1)
    }
}

fn random(seed: u64, shape: &[i64], options: (Kind, Device)) -> Tensor {
    Generator::new(seed).normal(&Window::whole(shape), 0.0, 1.0, options).unwrap()
}

fn twin(config: SongUNetConfig, labels: &[(&str, Vec<i64>)]) -> Twin {
    let PerDim::Each(extents) = &config.img_resolution else { panic!("extents are a list") };
    let shape = |channels: usize| vec![2, channels as i64, extents[0] as i64, extents[1] as i64];
    let inputs = [&[("fields", shape(config.in_channels))], labels].concat();
    let outputs = [("fields", shape(config.out_channels))];
    Twin::new(ModelConfig::new(config), &inputs, &outputs).perturbed(5)
}

/// DDPM++ with everything random, on fields that are not square.
fn random_labels() -> Twin {
    let config = SongUNetConfig {
        label_dim: 3,
        augment_dim: 2,
        label_dropout: 0.4,
        dropout: 0.2,
        checkpoint_level: 1,
        attn_resolutions: vec![12, 6],
        ..small([12, 8])
    };
    let labels = [("noise_labels", vec![2]), ("class_labels", vec![2, 3]), ("augment_labels", vec![2, 2])];
    twin(config, &labels)
}

/// NCSN++.
fn residual() -> Twin {
    let config = SongUNetConfig {
        embedding_type: EmbeddingType::Fourier,
        encoder_type: EncoderType::Residual,
        resample_filter: vec![1.0, 3.0, 3.0, 1.0],
        channel_mult: vec![1, 2, 2],
        bottleneck_attention: false,
        attn_resolutions: Vec::new(),
        ..small([8, 12])
    };
    twin(config, &[("noise_labels", vec![1])])
}

fn skips() -> Twin {
    let config = SongUNetConfig {
        encoder_type: EncoderType::Skip,
        decoder_type: DecoderType::Skip,
        additive_pos_embed: true,
        channel_mult_noise: 2,
        act: Activation::Gelu,
        ..small([8, 12])
    };
    twin(config, &[("noise_labels", vec![2])])
}

/// ADM, whose coarsest level has heads.
fn adm() -> Twin {
    let config = DhariwalUNetConfig {
        label_dim: 3,
        augment_dim: 2,
        label_dropout: 0.4,
        model_channels: 4,
        channel_mult: vec![1, 16],
        channel_mult_emb: 1,
        num_blocks: 1,
        attn_resolutions: vec![6],
        dropout: 0.2,
        checkpoint_level: 1,
        ..DhariwalUNetConfig::new([12, 8], 2, 1)
    };
    let fields = |channels: i64| ("fields", vec![2, channels, 12, 8]);
    let labels = [("noise_labels", vec![2]), ("class_labels", vec![2, 3]), ("augment_labels", vec![2, 2])];
    Twin::new(ModelConfig::new(config), &[&[fields(2)], &labels[..]].concat(), &[fields(1)]).perturbed(5)
}

/// Axes that split the samples with their labels, and their rows.
fn samples_and_rows() -> Vec<Axis> {
    let samples = ["fields", "noise_labels", "class_labels", "augment_labels", "conditions", "sigma"];
    vec![(2, samples.map(|name| (name, 0)).to_vec()), (2, vec![("fields", 2), ("conditions", 2)])]
}

#[rstest]
#[case(split(&[(2, 2)]))]
#[case(split(&[(3, 3)]))]
#[case(split(&[(4, 2)]))]
#[case(split(&[(2, 2), (2, 3)]))]
#[case(samples_and_rows())]
fn adm_is_that_of_one_rank(#[case] axes: Vec<Axis>) {
    adm().check(&axes);
}

/// PhysicsNeMo's first convolution gives the channels of the finest level, so that its first block changes none.
#[test]
fn adm_starts_with_the_channels_of_its_finest_level() {
    let config = DhariwalUNetConfig {
        model_channels: 32,
        channel_mult: vec![2, 4],
        num_blocks: 1,
        attn_resolutions: Vec::new(),
        ..DhariwalUNetConfig::new([16, 16], 3, 3)
    };
    let mut store = ParamStore::new(Generator::new(1));
    DhariwalUNet::new(&config, &mut store).unwrap();
    let shape = |name: &str| store.get(name).map(|parameter| parameter.shape.clone());
    assert_eq!(shape("enc.16x16_conv.weight"), Some(vec![64, 3, 3, 3]));
    assert_eq!(shape("enc.16x16_block0.skip.weight"), None);
    assert_eq!(shape("dec.16x16_block1.norm0.weight"), Some(vec![128]));
}

/// The default network is PhysicsNeMo's.
#[test]
fn a_denoiser_may_have_the_network_of_adm() {
    let config: EdmPrecondConfig =
        serde_json::from_value(json!({ "img_resolution": 8, "img_channels": 2, "model_channels": 64, "channel_mult": [1, 1], "num_blocks": 1 }))
            .unwrap();
    assert!(matches!(config.network, SongNetwork::Adm(_)));
    let mut store = ParamStore::new(Generator::new(1));
    EdmPrecond::new(&config, &mut store).unwrap();
    assert!(store.get("model.out_norm.weight").is_some());
    let table: serde_json::Value = serde_json::to_value(&config).unwrap();
    assert_eq!(serde_json::from_value::<EdmPrecondConfig>(table).unwrap(), config);
}

#[test]
fn attention_of_adm_needs_heads() {
    let config = DhariwalUNetConfig { model_channels: 48, ..DhariwalUNetConfig::new([16, 16], 1, 1) };
    let error = config.count(&Default::default).unwrap_err().to_string();
    assert!(error.contains("dhariwal_unet: attention of 48 channels has heads of 64"), "{error}");
}

fn regression() -> Twin {
    let config = SongUNetConfig { embedding_type: EmbeddingType::Zero, num_blocks: 2, ..small([12, 12]) };
    twin(config, &[])
}

#[rstest]
#[case(split(&[(2, 2)]))]
#[case(split(&[(3, 3)]))]
#[case(split(&[(4, 2)]))]
#[case(split(&[(2, 2), (2, 3)]))]
fn variants_are_the_same_on_shards(
    #[values(random_labels(), residual(), skips(), regression())] twin: Twin,
    #[case] axes: Vec<Axis>,
) {
    twin.check(&axes);
}

#[test]
fn labels_are_split_with_the_batch() {
    random_labels().check(&samples_and_rows());
}

/// A denoiser of one channel given fields of another one, with a network of its own or around one.
fn denoiser_twin(around: bool) -> Twin {
    let network = small([12, 8]);
    let config = match around {
        true => ModelConfig::new(EdmPreconditionerConfig::new(ModelConfig::new(network))),
        false => ModelConfig::new(EdmPrecondConfig::new(1, network)),
    };
    let shape = || vec![2, 1, 12, 8];
    let inputs = [("fields", shape()), ("conditions", shape()), ("sigma", vec![2])];
    let twin = Twin::new(config, &inputs, &[("fields", shape())]);
    twin.with_values("sigma", vec![0.4, 1.7], Kind::Double).perturbed(5)
}

#[rstest]
#[case(with_conditions(&[(2, 2)]))]
#[case(with_conditions(&[(3, 3)]))]
#[case(with_conditions(&[(4, 2)]))]
#[case(with_conditions(&[(2, 2), (2, 3)]))]
#[case(samples_and_rows())]
fn denoisers_are_the_same_on_shards(#[values(false, true)] around: bool, #[case] axes: Vec<Axis>) {
    denoiser_twin(around).check(&axes);
}

#[rstest]
fn variants_in_single_precision(
    #[values(random_labels(), residual(), skips(), regression(), adm())] twin: Twin,
) {
    twin.check_single(&split(&[(2, 2), (2, 3)]));
}

#[rstest]
fn denoisers_in_single_precision(#[values(false, true)] around: bool) {
    denoiser_twin(around).check_single(&with_conditions(&[(2, 2), (2, 3)]));
}

#[rstest]
#[case(split(&[(2, 2)]))]
#[case(split(&[(3, 3)]))]
#[case(split(&[(2, 3), (2, 2)]))]
fn empty_shards_work(#[values(random_labels(), residual())] twin: Twin, #[case] axes: Vec<Axis>) {
    twin.with_empty_shards().check(&axes);
}

#[test]
fn recomputed_blocks_give_the_same_gradients() {
    let run = |checkpoint_level: usize| {
        let config = SongUNetConfig { checkpoint_level, dropout: 0.3, ..small([8, 8]) };
        let mut store = ParamStore::new(Generator::new(1)).with_options(Kind::Double, Device::Cpu);
        let model = SongUNet::new(&config, &mut store).unwrap();
        perturb(&store, 3);
        let x = random(2, &[2, 2, 8, 8], DOUBLE);
        let noise = random(3, &[2], DOUBLE);
        let generator = Generator::new(4);
        let y = model.forward(&x, Some(&noise), None, None, Mode::train(&generator)).unwrap();
        y.square().sum(Kind::Double).backward();
        store.trainable().map(|p| p.tensor.grad()).chain([y.detach()]).collect::<Vec<_>>()
    };
    let want = run(0);
    for level in [1, 2, usize::MAX] {
        for (got, want) in run(level).iter().zip(&want) {
            assert!(
                got.allclose(want, 1e-12, 1e-12, false),
                "checkpoint_level {level}: {got:?}, not {want:?}"
            );
        }
    }
}

/// Group norms of evaluation divide by the unbiased variance: for n elements of a group all activations differ a little.
#[test]
fn training_and_evaluation_differ_by_the_variance() {
    let config = SongUNetConfig { channel_mult: vec![1], attn_resolutions: Vec::new(), ..small([2, 2]) };
    let mut store = ParamStore::new(Generator::new(1)).with_options(Kind::Double, Device::Cpu);
    let model = SongUNet::new(&config, &mut store).unwrap();
    perturb(&store, 3);
    let (x, noise, generator) =
        (random(2, &[1, 2, 2, 2], DOUBLE), random(3, &[1], DOUBLE), Generator::new(4));
    let run = |mode: Mode<'_>| model.forward(&x, Some(&noise), None, None, mode).unwrap();
    let difference = (run(Mode::Eval) - run(Mode::train(&generator))).abs().max().double_value(&[]);
    assert!((1e-4..1.0).contains(&difference), "{difference}");
}

#[rstest]
#[case(SongUNetConfig { channel_mult: Vec::new(), ..small([8, 8]) }, "channel_mult has 0 levels, expected 1 to 17")]
#[case(SongUNetConfig { channel_mult: vec![1; 18], ..small([8, 8]) }, "channel_mult has 18 levels, expected 1 to 17")]
#[case(small([8, 9]), "img_resolution is [8, 9], expected height and width, multiples of 2 for 2 levels")]
#[case(SongUNetConfig { img_resolution: PerDim::Each(vec![8]), ..small([8, 8]) }, "img_resolution is [8], expected")]
#[case(SongUNetConfig { model_channels: usize::MAX, ..small([8, 8]) }, "model_channels is")]
#[case(SongUNetConfig { channel_mult: vec![1, usize::MAX], ..small([8, 8]) }, "model_channels · channel_mult is")]
#[case(SongUNetConfig { model_channels: 33 * 4, ..small([8, 8]) }, "a group norm of 132 channels would have 32 groups")]
#[case(SongUNetConfig { channel_mult_noise: 0, ..small([8, 8]) }, "model_channels · channel_mult_noise is 0")]
#[case(SongUNetConfig { model_channels: 2, ..small([8, 8]) }, "expected an even number of at least 4")]
#[case(SongUNetConfig { dropout: 1.0, ..small([8, 8]) }, "dropout is 1")]
#[case(SongUNetConfig { label_dropout: -0.5, ..small([8, 8]) }, "label_dropout is -0.5")]
#[case(SongUNetConfig { resample_filter: vec![1.0, 2.0, 1.0], ..small([8, 8]) }, "expected an even number")]
#[case(SongUNetConfig { resample_filter: vec![1.0, -1.0], ..small([8, 8]) }, "whose sum is finite and not 0")]
#[case(SongUNetConfig { act: Activation::Prelu, ..small([8, 8]) }, "act is Prelu")]
fn song_unet_refuses(#[case] config: SongUNetConfig, #[case] reason: &str) {
    let error = SongUNet::new(&config, &mut ParamStore::new(Generator::new(1))).unwrap_err().to_string();
    assert!(error.starts_with("song_unet: ") && error.contains(reason), "{error}");
}

#[test]
fn song_unet_refuses_arrays_of_other_shapes() {
    let config = SongUNetConfig { label_dim: 3, augment_dim: 2, ..small([8, 8]) };
    let model = SongUNet::new(&config, &mut ParamStore::new(Generator::new(1))).unwrap();
    let zeros = |shape: &[i64]| Tensor::zeros(shape, FLOAT);
    let error = |x: &[i64], noise: Option<&[i64]>, class: Option<&[i64]>, augment: Option<&[i64]>| {
        let [noise, class, augment] = [noise, class, augment].map(|shape| shape.map(zeros));
        let y = model.forward(&zeros(x), noise.as_ref(), class.as_ref(), augment.as_ref(), Mode::Eval);
        y.map_err(|error| error.to_string()).err().unwrap_or_default()
    };
    let x = [2, 2, 8, 8];
    assert_eq!(error(&x, Some(&[2]), Some(&[2, 3]), Some(&[2, 2])), "");
    // Other extents than the configuration's, one label for all, no augmentation.
    assert_eq!(error(&[2, 2, 4, 6], Some(&[1]), Some(&[1, 3]), None), "");
    assert!(error(&[2, 2, 8, 9], Some(&[2]), Some(&[2, 3]), None).contains("with multiples of 2"));
    assert!(error(&[2, 3, 8, 8], Some(&[2]), Some(&[2, 3]), None).contains("[batch, 2, height, width]"));
    assert!(error(&x, None, Some(&[2, 3]), None).contains("noise_labels"));
    assert!(error(&x, Some(&[3]), Some(&[2, 3]), None).contains("[2] or [1] for noise_labels"));
    assert!(error(&x, Some(&[2]), None, None).contains("class_labels"));
    assert!(error(&x, Some(&[2]), Some(&[2, 4]), None).contains("[2, 3] or [1, 3] for class_labels"));
    assert!(error(&x, Some(&[2]), Some(&[2, 3]), Some(&[2, 3])).contains("for augment_labels"));
}

#[test]
fn song_unet_checks_the_data() {
    let fields = FieldSpec { extents: vec![8, 8], in_channels: 2, out_channels: 1, ..FieldSpec::default() };
    let zero = SongUNetConfig { embedding_type: EmbeddingType::Zero, ..small([8, 8]) };
    zero.check(&fields).unwrap();
    let square = SongUNetConfig { img_resolution: PerDim::All(8), ..zero.clone() };
    square.check(&fields).unwrap();
    let error = |config: &SongUNetConfig| config.check(&fields).unwrap_err().to_string();
    assert!(error(&small([8, 8])).contains("reads the array \"time\""));
    assert!(error(&SongUNetConfig { in_channels: 3, ..zero.clone() }).contains("--set model.in_channels=2"));
    assert!(
        error(&SongUNetConfig { img_resolution: PerDim::All(16), ..zero })
            .contains("--set 'model.img_resolution=[8, 8]'")
    );
    let timed = FieldSpec { arrays: vec!["time".into()], ..fields.clone() };
    small([8, 8]).check(&timed).unwrap();
    let denoiser = EdmPreconditionerConfig::new(ModelConfig::new(small([8, 8])));
    assert!(denoiser.check(&timed).unwrap_err().to_string().contains("reads the array \"sigma\""));
}

/// Fields as conditions are further channels of the network, whose keys are those of its own table.
#[test]
fn denoisers_check_their_conditions() {
    let arrays = ["sigma", "conditions"].map(str::to_owned).to_vec();
    let fields =
        FieldSpec { extents: vec![8, 8], in_channels: 1, out_channels: 1, arrays, ..FieldSpec::default() };
    let conditioned = FieldSpec { condition_channels: 1, ..fields.clone() };
    let around = EdmPreconditionerConfig::new(ModelConfig::new(small([8, 8])));
    around.check(&conditioned).unwrap();
    assert!(around.check(&fields).unwrap_err().to_string().contains("--set model.model.in_channels=1"));
    let beside = EdmPrecondConfig::new(1, small([8, 8]));
    beside.check(&conditioned).unwrap();
    assert!(beside.check(&fields).unwrap_err().to_string().contains("--set model.img_in_channels=1"));
    assert_eq!(around.denoises(), beside.denoises());
    assert_eq!(small([8, 8]).denoises(), None);
}

/// Both put the condition behind the scaled samples, and it is not scaled.
#[test]
fn both_denoisers_take_fields_as_conditions() {
    let network = SongUNetConfig { label_dim: 0, augment_dim: 0, ..small([8, 8]) };
    let config = EdmPreconditionerConfig::new(ModelConfig::new(network.clone()));
    let [mut first, mut second] = [4, 4].map(|seed| ParamStore::new(Generator::new(seed)));
    let around = EdmPreconditioner::new(&config, &mut first).unwrap();
    let beside = EdmPrecond::new(&EdmPrecondConfig::new(1, network), &mut second).unwrap();
    // A fresh network gives zeros.
    [&first, &second].into_iter().for_each(|store| perturb(store, 5));
    let x = |shift: f64| (Tensor::arange(128, (Kind::Float, Device::Cpu)) + shift).sin().view([2, 1, 8, 8]);
    let others = Batch::default().with("conditions", x(1.0));
    let sigma = Tensor::from_slice(&[0.7f32, 2.0]);
    let one = around.denoise(&x(0.0), &sigma, &others, Mode::Eval).unwrap();
    let other = beside.denoise(&x(0.0), &sigma, &others, Mode::Eval).unwrap();
    assert_eq!(one, other);
    let alone = Batch::default().with("conditions", x(2.0));
    assert_ne!(around.denoise(&x(0.0), &sigma, &alone, Mode::Eval).unwrap(), one);
}

/// Runs on a mesh and gives each rank's result.
fn on_mesh<R: Send + 'static>(
    mesh: &[i64],
    run: impl Fn(&DeviceMesh, &Layout) -> R + Send + Sync + Clone + 'static,
    shape: [i64; 4],
) -> Vec<R> {
    let mesh = mesh.to_vec();
    threads::run(mesh.iter().product::<i64>() as usize, Duration::from_secs(120), move |group| {
        let mesh = DeviceMesh::new(&group, &mesh, &["a", "b"][..mesh.len()]).unwrap();
        let placements = [Placement::Shard(2), Placement::Shard(3)];
        let layout = Layout::new(&mesh, &placements[..mesh.ndim()], &shape, &Sizes::Chunk).unwrap();
        run(&mesh, &layout)
    })
}

fn denoiser_config() -> EdmPreconditionerConfig {
    let network = SongUNetConfig { out_channels: 2, ..small([8, 8]) };
    EdmPreconditionerConfig::new(ModelConfig::new(network))
}

/// Heun's and Euler's method, without and with noise. A step's γ is S_churn / 4, at most √2 − 1 but for the legacy sampler.
fn sampler(sampler: SamplerKind, s_churn: f64) -> EdmSampler {
    EdmSampler { sampler, s_churn, num_steps: 4, ..EdmSampler::default() }
}

/// A sample, and all numbers drawn on the way.
fn sample<A: Array>(sampler: &EdmSampler, like: &A, denoise: impl Fn(&A, f64) -> Result<A>) -> (A, Vec<A>) {
    let (generator, again) = (Generator::new(9), Generator::new(9));
    let sample = sampler.sample(like, &generator, None, denoise).unwrap();
    let whole = Window::whole(&like.shape());
    let draws = (0..5).map(|_| like.normal_like(&again, &whole).unwrap()).collect();
    assert_eq!(generator.draws(), again.draws());
    (sample, draws)
}

/// Samples of a small network.
fn sample_of_network<A: Array>(
    sampler: &EdmSampler,
    denoiser: &EdmPreconditioner<A>,
    like: &A,
) -> (A, Vec<A>) {
    sample(sampler, like, |x, sigma| {
        let sigma = x.constant(&Tensor::from_slice(&[sigma as f32]))?;
        denoiser.denoise(x, &sigma, &Batch::default(), Mode::Eval)
    })
}

fn gathered((sample, draws): (ShardTensor, Vec<ShardTensor>)) -> (Tensor, Vec<Tensor>) {
    let whole = |array: &ShardTensor| array.full_tensor(None).unwrap();
    (whole(&sample), draws.iter().map(whole).collect())
}

#[rstest]
fn a_sample_does_not_depend_on_the_number_of_ranks(
    #[values(vec![1], vec![2], vec![3], vec![4], vec![2, 2])] mesh: Vec<i64>,
    #[values(
        sampler(SamplerKind::EdmStochasticHeun, 1.0),
        sampler(SamplerKind::EdmStochasticEuler, 0.0),
        sampler(SamplerKind::EdmStochasticEuler, 1.0)
    )]
    sampler: EdmSampler,
) {
    let shape = [2, 2, 8, 8];
    let mut store = ParamStore::new(Generator::new(1));
    let denoiser = EdmPreconditioner::new(&denoiser_config(), &mut store).unwrap();
    perturb(&store, 3);
    let (want, draws) = sample_of_network(&sampler, &denoiser, &Tensor::zeros(shape, FLOAT));
    let scale = want.abs().max().double_value(&[]);
    assert!(scale > 0.1 && scale < 100.0, "{scale}");
    let results = on_mesh(
        &mesh,
        move |mesh, layout| {
            let mut store = ParamStore::new(Generator::new(1));
            let mut params = MeshParams::new(&mut store, mesh);
            let denoiser = EdmPreconditioner::new(&denoiser_config(), &mut params).unwrap();
            perturb(&store, 3);
            let _guard = forbid_hidden_communication();
            let like = ShardTensor::zeros(layout, Kind::Float, Device::Cpu).unwrap();
            gathered(sample_of_network(&sampler, &denoiser, &like))
        },
        shape,
    );
    for (got, drawn) in results {
        assert_eq!(drawn, draws);
        let error = (got - &want).abs().max().double_value(&[]);
        assert!(error <= 1e-5 * scale.max(1.0), "{mesh:?} differs by {error} of {scale}");
    }
}

/// The denoiser of normal data of mean 3 and deviation 0.5.
fn denoise_each_point<A: Array>(x: &A, sigma: f64) -> Result<A> {
    let (mean, variance, noise) = (3.0, 0.25, sigma * sigma);
    Ok(x.mul_scalar(variance)?.add_scalar(noise * mean)?.mul_scalar((variance + noise).recip())?)
}

/// Each rank computes its points as one rank computes them, and nothing else.
#[rstest]
fn a_sample_without_reductions_is_bitwise_the_same_on_all_meshes(
    #[values(vec![1], vec![2], vec![3], vec![4], vec![2, 2])] mesh: Vec<i64>,
    #[values(SamplerKind::Legacy, SamplerKind::EdmStochasticHeun, SamplerKind::EdmStochasticEuler)]
    kind: SamplerKind,
    #[values(0.0, 1.0, 4.0)] s_churn: f64,
) {
    let (shape, sampler) = ([2, 2, 7, 9], sampler(kind, s_churn));
    let want = sample(&sampler, &Tensor::zeros(shape, DOUBLE), denoise_each_point);
    let run = move |_: &DeviceMesh, layout: &Layout| {
        let like = ShardTensor::zeros(layout, Kind::Double, Device::Cpu).unwrap();
        gathered(sample(&sampler, &like, denoise_each_point))
    };
    for got in on_mesh(&mesh, run, shape) {
        assert_eq!(got, want);
    }
}

#[test]
fn the_loss_draws_the_numbers_of_the_global_batch() {
    let shape = [4, 2, 8, 8];
    let y = random(1, &shape, DOUBLE);
    let loss = EdmLoss { sigma_data: SigmaData::Each(vec![0.5, 0.7]), ..EdmLoss::default() };
    let half = |x: &Tensor| Ok::<_, isobar_models::Error>(x.f_mul_scalar(0.5).unwrap());
    let draw = |y: &Tensor, part| {
        let loss = loss.draw(y, &Generator::new(2), part, |x, _| half(x)).unwrap();
        loss.double_value(&[])
    };
    let want = draw(&y, None);
    let part = |offset| draw(&y.narrow(0, offset, 2), Some(BatchPart { offset, total: 4 }));
    assert!((0.5 * (part(0) + part(2)) - want).abs() < 1e-12 * want);
    for mesh in [vec![3], vec![2, 2]] {
        let loss = loss.clone();
        let run = move |_: &DeviceMesh, layout: &Layout| {
            let y = ShardTensor::distribute_as(&random(1, &shape, DOUBLE), layout).unwrap();
            let half = |x: &ShardTensor, _: &ShardTensor| Ok(isobar_array::Elementwise::mul_scalar(x, 0.5)?);
            let loss = loss.draw(&y, &Generator::new(2), None, half).unwrap();
            loss.full_tensor(None).unwrap().double_value(&[])
        };
        for got in on_mesh(&mesh, run, shape) {
            assert!((got - want).abs() < 1e-12 * want, "{mesh:?}: {got}, dense {want}");
        }
    }
}

/// With the definition written out for one sample.
#[rstest]
#[case(LossReduction::Mean)]
#[case(LossReduction::Sum)]
#[case(LossReduction::None)]
fn the_loss_is_what_it_says(#[case] reduction: LossReduction) {
    let (y, noise) = (random(1, &[1, 1, 2, 3], DOUBLE), random(2, &[1, 1, 2, 3], DOUBLE));
    let (sigma, s) = (0.8, 0.5);
    let loss = EdmLoss { reduction, sigma_data: SigmaData::All(s), ..EdmLoss::default() };
    let got = loss
        .given(&y, &noise, &Tensor::from_slice(&[sigma]), |x, level| {
            assert_eq!(level.double_value(&[0]), sigma);
            assert!((x - (&y + &noise * sigma)).abs().max().double_value(&[]) < 1e-15);
            Ok(x.f_mul_scalar(0.3).unwrap())
        })
        .unwrap();
    let weight = (sigma * sigma + s * s) / (sigma * s).powi(2);
    let each = ((&y + &noise * sigma) * 0.3 - &y).square() * weight;
    let want = match reduction {
        LossReduction::Mean => each.mean(Kind::Double),
        LossReduction::Sum => each.sum(Kind::Double),
        LossReduction::None => each,
    };
    assert!(got.allclose(&want, 1e-12, 1e-12, false) && got.size() == want.size());
}

#[test]
fn the_older_denoiser_concatenates_its_condition() {
    let table = json!({
        "img_resolution": 8, "img_channels": 1, "img_in_channels": 3, "label_dim": 2, "model_type": "SongUNet",
        "sigma_data": 0.4, "model_channels": 4, "channel_mult": [1, 2], "channel_mult_emb": 1, "num_blocks": 1,
        "attn_resolutions": [4], "dropout": 0.0,
    });
    let config: EdmPrecondConfig = serde_json::from_value(table).unwrap();
    let again: EdmPrecondConfig = serde_json::from_value(serde_json::to_value(&config).unwrap()).unwrap();
    assert_eq!(config, again);
    let mut store = ParamStore::new(Generator::new(1)).with_options(Kind::Double, Device::Cpu);
    let model = EdmPrecond::new(&config, &mut store).unwrap();
    perturb(&store, 3);
    let mut plain = ParamStore::new(Generator::new(1)).with_options(Kind::Double, Device::Cpu);
    let network = SongUNet::new(&config.network.unet(), &mut plain).unwrap();
    for parameter in plain.parameters() {
        let name = format!("model.{}", parameter.name);
        let from = store.parameters().iter().find(|p| p.name == name).unwrap().tensor.detach();
        parameter.tensor.detach().copy_(&from);
    }
    let (x, condition) = (random(1, &[2, 1, 8, 8], DOUBLE), random(2, &[2, 2, 8, 8], DOUBLE));
    let sigma = Tensor::from_slice(&[0.3, 5.0]);
    let others = Batch::default().with("conditions", condition.shallow_clone());
    let got = model.denoise(&x, &sigma, &others, Mode::Eval).unwrap();
    let level = sigma.reshape([2, 1, 1, 1]);
    let total = level.square() + 0.16;
    let input = Tensor::cat(&[&x / total.sqrt(), condition], 1);
    let (noise, class) = (sigma.log() / 4.0, Tensor::zeros([1, 2], DOUBLE));
    let y = network.forward(&input, Some(&noise), Some(&class), None, Mode::Eval).unwrap();
    let want = &x * (total.reciprocal() * 0.16) + y * (&level * 0.4 / total.sqrt());
    assert!((got - want).abs().max().double_value(&[]) < 1e-12);
    let error = model.denoise(&x, &sigma, &Batch::default(), Mode::Eval).unwrap_err().to_string();
    assert!(error.contains("no array \"conditions\""), "{error}");
}

/// `img_channels` is the default of both other numbers.
#[test]
fn the_older_denoiser_takes_samples_of_the_outputs_channels() {
    let config: EdmPrecondConfig = serde_json::from_value(json!({
        "img_resolution": 8, "img_channels": 4, "img_out_channels": 2, "model_type": "SongUNet"
    }))
    .unwrap();
    assert_eq!(
        (config.img_channels, config.network.unet().in_channels, config.network.unet().out_channels),
        (2, 4, 2)
    );
    let again = serde_json::to_value(&config).unwrap();
    assert_eq!(serde_json::from_value::<EdmPrecondConfig>(again).unwrap(), config);
}

#[rstest]
#[case(json!({ "model_type": "UNet" }), "unknown variant `UNet`, expected one of `SongUNet`, `SongUNetPosEmbd`, `SongUNetPosLtEmbd`, `DhariwalUNet`")]
#[case(json!({ "model_type": null }), "expected string")]
#[case(json!({ "use_fp16": true }), "use_fp16 is not supported")]
#[case(json!({ "in_channels": 2 }), "unknown field `in_channels`")]
#[case(json!({ "width": 2 }), "unknown field `width`")]
fn the_older_denoiser_refuses(#[case] keys: serde_json::Value, #[case] reason: &str) {
    let mut table = json!({ "img_resolution": 8, "img_channels": 1, "model_type": "SongUNet" });
    table.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    let error = serde_json::from_value::<EdmPrecondConfig>(table).unwrap_err().to_string();
    assert!(error.contains(reason), "{error}");
}

#[rstest]
#[case(json!(0.0))]
#[case(json!([0.5, -1.0]))]
#[case(json!([]))]
fn denoisers_refuse_a_sigma_data_that_no_data_has(#[case] sigma_data: serde_json::Value) {
    let table = json!({ "sigma_data": sigma_data, "model": { "type": "fully_connected" } });
    let config: EdmPreconditionerConfig = serde_json::from_value(table).unwrap();
    let error = EdmPreconditioner::new(&config, &mut ParamStore::new(Generator::new(1))).unwrap_err();
    assert!(error.to_string().contains("expected one or more finite numbers above 0"), "{error}");
}

#[rstest]
#[case(EdmSampler { num_steps: 0, ..EdmSampler::default() }, "num_steps is 0")]
#[case(EdmSampler { num_steps: usize::MAX, ..EdmSampler::default() }, "num_steps is")]
#[case(EdmSampler { sigma_min: 0.0, ..EdmSampler::default() }, "sigma_min is 0")]
#[case(EdmSampler { sigma_max: f64::NAN, ..EdmSampler::default() }, "sigma_max NaN")]
#[case(EdmSampler { rho: 0.0, ..EdmSampler::default() }, "rho is 0")]
#[case(EdmSampler { alpha: 0.0, ..EdmSampler::default() }, "alpha is 0")]
#[case(EdmSampler { s_churn: -1.0, ..EdmSampler::default() }, "S_churn is -1")]
fn samplers_refuse(#[case] sampler: EdmSampler, #[case] reason: &str) {
    let like = Tensor::zeros([1, 1], DOUBLE);
    let error = sampler.sample(&like, &Generator::new(1), None, |x, _| Ok(x.shallow_clone())).unwrap_err();
    assert!(error.to_string().contains(reason), "{error}");
}

/// Of normal data, whose denoiser is known, a sample without churn is a multiple of its latents around the mean; with churn it has the
/// data's mean and deviation. Euler's method is of first order.
#[rstest]
#[case(SamplerKind::Legacy, 1.0, 1e-2)]
#[case(SamplerKind::EdmStochasticHeun, 0.5, 1e-2)]
#[case(SamplerKind::EdmStochasticEuler, 1.0, 1e-1)]
fn samplers_give_the_distribution(#[case] sampler: SamplerKind, #[case] alpha: f64, #[case] tolerance: f64) {
    let sampler = EdmSampler { sampler, alpha, num_steps: 60, ..EdmSampler::default() };
    let (mean, s) = (3.0, 0.5);
    let like = Tensor::zeros([4, 1, 32, 32], DOUBLE);
    let denoise = |x: &Tensor, sigma: f64| Ok((x * (s * s) + sigma * sigma * mean) / (s * s + sigma * sigma));
    let sample = sampler.sample(&like, &Generator::new(7), None, denoise).unwrap();
    let top = sampler.sigma_max;
    let noisy = random(7, &[4, 1, 32, 32], DOUBLE) * top;
    let want = (noisy - mean) * (s / (s * s + top * top).sqrt()) + mean;
    let error = (sample - want).abs().max().double_value(&[]);
    assert!(error < tolerance, "{error}");
    let churned = EdmSampler { s_churn: 20.0, s_noise: 1.003, ..sampler };
    let sample = churned.sample(&like, &Generator::new(7), None, denoise).unwrap();
    let (got, deviation) = (sample.mean(Kind::Double).double_value(&[]), sample.std(true).double_value(&[]));
    let tolerance = tolerance.max(0.05);
    assert!((got - mean).abs() < tolerance && (deviation - s).abs() < tolerance, "{got} ± {deviation}");
    assert!(!sample.requires_grad());
}

#[test]
fn one_step_is_a_schedule() {
    let schedule = EdmSchedule { num_steps: 1, sigma_min: 0.1, sigma_max: 5.0, rho: 7.0 };
    let sigmas = schedule.sigmas().unwrap();
    assert!((sigmas[0] - 5.0).abs() < 1e-12 && sigmas[1..] == [0.0]);
}
