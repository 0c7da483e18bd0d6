//! Layouts for tests: meshes of thread ranks, and every way to lay a tensor out on them.

#![allow(dead_code, reason = "every test file takes its part of this")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_collectives::{Group, balanced, threads};
use isobar_mesh::DeviceMesh;
use isobar_shard::{Layout, Placement, ShardTensor, Sizes};
use tch::{Device, Kind, Tensor};

/// The meshes of most tests.
pub(crate) const MESHES: [&[i64]; 5] = [&[1], &[2], &[3], &[4], &[2, 2]];

/// Runs `f` on every rank of a mesh.
pub(crate) fn on_mesh<T: Send + 'static>(
    shape: &[i64],
    f: impl Fn(&DeviceMesh) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let shape = shape.to_vec();
    let ranks = shape.iter().product::<i64>() as usize;
    threads::run(ranks, Duration::from_secs(60), move |group: Group| {
        let names = ["a", "b", "c"];
        let mesh = DeviceMesh::new(&group, &shape, &names[..shape.len()]).unwrap();
        f(&mesh)
    })
}

/// Splits of extents in the tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Split {
    Chunk,
    Balanced,
    /// 1 : 2 : … : p
    Uneven,
    /// Balanced over all ranks but p // 2
    Empty,
}

pub(crate) const SPLITS: [Split; 4] = [Split::Chunk, Split::Balanced, Split::Uneven, Split::Empty];

impl Split {
    pub(crate) fn parts(self, extent: i64, parts: usize) -> Vec<i64> {
        match self {
            Split::Chunk => isobar_collectives::chunk(extent, parts),
            Split::Balanced => balanced(extent, parts),
            Split::Uneven => {
                let weights = parts as i64 * (parts as i64 + 1) / 2;
                let mut sizes: Vec<i64> =
                    (1..=parts as i64).map(|weight| extent * weight / weights).collect();
                sizes[parts - 1] += extent - sizes.iter().sum::<i64>();
                sizes
            }
            Split::Empty if parts == 1 => vec![extent],
            Split::Empty => {
                let mut sizes = balanced(extent, parts - 1);
                sizes.insert(parts / 2, 0);
                sizes
            }
        }
    }

    /// The layout of a tensor whose dims are split so.
    pub(crate) fn layout(self, mesh: &DeviceMesh, placements: &[Placement], shape: &[i64]) -> Layout {
        let mesh_shape = mesh.shape();
        let tables = (0..shape.len()).filter_map(|dim| {
            let axes: Vec<usize> =
                (0..placements.len()).filter(|&axis| placements[axis] == Placement::Shard(dim)).collect();
            if axes.is_empty() {
                return None;
            }
            let sizes = axes.iter().fold(vec![shape[dim]], |sizes, &axis| {
                sizes.into_iter().flat_map(|size| self.parts(size, mesh_shape[axis])).collect()
            });
            Some((dim, sizes))
        });
        Layout::new(mesh, placements, shape, &Sizes::Explicit(tables.collect())).unwrap()
    }
}

/// All placements of a tensor of so many dims on so many axes, partial ones left out.
pub(crate) fn placements(dims: usize, axes: usize) -> Vec<Vec<Placement>> {
    (0..axes).fold(vec![vec![]], |heads: Vec<Vec<Placement>>, _| {
        let extend = |head: Vec<Placement>| {
            let choices = std::iter::once(Placement::Replicate).chain((0..dims).map(Placement::Shard));
            choices.map(move |choice| [head.clone(), vec![choice]].concat())
        };
        heads.into_iter().flat_map(extend).collect()
    })
}

/// All layouts of a tensor on a mesh: every placement, every split.
pub(crate) fn layouts(mesh: &DeviceMesh, shape: &[i64]) -> Vec<Layout> {
    let all = placements(shape.len(), mesh.ndim());
    let with = |placements: &Vec<Placement>| {
        let sharded = placements.iter().any(|placement| placement.dim().is_some());
        let splits = if sharded && mesh.size() > 1 { &SPLITS[..] } else { &SPLITS[..1] };
        splits.iter().map(|split| split.layout(mesh, placements, shape)).collect::<Vec<_>>()
    };
    all.iter().flat_map(with).collect()
}

/// Numbers of a global tensor, the same on all ranks; not symmetric, not integers.
pub(crate) fn numbers(shape: &[i64], seed: i64) -> Tensor {
    let count: i64 = shape.iter().product();
    let index = Tensor::arange(count, (Kind::Double, Device::Cpu));
    ((index * 12.9898 + seed as f64 * 78.233).sin() * 1.7 + 0.1).reshape(shape)
}

/// A leaf of that layout.
pub(crate) fn leaf(whole: &Tensor, layout: &Layout) -> ShardTensor {
    let x = ShardTensor::distribute_as(whole, layout).unwrap().detach();
    let own = x.local().copy();
    ShardTensor::from_parts(&own, layout).unwrap().set_requires_grad(true).unwrap()
}

/// The largest difference.
pub(crate) fn difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size(), "shapes");
    if a.numel() == 0 {
        return 0.0;
    }
    (a.to_kind(Kind::Double) - b.to_kind(Kind::Double)).abs().max().double_value(&[])
}

/// Numbers that are the same on all ranks.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    /// A number of `low..=high`.
    pub(crate) fn roll(&mut self, low: i64, high: i64) -> i64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        low + ((self.0 >> 33) as i64).rem_euclid(high - low + 1)
    }

    pub(crate) fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.roll(0, choices.len() as i64 - 1) as usize]
    }

    pub(crate) fn chance(&mut self, one_in: i64) -> bool {
        self.roll(1, one_in) == 1
    }

    /// A random layout, in which the dims of `dims` may be split.
    pub(crate) fn layout(&mut self, mesh: &DeviceMesh, shape: &[i64], dims: &[usize]) -> Layout {
        let placements: Vec<Placement> = (0..mesh.ndim())
            .map(|_| match self.roll(0, dims.len() as i64) as usize {
                0 => Placement::Replicate,
                index => Placement::Shard(dims[index - 1]),
            })
            .collect();
        self.pick(&SPLITS).layout(mesh, &placements, shape)
    }
}

/// Runs an operator sharded and dense, and compares values and gradients.
pub(crate) fn same(
    what: &str,
    inputs: &[(&Tensor, &Layout)],
    tolerance: f64,
    sharded: impl Fn(&[ShardTensor]) -> isobar_shard::Result<ShardTensor>,
    dense: impl Fn(&[Tensor]) -> Result<Tensor, tch::TchError>,
) {
    let floating = |whole: &Tensor| matches!(whole.kind(), Kind::Float | Kind::Double);
    let leaves: Vec<ShardTensor> = inputs
        .iter()
        .map(|(whole, layout)| match floating(whole) {
            true => leaf(whole, layout),
            false => ShardTensor::distribute_as(whole, layout).unwrap(),
        })
        .collect();
    let wholes: Vec<Tensor> =
        inputs.iter().map(|(whole, _)| whole.detach().copy().set_requires_grad(floating(whole))).collect();
    let layouts = || inputs.iter().map(|(_, layout)| layout.to_string()).collect::<Vec<_>>().join("; ");
    let want = match (dense(&wholes), sharded(&leaves)) {
        (Err(_), Err(_)) => return,
        (Err(error), Ok(_)) => panic!("{what} of {} runs, but the dense one says {error}", layouts()),
        (Ok(want), Ok(got)) => {
            assert_eq!(got.local().size(), got.local_shape(), "local shape: {what} of {}", layouts());
            let full = got.full_tensor(None).unwrap();
            let off = difference(&full, &want);
            assert!(off < tolerance, "{what} of {} is off by {off}", layouts());
            if !want.requires_grad() {
                return;
            }
            let cotangent = numbers(&want.size(), 77).to_kind(want.kind());
            let g = ShardTensor::distribute_as(&cotangent, &got.layout().without_partial()).unwrap();
            got.backward_from(Some(&g), Default::default()).unwrap();
            (&want * &cotangent).sum(None).backward();
            want
        }
        (Ok(_), Err(error)) => panic!("{what} of {} fails: {error}", layouts()),
    };
    drop(want);
    for (index, (leaf, whole)) in leaves.iter().zip(&wholes).enumerate() {
        if !floating(whole) {
            continue;
        }
        let expected = if whole.grad().defined() { whole.grad() } else { whole.zeros_like() };
        let got = leaf.grad().map_or_else(|| whole.zeros_like(), |grad| grad.full_tensor(None).unwrap());
        let off = difference(&got, &expected);
        assert!(off < tolerance, "gradient {index} of {what} of {} is off by {off}", layouts());
    }
}
