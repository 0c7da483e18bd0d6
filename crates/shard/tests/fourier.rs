//! Fourier transforms of sharded tensors against the dense ones.

use isobar_array::{Convert, FftNorm, Modes, Spectral};
use isobar_collectives::threads;
use isobar_shard::{
    CommTrace, DistributedIrfft2, DistributedRfft2, Layout, Placement, ShardTensor, Sizes, TransformPieces,
    forbid_hidden_communication, grad,
};
use isobar_torch::autograd::{self, BackwardOptions};
use rstest::rstest;
use tch::{Kind, TchError, Tensor};

use crate::common::{Dice, MESHES, SPLITS, difference, leaf, numbers, on_mesh, same};

const NORMS: [FftNorm; 3] = [FftNorm::Backward, FftNorm::Ortho, FftNorm::Forward];
/// Prime, odd, even, and fewer than ranks.
const EXTENTS: [i64; 8] = [1, 2, 3, 5, 6, 7, 8, 11];

/// A transform of random dims and sizes.
struct RandomTransform {
    shape: Vec<i64>,
    s: Vec<i64>,
    dims: Vec<i64>,
    norm: FftNorm,
}

impl RandomTransform {
    fn new(dice: &mut Dice) -> Self {
        let shape: Vec<i64> = (0..dice.roll(1, 4)).map(|_| *dice.pick(&EXTENTS)).collect();
        let mut all: Vec<i64> = (0..shape.len() as i64).collect();
        let count = dice.roll(1, 3.min(shape.len() as i64));
        let dims: Vec<i64> = (0..count)
            .map(|_| {
                let dim = all.remove(dice.roll(0, all.len() as i64 - 1) as usize);
                if dice.chance(2) { dim } else { dim - shape.len() as i64 }
            })
            .collect();
        let s = match dice.chance(2) {
            true => Vec::new(),
            false => dims.iter().map(|_| dice.roll(1, 9)).collect(),
        };
        Self { shape, s, dims, norm: *dice.pick(&NORMS) }
    }

    /// The points, as libtorch wants them.
    fn points(&self, halved: bool) -> Vec<i64> {
        let own = |(index, dim): (usize, &i64)| {
            let extent = self.shape[dim.rem_euclid(self.shape.len() as i64) as usize];
            match self.s.get(index) {
                Some(points) => *points,
                None if halved && index + 1 == self.dims.len() => 2 * (extent - 1),
                None => extent,
            }
        };
        self.dims.iter().enumerate().map(own).collect()
    }
}

#[rstest]
fn real_transforms(#[values(0, 1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let _guard = forbid_hidden_communication();
        let mut dice = Dice(31);
        for _ in 0..150 {
            let asked = RandomTransform::new(&mut dice);
            let x = numbers(&asked.shape, 1);
            let layout = dice.layout(mesh, &asked.shape, &(0..asked.shape.len()).collect::<Vec<_>>());
            same(
                &format!("rfftn {:?} {:?} {:?}", asked.s, asked.dims, asked.norm),
                &[(&x, &layout)],
                1e-10,
                |t| Ok(t[0].rfftn(&asked.s, &asked.dims, asked.norm)?.view_as_real()?),
                |t| {
                    let points = asked.points(false);
                    t[0].f_fft_rfftn(&points[..], &asked.dims, asked.norm.name())?.f_view_as_real()
                },
            );
        }
    });
}

/// Of a tensor of pairs, split along other dims than the pairs.
fn of_pairs(
    mesh: usize,
    seed: u64,
    name: &'static str,
    sharded: fn(&ShardTensor, &RandomTransform) -> isobar_shard::Result<ShardTensor>,
    dense: fn(&Tensor, &RandomTransform) -> Result<Tensor, TchError>,
) {
    on_mesh(MESHES[mesh], move |mesh| {
        let _guard = forbid_hidden_communication();
        let mut dice = Dice(seed);
        for _ in 0..150 {
            let asked = RandomTransform::new(&mut dice);
            let pairs = [&asked.shape[..], &[2]].concat();
            let x = numbers(&pairs, 1);
            let layout = dice.layout(mesh, &pairs, &(0..asked.shape.len()).collect::<Vec<_>>());
            same(
                &format!("{name} {:?} {:?} {:?}", asked.s, asked.dims, asked.norm),
                &[(&x, &layout)],
                1e-10,
                |t| sharded(&t[0].view_as_complex()?, &asked),
                |t| dense(&t[0].f_view_as_complex()?, &asked),
            );
        }
    });
}

#[rstest]
fn inverse_real_transforms(#[values(0, 1, 2, 3, 4)] mesh: usize) {
    of_pairs(
        mesh,
        37,
        "irfftn",
        |x, asked| Ok(x.irfftn(&asked.s, &asked.dims, asked.norm)?),
        |x, asked| x.f_fft_irfftn(&asked.points(true)[..], &asked.dims, asked.norm.name()),
    );
}

#[rstest]
fn complex_transforms(#[values(0, 1, 2, 3, 4)] mesh: usize, #[values(false, true)] inverse: bool) {
    match inverse {
        false => of_pairs(
            mesh,
            41,
            "fftn",
            |x, asked| Ok(x.fftn(&asked.s, &asked.dims, asked.norm)?.view_as_real()?),
            |x, asked| {
                x.f_fft_fftn(&asked.points(false)[..], &asked.dims, asked.norm.name())?.f_view_as_real()
            },
        ),
        true => of_pairs(
            mesh,
            43,
            "ifftn",
            |x, asked| Ok(x.ifftn(&asked.s, &asked.dims, asked.norm)?.view_as_real()?),
            |x, asked| {
                x.f_fft_ifftn(&asked.points(false)[..], &asked.dims, asked.norm.name())?.f_view_as_real()
            },
        ),
    }
}

#[rstest]
fn single_precision_and_second_gradients(#[values(1, 2, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let shape = [2, 7, 6];
        let whole = numbers(&shape, 1);
        let placements: Vec<Placement> = (1..=mesh.ndim()).map(Placement::Shard).collect();
        let layout = Layout::new(mesh, &placements, &shape, &Sizes::Chunk).unwrap();
        let single = ShardTensor::distribute_as(&whole.to_kind(Kind::Float), &layout).unwrap();
        let spectrum = single.rfft2([1, 2], FftNorm::Ortho).unwrap();
        assert_eq!(spectrum.kind(), Kind::ComplexFloat);
        let back = spectrum.irfft2([7, 6], [1, 2], FftNorm::Ortho).unwrap();
        assert!(difference(&back.full_tensor(None).unwrap(), &whole) < 1e-5);

        // The gradient of the sum of cubes of |gradient|.
        let power = |y: &ShardTensor| y.mul(y).unwrap().mul(y).unwrap().sum().unwrap();
        let (x, dense) = (leaf(&whole, &layout), whole.copy().set_requires_grad(true));
        let y = power(&x.rfft2([1, 2], FftNorm::Forward).unwrap().view_as_real().unwrap());
        let want = dense.fft_rfft2(None::<&[i64]>, [1, 2], "forward").view_as_real().pow_tensor_scalar(3);
        let want = want.sum(Kind::Double);
        let create = BackwardOptions { create_graph: true, ..Default::default() };
        let first = grad(&[&y], &[&x], &[None], create).unwrap().remove(0).unwrap();
        let expected = autograd::grad(&[&want], &[&dense], &[None], create).unwrap().remove(0).unwrap();
        assert!(difference(&first.full_tensor(None).unwrap(), &expected) < 1e-10);
        let second = grad(&[&power(&first)], &[&x], &[None], Default::default()).unwrap().remove(0).unwrap();
        let want = expected.pow_tensor_scalar(3).sum(Kind::Double);
        let expected = autograd::grad(&[&want], &[&dense], &[None], Default::default()).unwrap().remove(0);
        assert!(difference(&second.full_tensor(None).unwrap(), &expected.unwrap()) < 1e-10);
    });
}

/// Split along the height, the real transform comes first, and what travels is half a spectrum, once: its share of the bytes,
/// and nothing back before the inverse.
#[test]
fn half_a_spectrum_travels_once() {
    on_mesh(&[2], |mesh| {
        let shape = [1, 3, 8, 14];
        let layout = Layout::new(mesh, &[Placement::Shard(2)], &shape, &Sizes::Chunk).unwrap();
        let x = ShardTensor::distribute_as(&numbers(&shape, 1), &layout).unwrap();
        let group = mesh.group_along(&[0]).unwrap();
        let trace = CommTrace::start(&group);
        let spectrum = x.rfft2([2, 3], FftNorm::Ortho).unwrap();
        // Half of the rows of half of 8 columns, complex.
        assert_eq!(trace.received(), 3 * 4 * 4 * 16);
        assert_eq!(spectrum.placements(), [Placement::Shard(3)]);
        let back = spectrum.irfft2([8, 14], [2, 3], FftNorm::Ortho).unwrap();
        assert_eq!(trace.received(), 2 * 3 * 4 * 4 * 16);
        assert!(difference(&back.full_tensor(None).unwrap(), &x.full_tensor(None).unwrap()) < 1e-12);
    });
}

/// An exchange in pieces brings the same values and gradients to the last bit, and the same bytes.
#[rstest]
fn exchanges_in_pieces(#[values(1, 2, 3, 4)] mesh: usize, #[values(2, 3, 8)] pieces: usize) {
    on_mesh(MESHES[mesh], move |mesh| {
        let _guard = forbid_hidden_communication();
        let axes: Vec<usize> = (0..mesh.ndim()).collect();
        let group = mesh.group_along(&axes).unwrap();
        let mut dice = Dice(61);
        for _ in 0..40 {
            let shape = [dice.roll(1, 5), dice.roll(1, 7), dice.roll(1, 7), dice.roll(1, 5)];
            let layout = dice.layout(mesh, &shape, &[0, 1, 2, 3]);
            let run = |pieces| {
                let _pieces = TransformPieces::new(pieces);
                let trace = CommTrace::start(&group);
                let x = leaf(&numbers(&shape, 1), &layout);
                let spectrum = x.rfftn(&[], &[1, 2], FftNorm::Ortho).unwrap();
                let back = spectrum.irfftn(&shape[1..3], &[1, 2], FftNorm::Ortho).unwrap();
                back.mul(&back).unwrap().sum().unwrap().backward().unwrap();
                let spectrum = spectrum.view_as_real().unwrap().local().detach();
                (spectrum, back.local().detach(), x.grad().unwrap().local().copy(), trace.received())
            };
            let (at_once, cut) = (run(1), run(pieces));
            assert_eq!(cut, at_once, "{shape:?} {layout}");
        }
    });
}

/// Of 32 × 40 points split by rows, 8 × 4 modes: they alone travel, there and back, and in backward.
#[test]
fn only_the_modes_that_are_kept_travel() {
    on_mesh(&[2], |mesh| {
        let _guard = forbid_hidden_communication();
        let whole = numbers(&[3, 32, 40], 1);
        let layout = Layout::new(mesh, &[Placement::Shard(1)], &whole.size(), &Sizes::Chunk).unwrap();
        let x = leaf(&whole, &layout);
        let kept = [vec![0..4, 28..32], vec![0..1, 1..4]];
        // Of complex numbers of 16 bytes, what one rank gets from the other.
        let half = 3 * 8 * 4 / 2 * 16;
        let trace = CommTrace::start(&mesh.group_along(&[0]).unwrap());
        let modes = x.rfftn_modes(&[1, 2], &kept, FftNorm::Ortho).unwrap();
        assert_eq!(trace.received(), half);
        assert_eq!(modes.placements(), [Placement::Shard(2)]);
        let back = modes.irfftn_modes(&[32, 40], &[1, 2], &kept, FftNorm::Ortho).unwrap();
        assert_eq!(trace.received(), 2 * half);
        assert_eq!(back.layout(), x.layout());
        back.mul(&back).unwrap().sum().unwrap().backward().unwrap();
        // (And the sum.)
        assert!(trace.received() <= 4 * half + 16, "{} bytes", trace.received());
    });
}

/// Each rank makes the points that it has of a field that is split otherwise than evenly.
#[test]
fn points_are_made_where_a_field_lies() {
    on_mesh(&[2], |mesh| {
        let _guard = forbid_hidden_communication();
        let whole = numbers(&[3, 32, 40], 1);
        let sizes = Sizes::Explicit(vec![(1, vec![20, 12])]);
        let layout = Layout::new(mesh, &[Placement::Shard(1)], &whole.size(), &sizes).unwrap();
        let x = leaf(&whole, &layout);
        let kept = [vec![0..4, 28..32], vec![0..2, 2..4]];
        let modes = x.rfftn_modes(&[1, 2], &kept, FftNorm::Ortho).unwrap();
        let trace = CommTrace::start(&mesh.group_along(&[0]).unwrap());
        let back = modes.irfftn_modes_as(&x, &[1, 2], &kept, FftNorm::Ortho).unwrap();
        assert_eq!(back.layout(), x.layout());
        // The modes that the rank has not: of complex numbers of 16 bytes, half of them.
        assert_eq!(trace.received(), 3 * 8 * 4 / 2 * 16);
    });
}

#[test]
fn wrong_arguments_are_errors() {
    on_mesh(&[2], |mesh| {
        let x = ShardTensor::distribute(&numbers(&[4, 6], 1), mesh, &[Placement::Shard(0)]).unwrap();
        let norm = FftNorm::Backward;
        let error = |result: isobar_array::Result<ShardTensor>| result.unwrap_err().to_string();
        assert!(error(x.rfftn(&[], &[0, 0], norm)).contains("expected different ones"));
        assert!(error(x.rfftn(&[3], &[0, 1], norm)).contains("1 points for 2 dims"));
        assert!(error(x.rfftn(&[3, 0], &[0, 1], norm)).contains("expected at least 1 along each dim"));
        assert!(error(x.rfftn(&[], &[2], norm)).contains("dim 2"));
        let spectrum = x.rfftn(&[], &[0, 1], norm).unwrap();
        assert!(error(spectrum.rfftn(&[], &[0, 1], norm)).contains("is not real"));
        let modes = Modes { rows: 0..1, columns: 0..1 };
        assert!(error(x.rfft2_modes(-1, &modes, norm)).contains("dim 2 of a tensor with 2 dims"));
        assert!(error(x.irfft2_modes(1, [4, 6], &modes, norm)).contains("dim 3 of a tensor with 2 dims"));
        let shape =
            error(spectrum.irfftn_modes_as(&x.narrow(0, 0, 3).unwrap(), &[1], &[vec![0..2, 2..4]], norm));
        assert!(shape.contains("give no field [3, 6]"), "{shape}");
        let kept = [vec![0..1, 2..3]];
        assert!(error(x.irfftn_modes(&[6], &[1], &kept, norm)).contains("expected complex modes"));
        assert!(error(spectrum.irfftn_modes(&[], &[1], &kept, norm)).contains("expected complex modes"));
        let half = x.to_kind(Kind::Half).unwrap();
        assert!(error(half.fftn(&[], &[0], norm)).contains("convert to Float or Double first"));
    });
}

/// The rank's part along a dim, and the ranks' parts.
fn part(whole: &Tensor, dim: i64, sizes: &[i64], rank: usize) -> Tensor {
    whole.narrow(dim, sizes[..rank].iter().sum(), sizes[rank]).contiguous()
}

#[rstest]
fn transforms_of_ranks_own_tensors(#[values(1, 2, 3, 4)] ranks: usize) {
    threads::run(ranks, std::time::Duration::from_secs(60), move |group| {
        let mut dice = Dice(47);
        let rank = group.rank();
        for _ in 0..60 {
            let (height, width) = (*dice.pick(&EXTENTS), *dice.pick(&EXTENTS));
            let batch = dice.roll(1, 2);
            // The channels last, or first.
            let last = dice.chance(2);
            let shape = if last { vec![height, width, batch] } else { vec![batch, height, width] };
            let dims: [i64; 2] = if last { [0, 1] } else { [-2, -1] };
            let [first, second] = dims.map(|dim| dim.rem_euclid(3));
            let split = |dice: &mut Dice, extent| dice.pick(&SPLITS).parts(extent, ranks);
            let s = if dice.chance(2) { None } else { Some([dice.roll(1, 9), dice.roll(1, 9)]) };
            let [h, w] = s.unwrap_or([height, width]);
            let norm = *dice.pick(&NORMS);
            let what = format!("{shape:?} {dims:?} {s:?} {norm:?} on {ranks}");
            let close = |step: &str, a: &Tensor, b: &Tensor| {
                let real = |x: &Tensor| if x.is_complex() { x.view_as_real() } else { x.shallow_clone() };
                let (a, b) = (real(a), real(b));
                let scale = if b.numel() > 0 { b.abs().max().double_value(&[]).max(1.0) } else { 1.0 };
                assert!(difference(&a, &b) < 1e-11 * scale, "{step} of {what}");
            };

            let widths = split(&mut dice, width);
            let whole = numbers(&shape, 1).set_requires_grad(true);
            let mine = part(&whole.detach(), second, &widths, rank).set_requires_grad(true);
            let got = DistributedRfft2 { s, dims, norm }.apply(&mine, &group).unwrap();
            let want = whole.fft_rfft2(&[h, w][..], [first, second], norm.name());
            let rows = isobar_collectives::balanced(h, ranks);
            close("values", &got, &part(&want, first, &rows, rank));
            let power = |y: &Tensor| y.view_as_real().pow_tensor_scalar(3).sum(Kind::Double);
            let create = BackwardOptions { create_graph: true, ..Default::default() };
            let gradient = |y: &Tensor, x: &Tensor, options| {
                autograd::grad(&[y], &[x], &[None], options).unwrap().remove(0).unwrap()
            };
            let first_got = gradient(&power(&got), &mine, create);
            let first_want = gradient(&power(&want), &whole, create);
            close("gradient", &first_got, &part(&first_want, second, &widths, rank));
            let cubes = |g: &Tensor| g.pow_tensor_scalar(3).sum(Kind::Double);
            let second_got = gradient(&cubes(&first_got), &mine, Default::default());
            let second_want = gradient(&cubes(&first_want), &whole, Default::default());
            close("second gradient", &second_got, &part(&second_want, second, &widths, rank));

            let heights = split(&mut dice, height);
            let pairs = numbers(&[&shape[..], &[2]].concat(), 5);
            let whole = pairs.view_as_complex().set_requires_grad(true);
            let mine = part(&whole.detach(), first, &heights, rank).set_requires_grad(true);
            if s.is_none() && width == 1 {
                continue;
            }
            let got = DistributedIrfft2 { s, dims, norm }.apply(&mine, &group).unwrap();
            let size = s.unwrap_or([height, 2 * (width - 1)]);
            let want = whole.fft_irfft2(&size[..], [first, second], norm.name());
            let columns = isobar_collectives::balanced(size[1], ranks);
            close("inverse", &got, &part(&want, second, &columns, rank));
            let first_got = gradient(&cubes(&got), &mine, Default::default());
            let first_want = gradient(&cubes(&want), &whole, Default::default());
            close("gradient of the inverse", &first_got, &part(&first_want, first, &heights, rank));
        }
    });
}

#[test]
fn parts_that_do_not_fit_are_an_error_on_all_ranks() {
    let errors = threads::run(2, std::time::Duration::from_secs(30), |group| {
        let x = numbers(&[4 + group.rank() as i64, 3], 1);
        DistributedRfft2::default().apply(&x, &group).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("they may differ along dim 1 only")), "{errors:?}");
    let errors = threads::run(2, std::time::Duration::from_secs(30), |group| {
        let shape = if group.rank() == 0 { vec![4] } else { vec![4, 3] };
        DistributedRfft2::default().apply(&numbers(&shape, 1), &group).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("expected two dims")), "{errors:?}");
    let errors = threads::run(2, std::time::Duration::from_secs(30), |group| {
        let s = Some([4, 4 + group.rank() as i64]);
        let transform = DistributedRfft2 { s, ..Default::default() };
        transform.apply(&numbers(&[4, 3], 1), &group).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("s or norm")), "{errors:?}");
}

/// Ranges within so many modes, which may overlap; sometimes none.
fn ranges(dice: &mut Dice, modes: i64) -> Vec<std::ops::Range<i64>> {
    let range = |dice: &mut Dice| {
        let start = dice.roll(0, modes);
        start..dice.roll(start, modes)
    };
    (0..dice.roll(1, 2)).map(|_| range(dice)).collect()
}

#[rstest]
fn some_modes(#[values(1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let _guard = forbid_hidden_communication();
        let mut dice = Dice(53);
        for _ in 0..80 {
            let asked = RandomTransform { s: Vec::new(), ..RandomTransform::new(&mut dice) };
            let n = asked.shape.len() as i64;
            let extent = |dim: &i64| asked.shape[dim.rem_euclid(n) as usize];
            let last = asked.dims.len() - 1;
            let kept: Vec<_> = asked
                .dims
                .iter()
                .enumerate()
                .map(|(index, dim)| {
                    let modes = if index == last { extent(dim) / 2 + 1 } else { extent(dim) };
                    ranges(&mut dice, modes)
                })
                .collect();
            let what = format!("{:?} {:?} {:?}", asked.dims, kept, asked.norm);
            let all: Vec<usize> = (0..asked.shape.len()).collect();
            let x = numbers(&asked.shape, 1);
            let layout = dice.layout(mesh, &asked.shape, &all);
            same(
                &format!("rfftn_modes {what}"),
                &[(&x, &layout)],
                1e-10,
                |t| Ok(t[0].rfftn_modes(&asked.dims, &kept, asked.norm)?.view_as_real()?),
                |t| {
                    let modes = t[0].rfftn_modes(&asked.dims, &kept, asked.norm);
                    Ok(modes.map_err(|e| TchError::Torch(e.to_string()))?.view_as_real())
                },
            );
            let mut pairs = [&asked.shape[..], &[2]].concat();
            for (dim, ranges) in asked.dims.iter().zip(&kept) {
                pairs[dim.rem_euclid(n) as usize] = ranges.iter().map(|r| r.end - r.start).sum();
            }
            let points: Vec<i64> = asked.dims.iter().map(extent).collect();
            let x = numbers(&pairs, 2);
            let layout = dice.layout(mesh, &pairs, &all);
            same(
                &format!("irfftn_modes {what}"),
                &[(&x, &layout)],
                1e-10,
                |t| Ok(t[0].view_as_complex()?.irfftn_modes(&points, &asked.dims, &kept, asked.norm)?),
                |t| {
                    let pairs = Convert::view_as_complex(&t[0]);
                    let field = pairs.and_then(|x| x.irfftn_modes(&points, &asked.dims, &kept, asked.norm));
                    field.map_err(|e| TchError::Torch(e.to_string()))
                },
            );
            let place = dice.layout(mesh, &asked.shape, &all);
            let field = ShardTensor::distribute_as(&numbers(&asked.shape, 3), &place).unwrap();
            same(
                &format!("irfftn_modes_as {what}"),
                &[(&x, &layout)],
                1e-10,
                |t| {
                    let modes = t[0].view_as_complex()?;
                    let back = modes.irfftn_modes_as(&field, &asked.dims, &kept, asked.norm)?;
                    assert_eq!(back.layout(), &place);
                    Ok(back)
                },
                |t| {
                    let pairs = Convert::view_as_complex(&t[0]);
                    let field = pairs.and_then(|x| x.irfftn_modes(&points, &asked.dims, &kept, asked.norm));
                    field.map_err(|e| TchError::Torch(e.to_string()))
                },
            );
        }
    });
}
