//! Convolutional models over sharded fields against themselves on one rank: outputs, gradients, and 20 steps
//! of training in double precision, the losses of these in single precision as far as rounding lets them.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_array::{Generator, Window};
use isobar_harness::{Memo, curve::SingleRun};
use isobar_mesh::DeviceMesh;
use isobar_models::{
    Activation, Batch, CNextUNetConfig, Mode, ModelArray, ModelConfig, Normalization, NormalizationArgs,
    PaddingMode, PerDim, Pix2PixConfig, Pix2PixPadding, Pooling, Result, SrResNetConfig, UNetConfig,
    Upsampling,
};
use isobar_shard::{
    Layout, MeshParams, ParamStore, Params, Placement, ShardTensor, Sizes, forbid_hidden_communication,
};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use crate::common::nudge;

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);
const STEPS: usize = 20;

/// Ranks of each axis of a mesh, and the dim that it splits.
type Axes = &'static [(i64, usize)];

/// A model of any type.
struct Model<A>(Box<dyn isobar_models::Model<A>>);

impl<A: ModelArray> Model<A> {
    fn new(config: &ModelConfig, params: &mut impl Params<Array = A>) -> Self {
        Self(config.build(params).unwrap())
    }

    fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let mut outputs = self.0.forward(&Batch::of_fields(x.shallow_clone()), mode)?;
        Ok(outputs.take(Batch::<A>::FIELDS).unwrap())
    }
}

/// A model, the kind that it computes in, and the extents of its fields and targets.
#[derive(Debug, Clone)]
struct Case {
    config: ModelConfig,
    kind: Kind,
    input: Vec<i64>,
    target: Vec<i64>,
}

impl Case {
    fn unet(config: UNetConfig, extents: &[i64]) -> Self {
        let shape = |channels: usize| [&[2, channels as i64], extents].concat();
        Self {
            input: shape(config.in_channels),
            target: shape(config.out_channels),
            config: ModelConfig::new(config),
            kind: Kind::Double,
        }
    }

    fn single(self) -> Self {
        Self { kind: Kind::Float, ..self }
    }

    fn fields(&self) -> [Tensor; 2] {
        let random = |seed, shape: &[i64]| {
            let whole = Generator::new(seed).normal(&Window::whole(shape), 0.0, 1.0, DOUBLE);
            whole.unwrap().to_kind(self.kind)
        };
        [random(1, &self.input), random(2, &self.target)]
    }

    fn store(&self) -> ParamStore {
        ParamStore::new(Generator::new(7)).with_options(self.kind, Device::Cpu)
    }
}

fn volumes() -> UNetConfig {
    UNetConfig { model_depth: 3, feature_map_channels: vec![3, 4, 4, 5, 6, 6], ..UNetConfig::new(2, 3) }
}

fn images() -> UNetConfig {
    UNetConfig { dimension: 2, ..volumes() }
}

fn super_resolution(scaling_factor: usize) -> Case {
    let config = SrResNetConfig {
        large_kernel_size: 5,
        conv_layer_size: 3,
        n_resid_blocks: 2,
        scaling_factor,
        ..SrResNetConfig::new(2, 1)
    };
    Case {
        config: ModelConfig::new(config),
        kind: Kind::Double,
        input: vec![2, 2, 5, 4, 3],
        target: [&[2, 1], &[5, 4, 3].map(|extent| extent * scaling_factor as i64)[..]].concat(),
    }
}

fn pix2pix(config: Pix2PixConfig, extents: &[i64]) -> Case {
    let finer = 1 << config.n_upsampling.saturating_sub(config.n_downsampling);
    let fine: Vec<i64> = extents.iter().map(|extent| extent * finer).collect();
    Case {
        input: [&[2, config.in_channels as i64], extents].concat(),
        target: [&[2, config.out_channels as i64], &fine[..]].concat(),
        config: ModelConfig::new(config),
        kind: Kind::Double,
    }
}

fn translation(dimension: usize) -> Pix2PixConfig {
    Pix2PixConfig {
        conv_layer_size: 3,
        n_downsampling: 1,
        n_upsampling: 1,
        n_blocks: 2,
        ..Pix2PixConfig::new(2, 1, dimension)
    }
}

/// Runs on one rank.
static DENSE: Memo<Run> = Memo::new();

/// Results of a run.
struct Run {
    output: Tensor,
    /// Gradients of the first step, by name.
    grads: Vec<(String, Tensor)>,
    losses: Vec<f64>,
    /// Parameters and buffers in the end.
    state: Vec<(String, Tensor)>,
}

/// Trains by plain gradient descent. `pass` gives output and loss.
fn train(store: &ParamStore, mut pass: impl FnMut() -> (Tensor, f64)) -> Run {
    let (mut first, mut losses) = (None, Vec::new());
    for _ in 0..STEPS {
        let (output, loss) = pass();
        losses.push(loss);
        let grads = || store.trainable().map(|p| (p.name.clone(), p.tensor.grad().copy())).collect();
        first.get_or_insert_with(|| (output, grads()));
        tch::no_grad(|| {
            for parameter in store.trainable() {
                let step = parameter.tensor.grad() * 0.02;
                let _ = parameter.tensor.shallow_clone().f_sub_(&step).unwrap();
            }
        });
        store.zero_grad().unwrap();
    }
    let (output, grads) = first.unwrap();
    let state = store.parameters().iter().map(|p| (p.name.clone(), p.tensor.detach().copy())).collect();
    Run { output, grads, losses, state }
}

/// Gives `read` the run on one rank, from parameters that are nudged where there is a seed.
fn dense<R>(case: &Case, seed: Option<u64>, read: impl FnOnce(&Run) -> R) -> R {
    DENSE.with(format!("{case:?} {seed:?}"), || run_dense(case, seed), read)
}

fn run_dense(case: &Case, seed: Option<u64>) -> Run {
    let [x, target] = case.fields();
    let mut params = case.store();
    let model = Model::new(&case.config, &mut params);
    seed.iter().for_each(|seed| nudge(&params, *seed));
    let generator = Generator::new(3);
    train(&params, || {
        let y = model.forward(&x, Mode::train(&generator)).unwrap();
        let loss = y.mse_loss(&target, tch::Reduction::Mean);
        loss.backward();
        (y.detach(), loss.double_value(&[]))
    })
}

fn sharded(case: &Case, mesh: &DeviceMesh, axes: Axes) -> Run {
    let [x, target] = case.fields();
    let [x, target] =
        [x, target].map(|whole| ShardTensor::distribute_as(&whole, &uneven(mesh, axes, &whole)).unwrap());
    let mut params = case.store();
    let model = Model::new(&case.config, &mut MeshParams::new(&mut params, mesh));
    let generator = Generator::new(3);
    train(&params, || {
        let _guard = forbid_hidden_communication();
        let y = model.forward(&x, Mode::train(&generator)).unwrap();
        let loss = isobar_array::Reduce::mse_loss(&y, &target).unwrap();
        loss.backward().unwrap();
        (y.full_tensor(None).unwrap().detach(), loss.full_tensor(None).unwrap().double_value(&[]))
    })
}

/// Each axis of the mesh splits one dim, into parts that grow by the rank.
fn uneven(mesh: &DeviceMesh, axes: Axes, whole: &Tensor) -> Layout {
    let shape = whole.size();
    let sizes = axes.iter().map(|&(ranks, dim)| {
        let weights = ranks * (ranks + 1) / 2;
        let boundary = |rank: i64| shape[dim] * (rank * (rank + 1) / 2) / weights;
        (dim, (0..ranks).map(|rank| boundary(rank + 1) - boundary(rank)).collect())
    });
    let placements: Vec<Placement> = axes.iter().map(|&(_, dim)| Placement::Shard(dim)).collect();
    Layout::new(mesh, &placements, &shape, &Sizes::Explicit(sizes.collect())).unwrap()
}

fn assert_close(what: &str, got: &Tensor, want: &Tensor, tolerance: f64) {
    assert_eq!(got.size(), want.size(), "{what}");
    let scale = want.abs().max().double_value(&[]).max(1.0);
    let error = (got - want).abs().max().double_value(&[]);
    assert!(error <= tolerance * scale, "{what} differs by {error}");
}

/// Runs on every rank of a mesh.
fn runs(case: &Case, axes: Axes) -> Vec<Run> {
    let shape: Vec<i64> = axes.iter().map(|(ranks, _)| *ranks).collect();
    let count = shape.iter().product::<i64>() as usize;
    let of_case = case.clone();
    isobar_collectives::threads::run(count, Duration::from_secs(120), move |group| {
        let mesh = DeviceMesh::new(&group, &shape, &["a", "b"][..shape.len()]).unwrap();
        sharded(&of_case, &mesh, axes)
    })
}

fn assert_learns(run: &Run) {
    assert!(run.losses[STEPS - 1] < run.losses[0], "{:?}", run.losses);
}

fn assert_losses(got: &Run, want: &Run, tolerance: f64) {
    for (step, (got, want)) in got.losses.iter().zip(&want.losses).enumerate() {
        assert!((got - want).abs() <= tolerance * want.abs(), "step {step}: {got}, dense {want}");
    }
}

fn check(case: &Case, axes: Axes) {
    let runs = runs(case, axes);
    dense(case, None, |want| {
        assert_learns(want);
        for run in runs {
            assert_close("output", &run.output, &want.output, 1e-11);
            for ((name, got), (_, want)) in run.grads.iter().zip(&want.grads) {
                assert_close(&format!("grad.{name}"), got, want, 1e-10);
            }
            assert_losses(&run, want, 1e-10);
            for ((name, got), (_, want)) in run.state.iter().zip(&want.state) {
                assert_close(name, got, want, 1e-9);
            }
        }
    });
}

#[rstest]
#[case::group_norm(volumes())]
#[case::gates_layer_norm_circular(UNetConfig {
    model_depth: 2,
    feature_map_channels: vec![3, 4],
    num_conv_blocks: 1,
    conv_activation: Activation::Silu,
    conv_transpose_activation: Activation::Tanh,
    pooling_type: Pooling::Avg,
    padding_mode: PaddingMode::Circular,
    normalization: Normalization::LayerNorm,
    use_attn_gate: true,
    attn_intermediate_channels: Some(2),
    ..volumes()
})]
#[case::flat_kernels_plain_groups_reflect(UNetConfig {
    model_depth: 2,
    feature_map_channels: vec![4, 4, 6, 6],
    kernel_size: PerDim::Each(vec![3, 1, 5]),
    padding: PerDim::Each(vec![1, 0, 2]),
    padding_mode: PaddingMode::Reflect,
    conv_activation: Activation::Mish,
    conv_transpose_activation: Activation::Hardswish,
    normalization_args: Some(NormalizationArgs { num_groups: 2, affine: false, ..Default::default() }),
    ..volumes()
})]
fn unet_of_volumes(
    #[case] config: UNetConfig,
    #[values(&[(2, 2)], &[(3, 2)], &[(4, 2)], &[(2, 3)], &[(2, 2), (2, 3)], &[(2, 0), (2, 4)])] axes: Axes,
) {
    check(&Case::unet(config, &[16, 12, 8]), axes);
}

#[rstest]
#[case::transposed_groups(UNetConfig {
    feature_map_channels: vec![4, 4, 6, 6, 8, 8],
    normalization_args: Some(NormalizationArgs { num_groups: 2, eps: 1e-3, ..Default::default() }),
    ..images()
})]
#[case::nearest_batch_norm_circular(UNetConfig {
    upsampling: Upsampling::Nearest,
    normalization: Normalization::BatchNorm,
    padding_mode: PaddingMode::Circular,
    ..images()
})]
#[case::linear_no_norm_reflect(UNetConfig {
    model_depth: 2,
    feature_map_channels: vec![3, 4, 5, 5],
    pool_size: 3,
    upsampling: Upsampling::Linear,
    normalization: Normalization::None,
    padding_mode: PaddingMode::Reflect,
    ..images()
})]
#[case::wide_kernel_replicate(UNetConfig {
    model_depth: 2,
    feature_map_channels: vec![3, 4, 5, 5],
    kernel_size: PerDim::All(5),
    padding: PerDim::All(2),
    padding_mode: PaddingMode::Replicate,
    ..images()
})]
#[case::gates_of_two_convolutions(UNetConfig {
    use_attn_gate: true,
    attn_intermediate_channels: Some(3),
    ..images()
})]
fn unet_of_images(
    #[case] config: UNetConfig,
    #[values(&[(2, 2)], &[(3, 3)], &[(4, 2)], &[(2, 2), (2, 3)])] axes: Axes,
) {
    check(&Case::unet(config, &[24, 12]), axes);
}

#[rstest]
fn sr_res_net(#[values(&[(2, 2)], &[(3, 2)], &[(4, 3)], &[(2, 2), (2, 3)], &[(2, 0), (2, 2)])] axes: Axes) {
    check(&super_resolution(4), axes);
}

#[rstest]
#[case::lines(&[20], false)]
#[case::images(&[16, 12], false)]
#[case::recomputed_volumes(&[8, 12, 4], true)]
fn cnext_unet_is_the_same_on_shards(
    #[case] extents: &[usize],
    #[case] gradient_checkpointing: bool,
    #[values(&[(2, 2)], &[(3, 2)], &[(4, 2)], &[(2, 0), (2, 2)], &[(2, 2), (2, 3)])] axes: Axes,
) {
    let config = CNextUNetConfig {
        stages: 2,
        init_features: 3,
        blocks_per_stage: 2,
        gradient_checkpointing,
        ..CNextUNetConfig::new(2, 1, extents)
    };
    let shape = |channels: i64| [2, channels].into_iter().chain(extents.iter().map(|&n| n as i64)).collect();
    let case =
        Case { config: ModelConfig::new(config), kind: Kind::Double, input: shape(2), target: shape(1) };
    if axes.iter().all(|(_, dim)| *dim < extents.len() + 2) {
        check(&case, axes);
    }
}

#[rstest]
#[case::lines(translation(1), &[20])]
#[case::images_batch_norm_prelu(Pix2PixConfig {
    n_downsampling: 2,
    n_upsampling: 2,
    batch_norm: true,
    activation_fn: Activation::Prelu,
    ..translation(2)
}, &[16, 12])]
#[case::images_replicate(Pix2PixConfig { padding_type: Pix2PixPadding::Replicate, ..translation(2) }, &[16, 12])]
#[case::images_on_a_finer_grid(Pix2PixConfig { n_upsampling: 2, padding_type: Pix2PixPadding::Zero, ..translation(2) }, &[16, 12])]
#[case::recomputed_volumes(Pix2PixConfig { gradient_checkpointing: true, ..translation(3) }, &[8, 6, 4])]
fn pix2pix_is_the_same_on_shards(
    #[case] config: Pix2PixConfig,
    #[case] extents: &[i64],
    #[values(&[(2, 2)], &[(3, 2)], &[(4, 2)], &[(2, 0), (2, 2)], &[(2, 2), (2, 3)])] axes: Axes,
) {
    if axes.iter().all(|(_, dim)| *dim < extents.len() + 2) {
        check(&pix2pix(config, extents), axes);
    }
}

#[rstest]
#[case::unet_of_volumes(Case::unet(volumes(), &[8, 4, 4]))]
#[case::pix2pix(pix2pix(translation(2), &[16, 12]))]
#[case::unet_of_images(Case::unet(images(), &[12, 8]))]
#[case::sr_res_net(super_resolution(2))]
fn losses_in_single_precision(
    #[case] case: Case,
    #[values(&[(2, 2)], &[(3, 2)], &[(4, 2)], &[(2, 2), (2, 3)], &[(2, 0), (2, 2)])] axes: Axes,
) {
    let case = case.single();
    let want = dense(&case, None, |want| {
        assert_learns(want);
        want.losses.clone()
    });
    let near = [1, 2].map(|seed| dense(&case, Some(seed), |run| run.losses.clone()));
    let want = SingleRun::new(want, &near);
    for run in runs(&case, axes) {
        want.assert_same(&run.losses);
    }
}
