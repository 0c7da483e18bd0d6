//! Spectral models over sharded fields against themselves on one rank: outputs, gradients and training in double precision,
//! losses in single precision.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_array::{Array, Generator, Window};
use isobar_harness::{Memo, curve::SingleRun};
use isobar_mesh::DeviceMesh;
use isobar_models::{
    Afno, AfnoConfig, Factorization, Fno, FnoConfig, ModAfno, ModAfnoConfig, ModEmbedConfig, Mode,
    PaddingType, PerDim,
};
use isobar_shard::{CommTrace, Layout, MeshParams, ParamStore, Params, Placement, ShardTensor, Sizes};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use crate::common::{nudge, twin::steps_on};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);
const RATE: f64 = 0.05;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Subject {
    Afno,
    CorrectedAfno,
    ModAfno,
    Fno,
    CircularFno,
    TuckerFno,
    CpFno,
    Fno1d,
    CpFno1d,
    Fno3d,
    Fno4d,
}

/// A model's forward pass, of a field and a modulation.
type Forward<A> = Box<dyn Fn(&A, &A) -> isobar_models::Result<A>>;

impl Subject {
    fn make<A: Array + 'static>(self, params: &mut impl Params<Array = A>) -> Forward<A> {
        let afno = AfnoConfig {
            patch_size: [2, 3],
            embed_dim: 6,
            depth: 2,
            num_blocks: 2,
            ..AfnoConfig::new([12, 18], 2, 2)
        };
        let fno = FnoConfig {
            latent_channels: 4,
            decoder_layer_size: 4,
            num_fno_layers: 2,
            num_fno_modes: PerDim::All(4),
            padding: PerDim::Each(vec![2]),
            ..FnoConfig::new(2, 2)
        };
        let fno = match self {
            Self::Afno | Self::CorrectedAfno => {
                let corrected_modes = self == Self::CorrectedAfno;
                let fraction = if corrected_modes { 0.6 } else { 1.0 };
                let config = AfnoConfig { corrected_modes, hard_thresholding_fraction: fraction, ..afno };
                let model = Afno::new(&config, params).unwrap();
                return Box::new(move |x, _| model.forward(x, Mode::Eval));
            }
            Self::ModAfno => {
                let config = ModAfnoConfig {
                    in_channels: 2,
                    out_channels: 2,
                    embed_model: ModEmbedConfig { dim: 4, ..Default::default() },
                    mod_dim: 4,
                    patch_size: afno.patch_size,
                    embed_dim: 6,
                    depth: 2,
                    num_blocks: 2,
                    ..ModAfnoConfig::new(afno.inp_shape)
                };
                let model = ModAfno::new(&config, params).unwrap();
                return Box::new(move |x, modulation| model.forward(x, modulation, Mode::Eval));
            }
            Self::CircularFno => FnoConfig { padding_type: PaddingType::Circular, ..fno },
            Self::TuckerFno => FnoConfig { factorization: Factorization::Tucker, rank: 0.5, ..fno },
            Self::CpFno => FnoConfig { factorization: Factorization::Cp, rank: 0.5, ..fno },
            Self::Fno1d => FnoConfig { dimension: 1, ..fno },
            Self::CpFno1d => FnoConfig { dimension: 1, factorization: Factorization::Cp, rank: 0.5, ..fno },
            Self::Fno3d => FnoConfig { dimension: 3, num_fno_modes: PerDim::All(2), ..fno },
            Self::Fno4d => FnoConfig { dimension: 4, num_fno_modes: PerDim::All(2), ..fno },
            Self::Fno => fno,
        };
        let model = Fno::new(&fno, params).unwrap();
        Box::new(move |x, _| model.forward(x))
    }

    fn shape(self) -> &'static [i64] {
        match self {
            Self::Fno1d | Self::CpFno1d => &[2, 2, 13],
            Self::Fno3d => &[2, 2, 5, 6, 7],
            Self::Fno4d => &[2, 2, 5, 4, 6, 4],
            _ => &[2, 2, 12, 18],
        }
    }
}

fn store(kind: Kind) -> ParamStore {
    ParamStore::new(Generator::new(7)).with_options(kind, Device::Cpu)
}

/// Trainings on one rank, with the field's gradient after the first step.
static DENSE: Memo<(Run, Tensor)> = Memo::new();

/// Results of a training run, as global tensors.
struct Run {
    output: Tensor,
    losses: Vec<f64>,
    /// Of the first step, by parameter.
    grads: Vec<(String, Tensor)>,
    parameters: Vec<Tensor>,
}

/// Trains by gradient descent; `step` runs forward and backward, and returns the output and the loss.
fn train(store: &ParamStore, steps: usize, step: impl Fn() -> (Tensor, f64)) -> Run {
    let mut run = Run { output: Tensor::new(), losses: vec![], grads: vec![], parameters: vec![] };
    for index in 0..steps {
        store.zero_grad().unwrap();
        let (output, loss) = step();
        run.losses.push(loss);
        if index == 0 {
            run.output = output;
            run.grads = store.trainable().map(|p| (p.name.clone(), p.tensor.grad().copy())).collect();
        }
        tch::no_grad(|| {
            for parameter in store.trainable() {
                let mut tensor = parameter.tensor.shallow_clone();
                let _ = tensor.g_sub_(&(tensor.grad() * RATE));
            }
        });
    }
    run.parameters = store.trainable().map(|p| p.tensor.detach().copy()).collect();
    run
}

struct Data {
    x: Tensor,
    modulation: Tensor,
    target: Tensor,
}

impl Data {
    fn new(subject: Subject, kind: Kind) -> Self {
        let random = |seed, shape: &[i64]| {
            let whole = Generator::new(seed).normal(&Window::whole(shape), 0.0, 1.0, DOUBLE);
            whole.unwrap().to_kind(kind)
        };
        Self {
            x: random(1, subject.shape()),
            modulation: random(2, &[2, 1]),
            target: random(3, subject.shape()),
        }
    }
}

/// Calls `read` with a run of `steps` on one rank and the field's gradient after the first step. A seed nudges the parameters
/// first.
fn dense<R>(
    (subject, kind, steps): (Subject, Kind, usize),
    seed: Option<u64>,
    read: impl FnOnce(&Run, &Tensor) -> R,
) -> R {
    let name = format!("{subject:?} {kind:?} {steps} {seed:?}");
    DENSE.with(name, || run_dense((subject, kind, steps), seed), |(run, gradient)| read(run, gradient))
}

fn run_dense((subject, kind, steps): (Subject, Kind, usize), seed: Option<u64>) -> (Run, Tensor) {
    let Data { x, modulation, target } = Data::new(subject, kind);
    let mut store = store(kind);
    let model = subject.make(&mut store);
    seed.iter().for_each(|seed| nudge(&store, *seed));
    let leaf = x.set_requires_grad(true);
    let first = std::cell::RefCell::new(None);
    let run = train(&store, steps, || {
        let output = model(&leaf, &modulation).unwrap();
        let loss = output.mse_loss(&target, tch::Reduction::Mean);
        loss.backward();
        first.borrow_mut().get_or_insert_with(|| leaf.grad().copy());
        (output.detach(), loss.double_value(&[]))
    });
    (run, first.into_inner().unwrap())
}

/// Extents of sharded dims.
#[derive(Debug, Clone, Copy)]
enum Parts {
    Equal,
    /// As 1 : 2 : …
    Growing,
    /// The second has nothing.
    Hole,
}

impl Parts {
    fn sizes(self, extent: i64, parts: i64) -> Vec<i64> {
        match self {
            Self::Equal => isobar_collectives::chunk(extent, parts as usize),
            Self::Growing => {
                let boundary = |part: i64| extent * part * (part + 1) / (parts * (parts + 1));
                (0..parts).map(|part| boundary(part + 1) - boundary(part)).collect()
            }
            Self::Hole => {
                let mut sizes = isobar_collectives::chunk(extent, parts as usize - 1);
                sizes.insert(1, 0);
                sizes
            }
        }
    }

    /// Of a tensor of which each axis of the mesh splits another dim.
    fn layout(self, mesh: &DeviceMesh, placements: &[Placement], shape: &[i64]) -> Layout {
        let axes = placements.iter().zip(mesh.shape());
        let sizes = axes.filter_map(|(placement, ranks)| {
            placement.dim().map(|dim| (dim, self.sizes(shape[dim], ranks as i64)))
        });
        Layout::new(mesh, placements, shape, &Sizes::Explicit(sizes.collect())).unwrap()
    }
}

fn sharded(
    (subject, kind): (Subject, Kind),
    mesh: &DeviceMesh,
    placements: &[Placement],
    parts: Parts,
) -> (Run, Tensor) {
    let Data { x, modulation, target } = Data::new(subject, kind);
    let mut store = store(kind);
    let model = subject.make(&mut MeshParams::new(&mut store, mesh));
    let distribute = |whole: &Tensor, placements: &[Placement]| {
        ShardTensor::distribute_as(whole, &parts.layout(mesh, placements, &whole.size())).unwrap()
    };
    let whole = distribute(&x, placements);
    let leaf = whole.local().detach().copy().set_requires_grad(true);
    let x = ShardTensor::from_parts(&leaf, whole.layout()).unwrap();
    let target = distribute(&target, placements);
    // The modulation lies beside the batch.
    let of_batch: Vec<Placement> = placements
        .iter()
        .map(|placement| if *placement == Placement::Shard(0) { *placement } else { Placement::Replicate })
        .collect();
    let modulation = distribute(&modulation, &of_batch);
    let first = std::cell::RefCell::new(None);
    let mesh_shape: Vec<i64> = mesh.shape().into_iter().map(|ranks| ranks as i64).collect();
    let run = train(&store, steps_on(&mesh_shape), || {
        let output = model(&x, &modulation).unwrap();
        let loss = isobar_array::Reduce::mse_loss(&output, &target).unwrap();
        loss.backward().unwrap();
        first.borrow_mut().get_or_insert_with(|| {
            let grad = ShardTensor::from_parts(&leaf.grad().copy(), whole.layout()).unwrap();
            grad.full_tensor(None).unwrap()
        });
        let value = loss.full_tensor(None).unwrap().double_value(&[]);
        (output.detach().full_tensor(None).unwrap(), value)
    });
    (run, first.into_inner().unwrap())
}

fn assert_close(what: &str, got: &Tensor, want: &Tensor) {
    assert_eq!(got.size(), want.size(), "{what}");
    let scale = want.abs().max().double_value(&[]).max(1e-3);
    let error = (got - want).abs().max().double_value(&[]) / scale;
    assert!(error < 1e-10, "{what} differs by {error}");
}

/// Trains on every rank of a mesh.
fn runs(
    subject: Subject,
    kind: Kind,
    mesh_shape: &[i64],
    placements: &[Placement],
    parts: Parts,
) -> Vec<(Run, Tensor)> {
    let placed = placements.to_vec();
    let mesh_shape = mesh_shape.to_vec();
    let ranks = mesh_shape.iter().product::<i64>() as usize;
    isobar_collectives::threads::run(ranks, Duration::from_secs(120), move |group| {
        let mesh = DeviceMesh::new(&group, &mesh_shape, &["a", "b"][..mesh_shape.len()]).unwrap();
        sharded((subject, kind), &mesh, &placed, parts)
    })
}

fn assert_learns(run: &Run) {
    assert!(run.losses.last() < run.losses.first(), "{:?}", run.losses);
}

fn check(subject: Subject, mesh_shape: &[i64], placements: &[Placement]) {
    check_parts(subject, mesh_shape, placements, Parts::Equal);
}

fn check_parts(subject: Subject, mesh_shape: &[i64], placements: &[Placement], parts: Parts) {
    let runs = runs(subject, Kind::Double, mesh_shape, placements, parts);
    let steps = steps_on(mesh_shape);
    dense((subject, Kind::Double, steps), None, |want, want_x| {
        assert_learns(want);
        for (got, got_x) in &runs {
            assert_close("output", &got.output, &want.output);
            assert_close("gradient of the field", got_x, want_x);
            for ((name, got), (_, want)) in got.grads.iter().zip(&want.grads) {
                assert_close(&format!("gradient of {name}"), got, want);
            }
            assert_close("losses", &Tensor::from_slice(&got.losses), &Tensor::from_slice(&want.losses));
            for ((name, _), (got, want)) in got.grads.iter().zip(got.parameters.iter().zip(&want.parameters))
            {
                assert_close(&format!("{name} after {steps} steps"), got, want);
            }
        }
    });
}

#[rstest]
fn along_one_axis(
    #[values(
        Subject::Afno,
        Subject::CorrectedAfno,
        Subject::ModAfno,
        Subject::Fno,
        Subject::CircularFno,
        Subject::TuckerFno
    )]
    subject: Subject,
    #[values(2, 3, 4)] ranks: i64,
    #[values(0, 2, 3)] dim: usize,
) {
    check(subject, &[ranks], &[Placement::Shard(dim)]);
}

#[rstest]
fn along_two_axes(
    #[values(Subject::Afno, Subject::CorrectedAfno, Subject::ModAfno, Subject::Fno, Subject::CircularFno)]
    subject: Subject,
    #[values([2, 3], [3, 2], [0, 2], [0, 3])] dims: [usize; 2],
) {
    check(subject, &[2, 2], &dims.map(Placement::Shard));
}

/// On 32 × 32 tokens of 8 features, split by rows, half of each exchange: modes where few columns are kept, else whole fields; in
/// the corrected window always modes.
#[rstest]
#[case::few(0.25, false, 8 * 4 * 8 * 16)]
#[case::all(1.0, false, 32 * 16 * 8 * 8)]
#[case::few_of_the_lowest(0.25, true, 7 * 4 * 8 * 16)]
#[case::all_of_the_lowest(1.0, true, 32 * 17 * 8 * 16 / 2)]
fn afno_exchanges(#[case] fraction: f64, #[case] corrected_modes: bool, #[case] bytes: u64) {
    isobar_collectives::threads::run(2, Duration::from_secs(60), |group| {
        let config = AfnoConfig {
            patch_size: [1, 1],
            embed_dim: 8,
            depth: 1,
            num_blocks: 2,
            hard_thresholding_fraction: fraction,
            corrected_modes,
            ..AfnoConfig::new([32, 32], 2, 2)
        };
        let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
        let mut store = store(Kind::Double);
        let model = Afno::new(&config, &mut MeshParams::new(&mut store, &mesh)).unwrap();
        let x = Tensor::ones([1, 2, 32, 32], DOUBLE);
        let x = ShardTensor::distribute(&x, &mesh, &[Placement::Shard(2)]).unwrap();
        let trace = CommTrace::start(&group);
        let _ = model.forward(&x, Mode::Eval).unwrap();
        assert_eq!(trace.received(), bytes, "{}", trace.record());
        // All of it in the block, which records and errors name.
        assert_eq!(trace.record().of_module("blocks.0").received(), bytes, "{}", trace.record());
    });
}

#[rstest]
fn factored_along_two_axes(#[values(Subject::TuckerFno, Subject::CpFno)] subject: Subject) {
    check(subject, &[2, 2], &[2, 3].map(Placement::Shard));
}

#[test]
fn cp_factors_along_one_axis() {
    check(Subject::CpFno, &[4], &[Placement::Shard(2)]);
}

/// Parts cut through patches, and ranks without any.
#[rstest]
fn of_unequal_parts(
    #[values(Subject::Afno, Subject::CorrectedAfno, Subject::Fno)] subject: Subject,
    #[values(&[(3, 2)], &[(2, 2), (2, 3)], &[(2, 0), (2, 2)])] axes: &[(i64, usize)],
    #[values(Parts::Growing, Parts::Hole)] parts: Parts,
) {
    let (mesh_shape, placements): (Vec<i64>, Vec<Placement>) =
        axes.iter().map(|&(ranks, dim)| (ranks, Placement::Shard(dim))).unzip();
    check_parts(subject, &mesh_shape, &placements, parts);
}

#[rstest]
#[case(Subject::Fno1d, &[2])]
#[case(Subject::Fno1d, &[0])]
#[case(Subject::Fno3d, &[2])]
#[case(Subject::Fno3d, &[4])]
#[case(Subject::Fno3d, &[3, 4])]
#[case(Subject::Fno4d, &[2, 5])]
fn in_other_dimensions(#[case] subject: Subject, #[case] dims: &[usize]) {
    let placements: Vec<Placement> = dims.iter().copied().map(Placement::Shard).collect();
    check(subject, &vec![2; dims.len()], &placements);
}

#[rstest]
fn losses_in_single_precision(
    #[values(
        Subject::Afno,
        Subject::ModAfno,
        Subject::Fno,
        Subject::TuckerFno,
        Subject::Fno3d,
        Subject::Fno4d
    )]
    subject: Subject,
    #[values(&[(2, 2)], &[(3, 2)], &[(4, 2)], &[(2, 2), (2, 3)], &[(2, 0), (2, 2)])] axes: &[(i64, usize)],
) {
    check_losses(subject, axes);
}

#[rstest]
fn losses_in_single_precision_of_lines(
    #[values(Subject::Fno1d, Subject::CpFno1d)] subject: Subject,
    #[values(&[(2, 2)], &[(3, 2)], &[(4, 2)], &[(2, 0), (2, 2)])] axes: &[(i64, usize)],
) {
    check_losses(subject, axes);
}

/// In single precision; each axis of the mesh splits one dim.
fn check_losses(subject: Subject, axes: &[(i64, usize)]) {
    let (mesh_shape, placements): (Vec<i64>, Vec<Placement>) =
        axes.iter().map(|&(ranks, dim)| (ranks, Placement::Shard(dim))).unzip();
    let what = (subject, Kind::Float, steps_on(&mesh_shape));
    let want = dense(what, None, |want, _| {
        assert_learns(want);
        want.losses.clone()
    });
    let near = [1, 2].map(|seed| dense(what, Some(seed), |run, _| run.losses.clone()));
    let want = SingleRun::new(want, &near);
    for (got, _) in runs(subject, Kind::Float, &mesh_shape, &placements, Parts::Equal) {
        want.assert_same(&got.losses);
    }
}
