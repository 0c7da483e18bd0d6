//! Dropout and drop-path over split fields against whole ones: of a batch, and of a part of one, as gradients that are accumulated
//! have it.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_array::{Array, Generator, Window};
use isobar_mesh::DeviceMesh;
use isobar_models::{
    Afno, AfnoConfig, DistributedAfno, DistributedAfnoConfig, Mode, PerDim, Result, Vit, VitConfig,
};
use isobar_shard::{
    MeshParams, Parallel, ParallelRegion, ParamStore, Params, Placement, ShardTensor,
    forbid_hidden_communication,
};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);
/// Of the global batch.
const SHAPE: [i64; 4] = [5, 2, 12, 8];

#[derive(Debug, Clone, Copy)]
enum Subject {
    Afno,
    /// Its channels may be split over an axis `model`.
    DistributedAfno,
    /// Weights of its attention are dropped.
    Vit,
}

type Forward<A> = Box<dyn Fn(&A, Mode<'_>) -> Result<A>>;

impl Subject {
    fn make<A: Array + Parallel>(
        self,
        gradient_checkpointing: bool,
        params: &mut impl Params<Array = A>,
    ) -> Forward<A> {
        match self {
            Self::Afno => {
                let config = AfnoConfig {
                    patch_size: [2, 2],
                    embed_dim: 6,
                    depth: 2,
                    num_blocks: 2,
                    drop_rate: 0.3,
                    gradient_checkpointing,
                    ..AfnoConfig::new([12, 8], 2, 2)
                };
                let model = Afno::new(&config, params).unwrap();
                Box::new(move |x, mode| model.forward(x, mode))
            }
            Self::DistributedAfno => {
                let config = DistributedAfnoConfig {
                    patch_size: 2,
                    embed_dim: 8,
                    depth: 3,
                    num_blocks: 4,
                    drop_rate: 0.3,
                    drop_path_rate: 0.5,
                    gradient_checkpointing,
                    ..DistributedAfnoConfig::new([12, 8], 2)
                };
                let model = DistributedAfno::new(&config, params).unwrap();
                Box::new(move |x, mode| model.forward(x, mode))
            }
            Self::Vit => {
                let config = VitConfig {
                    embed_dim: 8,
                    depth: 2,
                    num_heads: 2,
                    attn_drop_rate: 0.3,
                    patch_size: PerDim::All(2),
                    gradient_checkpointing,
                    ..VitConfig::new([12, 8], 2, 2)
                };
                let model = Vit::new(&config, params).unwrap();
                Box::new(move |x, mode| model.forward(x, mode))
            }
        }
    }
}

fn random(seed: u64) -> Tensor {
    Generator::new(seed).normal(&Window::whole(&SHAPE), 0.0, 1.0, DOUBLE).unwrap()
}

fn store() -> ParamStore {
    ParamStore::new(Generator::new(7)).with_options(Kind::Double, Device::Cpu)
}

/// The samples of a part of the batch, which begins at `offset`.
type Part = Option<(i64, i64)>;

fn mode(generator: &Generator, part: Part) -> Mode<'_> {
    part.map_or_else(|| Mode::train(generator), |(offset, _)| Mode::train_part(generator, offset, SHAPE[0]))
}

fn of_part(whole: &Tensor, part: Part) -> Tensor {
    part.map_or_else(|| whole.copy(), |(offset, count)| whole.narrow(0, offset, count).copy())
}

/// Output and gradients of the input and the parameters, of global tensors.
struct Step {
    output: Tensor,
    grads: Vec<(String, Tensor)>,
}

fn dense(subject: Subject, part: Part) -> Step {
    let mut store = store();
    let model = subject.make(false, &mut store);
    let x = of_part(&random(1), part).set_requires_grad(true);
    let generator = Generator::new(3);
    let output = model(&x, mode(&generator, part)).unwrap();
    (&output * of_part(&random(2), part)).sum(Kind::Double).backward();
    let of_parameters = store.trainable().map(|p| (p.name.clone(), p.tensor.grad()));
    let grads = [("the field".to_owned(), x.grad())].into_iter().chain(of_parameters).collect();
    Step { output: output.detach(), grads }
}

fn sharded(subject: Subject, mesh: &DeviceMesh, placements: &[Placement], part: Part, again: bool) -> Step {
    let along = mesh.group("model").ok();
    let region = along.clone().map_or_else(ParallelRegion::single, ParallelRegion::new);
    let mut store = store().with_region(region);
    let params = MeshParams::new(&mut store, mesh);
    let mut params = if along.is_some() { params.along("model").unwrap() } else { params };
    let model = subject.make(again, &mut params);
    let distribute = |whole: &Tensor| ShardTensor::distribute(whole, mesh, placements).unwrap();
    let x = distribute(&of_part(&random(1), part)).set_requires_grad(true).unwrap();
    let cotangent = distribute(&of_part(&random(2), part));
    let generator = Generator::new(3);
    let output = {
        let _guard = forbid_hidden_communication();
        let output = model(&x, mode(&generator, part)).unwrap();
        output.mul(&cotangent).unwrap().sum().unwrap().backward().unwrap();
        output
    };
    let whole = |x: &ShardTensor| x.full_tensor(None).unwrap().detach();
    let mut grads = vec![("the field".to_owned(), whole(&x.grad().unwrap()))];
    for parameter in store.trainable() {
        let mut grad = parameter.tensor.grad();
        if let (Placement::Shard(dim), Some(along)) = (parameter.placement, &along) {
            grad = isobar_collectives::all_gather_v(&grad, None, dim as i64, true, along).unwrap();
        }
        grads.push((parameter.name.clone(), grad));
    }
    Step { output: whole(&output), grads }
}

fn assert_close(what: &str, got: &Tensor, want: &Tensor) {
    assert_eq!(got.size(), want.size(), "{what}");
    let scale = want.abs().max().double_value(&[]).max(1e-3);
    let error = (got - want).abs().max().double_value(&[]) / scale;
    assert!(error < 1e-10, "{what} differs by {error}");
}

#[rstest]
#[case::rows(Subject::Afno, &[2], &["domain"])]
#[case::rows_and_columns(Subject::Afno, &[2, 2], &["domain", "domain_y"])]
#[case::samples_and_rows(Subject::Afno, &[2, 2], &["data", "domain"])]
#[case::rows(Subject::DistributedAfno, &[2], &["domain"])]
#[case::rows_and_columns(Subject::DistributedAfno, &[2, 2], &["domain", "domain_y"])]
#[case::samples_and_columns(Subject::DistributedAfno, &[2, 2], &["data", "domain_y"])]
#[case::rows(Subject::Vit, &[2], &["domain"])]
#[case::samples_and_columns(Subject::Vit, &[2, 2], &["data", "domain_y"])]
#[case::rows_and_channels(Subject::DistributedAfno, &[2, 2], &["domain", "model"])]
fn the_same_elements_are_dropped(
    #[case] subject: Subject,
    #[case] shape: &[i64],
    #[case] names: &[&str],
    #[values(None, Some((2, 2)), Some((4, 1)))] part: Part,
    #[values(false, true)] again: bool,
) {
    let want = dense(subject, part);
    // A shard's numbers are that part of the global tensor's numbers.
    assert_close("the part", &want.output, &of_part(&dense(subject, None).output, part));
    let ranks = shape.iter().product::<i64>() as usize;
    let steps = isobar_collectives::threads::run(ranks, Duration::from_secs(60), |group| {
        let place = |name: &&str| match *name {
            "data" => Placement::Shard(0),
            "domain" => Placement::Shard(2),
            "domain_y" => Placement::Shard(3),
            _ => Placement::Replicate,
        };
        let mesh = DeviceMesh::new(&group, shape, names).unwrap();
        let placements: Vec<Placement> = names.iter().map(place).collect();
        sharded(subject, &mesh, &placements, part, again)
    });
    for got in steps {
        assert_close("output", &got.output, &want.output);
        assert_eq!(got.grads.len(), want.grads.len());
        for ((name, got), (_, want)) in got.grads.iter().zip(&want.grads) {
            assert_close(&format!("gradient of {name}"), got, want);
        }
    }
}
