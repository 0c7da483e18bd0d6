//! Linear operators and their gradients are adjoint: ⟨F x, y⟩ = ⟨x, F* y⟩ over global tensors, on random layouts.

use isobar_array::{Conv, Interpolation, Local, PadMode, Padding, Pool, Resize, Statistic};
use isobar_shard::{Placement, Result, ShardTensor, grad};
use rstest::rstest;
use tch::Tensor;

use crate::common::{Dice, MESHES, leaf, numbers, on_mesh};

/// A linear map of a `[2, 4, 9, 6]` tensor.
type Map = (&'static str, fn(&ShardTensor) -> Result<ShardTensor>);

const SHAPE: [i64; 4] = [2, 4, 9, 6];

fn whole(x: &ShardTensor, shape: &[i64], seed: i64) -> Result<ShardTensor> {
    let replicated = vec![Placement::Replicate; x.device_mesh().ndim()];
    ShardTensor::distribute(&numbers(shape, seed), x.device_mesh(), &replicated)
}

fn index(x: &ShardTensor, list: &[i64]) -> Result<ShardTensor> {
    let placements = vec![Placement::Shard(0); x.device_mesh().ndim()];
    ShardTensor::distribute(&Tensor::from_slice(list), x.device_mesh(), &placements)
}

const MAPS: &[Map] = &[
    ("redistribute", |x| x.redistribute(None, &vec![Placement::Shard(3); x.device_mesh().ndim()])),
    ("replicate_dims", |x| Ok(Local::replicate_dims(x, &[0, 3])?)),
    ("convolution without padding", |x| x.conv(&whole(x, &[3, 4, 4, 3], 5)?, None, &Conv::default())),
    ("convolution of a batch in pieces", |x| {
        let folded = x.reshape(&[8, 1, 9, 6])?;
        let conv = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
        folded.conv(&whole(x, &[3, 1, 3, 3], 5)?, None, &conv)?.avg_pool(2, &Pool::new(&[2]))
    }),
    ("pad with zeros", |x| x.pad_mode(&[2, -1, 7, 3], PadMode::Constant, 0.0)),
    ("circular pad", |x| x.pad_mode(&[2, 6, 9, 3], PadMode::Circular, 0.0)),
    ("reflecting pad", |x| x.pad_mode(&[5, 1, 8, 3], PadMode::Reflect, 0.0)),
    ("replicating pad", |x| x.pad_mode(&[3, 1, 2, 11], PadMode::Replicate, 0.0)),
    ("roll", |x| x.roll(&[4, -1], &[2, 3])),
    ("flip", |x| x.flip(&[0, 2])),
    ("unfold", |x| x.unfold(2, 4, 2)),
    ("convolution", |x| {
        let conv = Conv { stride: vec![2, 1], padding: Padding::Each(vec![2]), ..Conv::default() };
        x.conv(&whole(x, &[3, 4, 4, 3], 5)?, None, &conv)
    }),
    ("circular convolution in groups", |x| {
        let conv = Conv {
            padding: Padding::Each(vec![1]),
            groups: 2,
            padding_mode: PadMode::Circular,
            ..Conv::default()
        };
        x.conv(&whole(x, &[4, 2, 3, 3], 5)?, None, &conv)
    }),
    ("transposed convolution", |x| {
        let conv = Conv { stride: vec![3, 2], padding: Padding::Each(vec![1]), ..Conv::default() };
        x.conv_transpose(&whole(x, &[4, 3, 4, 3], 5)?, None, &conv, &[1])
    }),
    ("means of windows", |x| {
        x.avg_pool(2, &Pool { stride: vec![2], padding: vec![1], ceil_mode: true, ..Pool::new(&[3]) })
    }),
    ("adaptive means", |x| x.adaptive_avg_pool(&[4, 5])),
    ("nearest", |x| x.interpolate(&Resize::Scale(vec![1.7]), Interpolation::Nearest, false)),
    ("bilinear", |x| x.interpolate(&Resize::Size(vec![14, 4]), Interpolation::Linear, true)),
    ("bicubic", |x| x.interpolate(&Resize::Size(vec![5, 13]), Interpolation::Cubic, false)),
    ("reshape", |x| x.reshape(&[8, 3, 18])),
    ("permute", |x| x.permute(&[3, 0, 2, 1])),
    ("slice", |x| x.slice(2, Some(1), None, 3)),
    ("select", |x| x.select(2, -4)),
    ("cat", |x| ShardTensor::cat(&[x, &x.slice(3, Some(2), None, 1)?, x], 3)),
    ("repeat", |x| x.repeat(&[1, 1, 2, 3])),
    ("expand", |x| x.unsqueeze(1)?.expand(&[2, 5, 4, 9, 6])),
    ("index_select", |x| x.index_select(2, &index(x, &[8, 0, 3, 3, 5])?)),
    ("index_add", |x| {
        let target = whole(x, &[2, 4, 3, 6], 5)?.detach();
        let zeros = ShardTensor::zeros(target.layout(), x.kind(), x.device())?;
        zeros.index_add(2, &index(x, &[0, 2, 1, 1, 0, 2, 2, 0, 1])?, x)
    }),
    ("cumsum", |x| x.cumsum(2)),
    ("sum", |x| x.statistic(Statistic::Sum, &[1, 2], true)),
    ("mean", |x| x.statistic(Statistic::Mean, &[], false)),
    ("matmul", |x| x.matmul(&whole(x, &[6, 5], 5)?)),
    ("einsum", |x| ShardTensor::einsum("bchw,hk->bkw", &[x, &whole(x, &[9, 3], 5)?])),
    ("tiles", |x| {
        let weight = whole(x, &[6, 5], 5)?;
        let tiles = x.tiles(2, 4)?.iter().map(|tile| tile.matmul(&weight)).collect::<Result<Vec<_>, _>>()?;
        ShardTensor::join_tiles(&tiles.iter().collect::<Vec<_>>(), 2, x)
    }),
];

#[rstest]
fn every_linear_operator(#[values(1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(61);
        for (name, map) in MAPS {
            for round in 0..8 {
                let layout = dice.layout(mesh, &SHAPE, &[0, 1, 2, 3]);
                let x = leaf(&numbers(&SHAPE, round), &layout);
                let y = map(&x).unwrap();
                let value = y.full_tensor(None).unwrap();
                let other = numbers(&value.size(), round + 100);
                let given = ShardTensor::distribute_as(&other, &y.layout().without_partial()).unwrap();
                let back =
                    grad(&[&y], &[&x], &[Some(&given)], Default::default()).unwrap().remove(0).unwrap();
                assert_eq!(back.layout(), &layout);
                let dot = |a: &Tensor, b: &Tensor| (a * b).sum(None).double_value(&[]);
                let forward = dot(&value.detach(), &other);
                let backward = dot(&numbers(&SHAPE, round), &back.full_tensor(None).unwrap());
                let scale = forward.abs().max(1.0);
                assert!(
                    (forward - backward).abs() < 1e-9 * scale,
                    "{name} of {layout}: {forward}, {backward}"
                );
            }
        }
    });
}
