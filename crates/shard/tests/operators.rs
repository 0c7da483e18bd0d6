//! Operators without windows against the dense ones, over random shapes and layouts.

use isobar_array::{Binary, Elementwise, Generator, RandomOps, Statistic, Unary, Window};
use isobar_shard::{Placement, ShardTensor};
use rstest::rstest;
use tch::{Kind, Tensor};

use crate::common::{Dice, MESHES, Split, numbers, on_mesh, same};

const ROUNDS: usize = 60;
const NEAR: f64 = 1e-9;

fn dims(count: usize) -> Vec<usize> {
    (0..count).collect()
}

#[rstest]
fn elementwise_and_broadcasting(#[values(1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(3);
        for round in 0..ROUNDS {
            let a = [dice.roll(1, 5), dice.roll(1, 5), dice.roll(1, 5)];
            let b: Vec<i64> =
                a[dice.roll(0, 2) as usize..].iter().map(|&n| if dice.chance(3) { 1 } else { n }).collect();
            let (la, lb) = (dice.layout(mesh, &a, &dims(3)), dice.layout(mesh, &b, &dims(b.len())));
            let (x, y) = (numbers(&a, round as i64), numbers(&b, 50));
            for function in [Binary::Add, Binary::Sub, Binary::Mul, Binary::Maximum] {
                let what = format!("{function:?}");
                same(
                    &what,
                    &[(&x, &la), (&y, &lb)],
                    NEAR,
                    |t| t[0].binary(function, &t[1]),
                    |t| match function {
                        Binary::Add => t[0].f_add(&t[1]),
                        Binary::Sub => t[0].f_sub(&t[1]),
                        Binary::Mul => t[0].f_mul(&t[1]),
                        _ => t[0].f_maximum(&t[1]),
                    },
                );
            }
            let c = x.gt(0.3);
            let lc = dice.layout(mesh, &a, &dims(3));
            same(
                "where",
                &[(&c, &lc), (&x, &la), (&y, &lb)],
                NEAR,
                |t| t[0].select_where(&t[1], &t[2]),
                |t| t[1].f_where_self(&t[0], &t[2]),
            );
            same("gelu", &[(&x, &la)], NEAR, |t| Ok(t[0].unary(Unary::Gelu)?), |t| t[0].f_gelu("none"));
            same(
                "masked_fill",
                &[(&x, &la), (&c, &lc)],
                NEAR,
                |t| t[0].masked_fill(&t[1], 2.0),
                |t| t[0].f_masked_fill(&t[1], 2.0),
            );
            let weight = numbers(&[a[1]], 9);
            let lw = dice.layout(mesh, &[a[1]], &[0]);
            same(
                "prelu",
                &[(&x, &la), (&weight, &lw)],
                NEAR,
                |t| Ok(t[0].prelu(&t[1])?),
                |t| t[0].f_prelu(&t[1]),
            );
            same("cast", &[(&x, &la)], 1e-6, |t| t[0].to_kind(Kind::Float), |t| t[0].f_to_kind(Kind::Float));
        }
    });
}

#[rstest]
fn products(#[values(1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(5);
        for round in 0..ROUNDS {
            let (n, i, k, j) = (dice.roll(1, 4), dice.roll(1, 6), dice.roll(1, 6), dice.roll(1, 6));
            let left = [n, i, k];
            let right: &[i64] = if dice.chance(2) { &[n, k, j] } else { &[k, j] };
            let (a, b) = (numbers(&left, round as i64), numbers(right, 8));
            let (la, lb) = (dice.layout(mesh, &left, &dims(3)), dice.layout(mesh, right, &dims(right.len())));
            same("matmul", &[(&a, &la), (&b, &lb)], NEAR, |t| t[0].matmul(&t[1]), |t| t[0].f_matmul(&t[1]));
            let (w, bias) = (numbers(&[j, k], 4), numbers(&[j], 6));
            let (lw, lbias) = (dice.layout(mesh, &[j, k], &[0, 1]), dice.layout(mesh, &[j], &[0]));
            let all = [(&a, &la), (&w, &lw), (&bias, &lbias)];
            same(
                "linear",
                &all,
                NEAR,
                |t| t[0].linear(&t[1], Some(&t[2])),
                |t| t[0].f_linear(&t[1], Some(&t[2])),
            );
            let third = numbers(&[i, j], 2);
            let lthird = dice.layout(mesh, &[i, j], &[0, 1]);
            let all = [(&a, &la), (&w, &lw), (&third, &lthird)];
            for equation in ["nik,jk,ij->n", "nik,jk,ij->kij", "nik,jk,ij->nij"] {
                same(
                    equation,
                    &all,
                    NEAR,
                    |t| ShardTensor::einsum(equation, &t.iter().collect::<Vec<_>>()),
                    |t| Tensor::f_einsum(equation, t, None::<i64>),
                );
            }
        }
    });
}

#[rstest]
fn diagonals(#[values(1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(17);
        for round in 0..ROUNDS {
            let (n, i) = (dice.roll(1, 4), dice.roll(1, 6));
            let (square, cube, row) = ([i, n, i], [i, i, i], [i]);
            // One dim of those with the letter may be split.
            let own = *dice.pick(&[0_usize, 2]);
            let (a, la) = (numbers(&square, round as i64), dice.layout(mesh, &square, &[own, 1]));
            let (b, lb) = (numbers(&cube, 3), dice.layout(mesh, &cube, &[1]));
            let (c, lc) = (numbers(&row, 4), dice.layout(mesh, &row, &[0]));
            for (equation, all) in [
                ("ini->ni", &[(&a, &la)][..]),
                ("ini", &[(&a, &la)]),
                ("iii->i", &[(&b, &lb)]),
                ("ini,i->n", &[(&a, &la), (&c, &lc)]),
                ("ini,jjj->nj", &[(&a, &la), (&b, &lb)]),
            ] {
                same(
                    equation,
                    all,
                    NEAR,
                    |t| ShardTensor::einsum(equation, &t.iter().collect::<Vec<_>>()),
                    |t| Tensor::f_einsum(equation, t, None::<i64>),
                );
            }
        }
    });
}

#[test]
fn a_diagonal_of_two_sharded_dims_is_refused() {
    let _ = on_mesh(&[2, 2], |mesh| {
        let split = [Placement::Shard(0), Placement::Shard(1)];
        let refused = |shape: &[i64]| {
            let x = ShardTensor::distribute(&numbers(shape, 1), mesh, &split).unwrap();
            ShardTensor::einsum("ii->i", &[&x]).unwrap_err().to_string()
        };
        let text = refused(&[4, 4]);
        assert!(
            text.contains("dims [0, 1], of which 2 are sharded") && text.contains("redistribute"),
            "{text}"
        );
        let text = refused(&[4, 3]);
        assert!(text.contains("the extents [4, 3]; expected equal extents"), "{text}");
    });
}

#[rstest]
fn statistics(#[values(1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(29);
        let all = [
            Statistic::Sum,
            Statistic::Mean,
            Statistic::Max,
            Statistic::Min,
            Statistic::Prod,
            Statistic::Norm,
            Statistic::PNorm { p: 0.0 },
            Statistic::PNorm { p: 1.0 },
            Statistic::PNorm { p: 3.0 },
            Statistic::PNorm { p: 0.5 },
            Statistic::PNorm { p: -1.5 },
            Statistic::PNorm { p: f64::INFINITY },
            Statistic::PNorm { p: f64::NEG_INFINITY },
            Statistic::LogSumExp,
            Statistic::Var { correction: 1 },
            Statistic::Std { correction: 0 },
            Statistic::Any,
            Statistic::All,
        ];
        for round in 0..ROUNDS {
            let shape = [dice.roll(1, 4), dice.roll(2, 9), dice.roll(2, 4)];
            let layout = dice.layout(mesh, &shape, &dims(3));
            let mut x = numbers(&shape, round as i64);
            if dice.chance(3) {
                // Ties, zeros.
                x = x.round();
            }
            let choices: [&[i64]; 6] = [&[1], &[0, 1], &[1, 2], &[0, 1, 2], &[], &[-1]];
            let over = choices[dice.roll(0, 5) as usize];
            let keep = dice.chance(2);
            let wide: Vec<i64> = if over.is_empty() { vec![0, 1, 2] } else { over.to_vec() };
            let fold = |t: &Tensor, f: &dyn Fn(&Tensor, i64) -> Result<Tensor, tch::TchError>| {
                let mut positive: Vec<i64> = wide.iter().map(|dim| dim.rem_euclid(3)).collect();
                positive.sort_unstable();
                positive.iter().rev().try_fold(t.shallow_clone(), |t, &dim| f(&t, dim))
            };
            for statistic in all {
                let what = format!("{statistic:?} over {over:?}");
                let sharded = |t: &[ShardTensor]| t[0].statistic(statistic, over, keep);
                same(&what, &[(&x, &layout)], 1e-8, sharded, |t| {
                    let (t, wide) = (&t[0], wide.as_slice());
                    match statistic {
                        Statistic::Sum => t.f_sum_dim_intlist(wide, keep, None),
                        Statistic::Mean => t.f_mean_dim(wide, keep, None),
                        Statistic::Max => t.f_amax(wide, keep),
                        Statistic::Min => t.f_amin(wide, keep),
                        Statistic::Prod => fold(t, &|t, dim| t.f_prod_dim_int(dim, keep, None)),
                        Statistic::Norm => t.f_norm_scalaropt_dim(2.0, wide, keep),
                        Statistic::PNorm { p } => t.f_norm_scalaropt_dim(p, wide, keep),
                        Statistic::LogSumExp => t.f_logsumexp(wide, keep),
                        Statistic::Var { correction } => t.f_var_correction(wide, correction, keep),
                        Statistic::Std { correction } => t.f_std_correction(wide, correction, keep),
                        Statistic::Any => fold(&t.f_ne(0.0)?, &|t, dim| t.f_any_dim(dim, keep)),
                        Statistic::All => fold(&t.f_ne(0.0)?, &|t, dim| t.f_all_dim(dim, keep)),
                    }
                });
            }
            let dim = dice.roll(-3, 2);
            let with = [(&x, &layout)];
            same("argmax", &with, NEAR, |t| t[0].argmax(Some(dim), keep), |t| t[0].f_argmax(dim, keep));
            same("argmin", &with, NEAR, |t| t[0].argmin(None, false), |t| t[0].f_argmin(None, false));
            same("softmax", &with, NEAR, |t| t[0].softmax(dim), |t| t[0].f_softmax(dim, None));
            same("log_softmax", &with, NEAR, |t| t[0].log_softmax(dim), |t| t[0].f_log_softmax(dim, None));
            same("cumsum", &with, NEAR, |t| t[0].cumsum(dim), |t| t[0].f_cumsum(dim, None));
        }
    });
}

/// Columns by rows: the largest operand has extent 1 along the dim that a smaller one splits.
#[rstest]
fn outer_operations(#[values(1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(61);
        for round in 0..ROUNDS {
            let (n, m) = (dice.roll(1, 5), dice.roll(4, 9));
            let column = [n, 1];
            let row = if dice.chance(2) { vec![1, m] } else { vec![m] };
            let lc = dice.layout(mesh, &column, &[0]);
            let lr = dice.layout(mesh, &row, &[row.len() - 1]);
            let (x, y) = (numbers(&column, round as i64), numbers(&row, 50));
            let both = [(&x, &lc), (&y, &lr)];
            same("column · row", &both, NEAR, |t| t[0].mul(&t[1]), |t| t[0].f_mul(&t[1]));
            same("row − column", &both, NEAR, |t| t[1].sub(&t[0]), |t| t[1].f_sub(&t[0]));
        }
    });
}

/// Sums and means of sums that are partial.
#[rstest]
fn sums_of_partial_sums(#[values(1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(67);
        for round in 0..ROUNDS {
            let shape = [dice.roll(1, 5), dice.roll(1, 5), dice.roll(1, 5)];
            let layout = dice.layout(mesh, &shape, &dims(3));
            let x = numbers(&shape, round as i64);
            let (first, keep) = (dice.roll(0, 2), dice.chance(2));
            let second = *dice.pick(&[-1, 0]);
            for statistic in [Statistic::Sum, Statistic::Mean] {
                same(
                    "a statistic of a sum",
                    &[(&x, &layout)],
                    NEAR,
                    |t| {
                        let sum = t[0].statistic(Statistic::Sum, &[first], false)?;
                        sum.statistic(statistic, &[second], keep)
                    },
                    |t| {
                        let sum = t[0].f_sum_dim_intlist([first].as_slice(), false, None)?;
                        match statistic {
                            Statistic::Sum => sum.f_sum_dim_intlist([second].as_slice(), keep, None),
                            _ => sum.f_mean_dim([second].as_slice(), keep, None),
                        }
                    },
                );
            }
        }
    });
}

/// Chunks of no elements are as many as were asked for.
#[test]
fn empty_chunks() {
    on_mesh(&[2], |mesh| {
        let x = numbers(&[2, 0], 1);
        let layout = Split::Chunk.layout(mesh, &[Placement::Shard(0)], &[2, 0]);
        let parts = ShardTensor::distribute_as(&x, &layout).unwrap().chunk(3, 1).unwrap();
        let want = x.chunk(3, 1);
        assert_eq!(parts.len(), want.len());
        assert!(parts.iter().zip(&want).all(|(part, want)| part.shape() == want.size()));
    });
}

#[rstest]
fn views(#[values(1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(37);
        for round in 0..2 * ROUNDS {
            let (a, b, c, d) = (dice.roll(1, 4), dice.roll(1, 4), dice.roll(1, 4), dice.roll(1, 3));
            let shapes = [
                vec![a, b, c, d],
                vec![a * b, c, d],
                vec![a, b * c, d],
                vec![a, b, c * d],
                vec![a * b * c, d],
                vec![a, b * c * d],
                vec![a * b * c * d],
                vec![1, a, 1, b * c, 1, d],
                vec![c, a * b, d],
                vec![d * c, b, a],
            ];
            let (from, to) = (dice.pick(&shapes).clone(), dice.pick(&shapes).clone());
            let layout = dice.layout(mesh, &from, &dims(from.len()));
            let x = numbers(&from, round as i64);
            let with = [(&x, &layout)];
            let what = format!("reshape {from:?} to {to:?}");
            same(&what, &with, NEAR, |t| t[0].reshape(&to), |t| t[0].f_reshape(&to));
            let what = format!("reshape {from:?} to {to:?} and back");
            same(
                &what,
                &with,
                NEAR,
                |t| t[0].reshape(&to)?.reshape(&from),
                |t| t[0].f_reshape(&to)?.f_reshape(&from),
            );

            let shape = [dice.roll(1, 5), dice.roll(1, 7), dice.roll(1, 5)];
            let layout = dice.layout(mesh, &shape, &dims(3));
            let x = numbers(&shape, round as i64);
            let with = [(&x, &layout)];
            let order = *dice.pick(&[[2, 0, 1], [1, 0, 2], [0, 2, 1]]);
            same("permute", &with, NEAR, |t| t[0].permute(&order), |t| t[0].f_permute(order));
            same("transpose", &with, NEAR, |t| t[0].transpose(0, -1), |t| t[0].f_transpose(0, -1));
            same("squeeze", &with, NEAR, |t| t[0].squeeze(&[]), |t| t[0].f_squeeze());
            same("unsqueeze", &with, NEAR, |t| t[0].unsqueeze(-2), |t| t[0].f_unsqueeze(-2));
            let repeats = [dice.roll(1, 2), dice.roll(1, 3), 1, dice.roll(1, 2)];
            same("repeat", &with, NEAR, |t| t[0].repeat(&repeats), |t| t[0].f_repeat(repeats));
            let dim = dice.roll(0, 2);
            let extent = shape[dim as usize];
            let (start, end, step) =
                (dice.roll(-extent - 1, extent), dice.roll(-extent, extent + 2), dice.roll(1, 3));
            let what = format!("slice {dim} {start}..{end} by {step} of {shape:?}");
            same(
                &what,
                &with,
                NEAR,
                |t| t[0].slice(dim, Some(start), Some(end), step),
                |t| t[0].f_slice(dim, start, end, step),
            );
            let index = dice.roll(-extent, extent - 1);
            same("select", &with, NEAR, |t| t[0].select(dim, index), |t| t[0].f_select(dim, index));
            same(
                "unbind",
                &with,
                NEAR,
                |t| t[0].unbind(dim).map(|mut all| all.remove(0)),
                |t| Ok(t[0].f_unbind(dim)?.remove(0)),
            );
            let cut = dice.roll(0, extent);
            same(
                "split",
                &with,
                NEAR,
                |t| t[0].split(&[cut, extent - cut], dim).map(|mut all| all.remove(1)),
                |t| t[0].f_narrow(dim, cut, extent - cut),
            );
            let mut other = shape;
            other[dim as usize] = dice.roll(0, 5);
            let lo = dice.layout(mesh, &other, &dims(3));
            let y = numbers(&other, 3);
            let both = [(&x, &layout), (&y, &lo)];
            same(
                "cat",
                &both,
                NEAR,
                |t| ShardTensor::cat(&[&t[0], &t[1]], dim),
                |t| Tensor::f_cat(&[&t[0], &t[1]], dim),
            );
            same(
                "cat and sum",
                &both,
                NEAR,
                |t| ShardTensor::cat(&[&t[0], &t[1]], dim)?.cumsum(dim),
                |t| Tensor::f_cat(&[&t[0], &t[1]], dim)?.f_cumsum(dim, None),
            );
            let ly = dice.layout(mesh, &shape, &dims(3));
            let y = numbers(&shape, 9);
            let both = [(&x, &layout), (&y, &ly)];
            same(
                "stack",
                &both,
                NEAR,
                |t| ShardTensor::stack(&[&t[0], &t[1]], dim),
                |t| Tensor::f_stack(&[&t[0], &t[1]], dim),
            );
            let ones: Vec<i64> = shape.iter().map(|&n| if dice.chance(2) { 1 } else { n }).collect();
            let lo = dice.layout(mesh, &ones, &dims(3));
            let y = numbers(&ones, 9);
            let wide = [&[2][..], &shape].concat();
            same("expand", &[(&y, &lo)], NEAR, |t| t[0].expand(&wide), |t| t[0].f_expand(&wide, false));
        }
    });
}

#[rstest]
fn other_kinds_of_view(#[values(1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(41);
        for round in 0..ROUNDS {
            let shape = [dice.roll(1, 4), 2 * dice.roll(1, 6)];
            let layout = dice.layout(mesh, &shape, &[0, 1]);
            let x = numbers(&shape, round as i64).detach();
            for kind in [Kind::Int64, Kind::Float, Kind::Int16, Kind::ComplexDouble] {
                let want = x.f_view_dtype(kind);
                let got = ShardTensor::distribute_as(&x, &layout).unwrap().view_kind(kind);
                match want {
                    Ok(want) => {
                        // Bits, since some of them are NaN.
                        let bits = |t: &Tensor| t.contiguous().reshape(-1).view_dtype(Kind::Uint8);
                        let full = got.unwrap().full_tensor(None).unwrap();
                        assert_eq!(
                            (full.size(), bits(&full)),
                            (want.size(), bits(&want)),
                            "{kind:?} of {layout}"
                        );
                    }
                    Err(_) => assert!(got.is_err()),
                }
            }
        }
    });
}

#[rstest]
fn indices_and_orders(#[values(1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(43);
        for round in 0..ROUNDS {
            let shape = [dice.roll(1, 4), dice.roll(2, 11), dice.roll(1, 4)];
            let layout = dice.layout(mesh, &shape, &dims(3));
            let x = numbers(&shape, round as i64);
            let (dim, count) = (dice.roll(0, 2), dice.roll(0, 8));
            let extent = shape[dim as usize];
            let picks: Vec<i64> = (0..count).map(|_| dice.roll(0, extent - 1)).collect();
            let index = Tensor::from_slice(&picks);
            let li = dice.layout(mesh, &[count], &[0]);
            let what = format!("index_select {dim} {picks:?}");
            same(
                &what,
                &[(&x, &layout), (&index, &li)],
                NEAR,
                |t| t[0].index_select(dim, &t[1]),
                |t| t[0].f_index_select(dim, &t[1]),
            );
            let mut source = shape;
            source[dim as usize] = count;
            let ls = dice.layout(mesh, &source, &dims(3));
            let values = numbers(&source, 3);
            let what = format!("index_add {dim} {picks:?}");
            let all = [(&x, &layout), (&index, &li), (&values, &ls)];
            same(
                &what,
                &all,
                NEAR,
                |t| t[0].index_add(dim, &t[1], &t[2]),
                |t| t[0].f_index_add(dim, &t[1], &t[2]),
            );

            let mut walked = shape.map(|n| dice.roll(1, n));
            walked[dim as usize] = count.max(1);
            let total: i64 = walked.iter().product();
            let picks: Vec<i64> = (0..total).map(|_| dice.roll(0, extent - 1)).collect();
            let index = Tensor::from_slice(&picks).view(walked);
            let li = dice.layout(mesh, &walked, &dims(3));
            let what = format!("gather {dim} {walked:?} of {shape:?}");
            same(
                &what,
                &[(&x, &layout), (&index, &li)],
                NEAR,
                |t| t[0].gather(dim, &t[1]),
                |t| t[0].f_gather(dim, &t[1], false),
            );
            // Of a larger source, the leading part counts.
            let given = walked.map(|n| n + dice.roll(0, 2));
            let values = numbers(&given, 4);
            let ls = dice.layout(mesh, &given, &dims(3));
            let what = format!("scatter_add {dim} {walked:?} of {given:?} to {shape:?}");
            let all = [(&x, &layout), (&index, &li), (&values, &ls)];
            same(
                &what,
                &all,
                NEAR,
                |t| t[0].scatter_add(dim, &t[1], &t[2]),
                |t| {
                    let source =
                        (0..).zip(walked).try_fold(t[2].shallow_clone(), |x, (d, n)| x.f_narrow(d, 0, n))?;
                    t[0].f_scatter_add(dim, &t[1], &source)
                },
            );

            let table = numbers(&[shape[1], 3], 6);
            let lt = dice.layout(mesh, &[shape[1], 3], &[0, 1]);
            let picks: Vec<i64> = (0..6).map(|_| dice.roll(0, shape[1] - 1)).collect();
            let index = Tensor::from_slice(&picks).view([2, 3]);
            let li = dice.layout(mesh, &[2, 3], &[0, 1]);
            same(
                "embedding",
                &[(&table, &lt), (&index, &li)],
                NEAR,
                |t| t[0].embedding(&t[1]),
                |t| Tensor::f_embedding(&t[0], &t[1], -1, false, false),
            );

            let with = [(&x, &layout)];
            let down = dice.chance(2);
            same(
                "sort",
                &with,
                NEAR,
                |t| Ok(t[0].sort(dim, down)?.0),
                |t| Ok(t[0].f_sort_stable(true, dim, down)?.0),
            );
            same(
                "sort's places",
                &with,
                NEAR,
                |t| Ok(t[0].sort(dim, down)?.1),
                |t| Ok(t[0].f_sort_stable(true, dim, down)?.1),
            );
            let k = dice.roll(0, extent);
            same(
                "topk",
                &with,
                NEAR,
                |t| Ok(t[0].topk(k, dim, down)?.0),
                |t| Ok(t[0].f_topk(k, dim, down, true)?.0),
            );
            same(
                "topk's places",
                &with,
                NEAR,
                |t| Ok(t[0].topk(k, dim, down)?.1),
                |t| Ok(t[0].f_topk(k, dim, down, true)?.1),
            );
            // A single row, with equal ones.
            let length = dice.roll(1, 17);
            let row = numbers(&[length], round as i64);
            let row = if dice.chance(2) { row.round() } else { row };
            let lr = dice.layout(mesh, &[length], &[0]);
            same(
                "sort of a row",
                &[(&row, &lr)],
                NEAR,
                |t| Ok(t[0].sort(0, down)?.0),
                |t| Ok(t[0].f_sort_stable(true, 0, down)?.0),
            );
            same(
                "its places",
                &[(&row, &lr)],
                NEAR,
                |t| Ok(t[0].sort(0, down)?.1),
                |t| Ok(t[0].f_sort_stable(true, 0, down)?.1),
            );
        }
    });
}

#[test]
fn an_index_out_of_range_is_an_error_on_all_ranks() {
    on_mesh(&[3], |mesh| {
        let mut dice = Dice(1);
        let layout = dice.layout(mesh, &[9, 2], &[0]);
        let split = isobar_shard::Layout::new(
            mesh,
            &[isobar_shard::Placement::Shard(0)],
            &[9, 2],
            &Default::default(),
        );
        let x = ShardTensor::distribute_as(&numbers(&[9, 2], 1), &split.unwrap()).unwrap();
        let index = Tensor::from_slice(&[1_i64, 9, 2]);
        let index = ShardTensor::distribute(&index, mesh, &[isobar_shard::Placement::Shard(0)]).unwrap();
        let error = x.index_select(0, &index).unwrap_err().to_string();
        assert!(error.contains("index 9 is out of range for dim 0 of extent 9"), "{error}");
        drop(layout);
    });
}

/// A small model, written once over `Array`: a perceptron after a convolution, with dropout of whole channels.
fn model<A: isobar_array::Array>(
    x: &A,
    weights: &[A],
    generator: &isobar_array::Generator,
) -> isobar_shard::Result<A> {
    let conv = isobar_array::Conv2d { padding: [1, 1], ..Default::default() };
    let y = x.conv2d(&weights[0], None, &conv)?.gelu()?;
    let shape = y.shape();
    let window = isobar_array::Window::whole(&[shape[0], shape[1], 1, 1]);
    let y = y.dropout(0.25, generator, &window)?.permute(&[0, 2, 3, 1])?;
    let y = y.linear(&weights[1], None)?.softmax(-1)?;
    let spectrum = y.rfft2([1, 2], isobar_array::FftNorm::Ortho)?.view_as_real()?;
    Ok(spectrum.mse_loss(&spectrum.detach()?.mul_scalar(0.5)?)?)
}

#[rstest]
fn a_model_over_array_is_the_same_dense_and_sharded(#[values(1, 2, 3, 4)] mesh: usize) {
    use isobar_array::Generator;
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(53);
        let shapes = [vec![2, 3, 7, 6], vec![4, 3, 3, 3], vec![5, 4]];
        let wholes: Vec<Tensor> = shapes.iter().enumerate().map(|(i, s)| numbers(s, i as i64)).collect();
        for _ in 0..10 {
            let layouts: Vec<_> = [
                dice.layout(mesh, &shapes[0], &[0, 2, 3]),
                dice.layout(mesh, &shapes[1], &[]),
                dice.layout(mesh, &shapes[2], &[]),
            ]
            .into();
            let with: Vec<_> = wholes.iter().zip(&layouts).collect();
            same(
                "model",
                &with,
                NEAR,
                |t| model(&t[0], &[t[1].shallow_clone(), t[2].shallow_clone()], &Generator::new(4)),
                |t| {
                    let weights = [t[1].shallow_clone(), t[2].shallow_clone()];
                    model(&t[0], &weights, &Generator::new(4))
                        .map_err(|e| tch::TchError::Torch(e.to_string()))
                },
            );
        }
    });
}

/// All operators of fields, written once over `Array`.
fn fields<A: isobar_array::Array>(x: &A, weights: &[A]) -> isobar_shard::Result<A> {
    use isobar_array::{Conv, Interpolation, PadMode, Padding, Pool, Resize, RunningStats};
    let [kernel, transposed, scale, bias] = weights else { panic!("four weights") };
    let (scale, bias) = (Some(scale), Some(bias));
    let padding = Padding::Each(vec![1]);
    let conv = Conv { padding: padding.clone(), padding_mode: PadMode::Circular, ..Conv::default() };
    let y = x.conv(kernel, bias, &conv)?.group_norm(2, scale, bias, 1e-2)?;
    let same = Conv { padding: Padding::Same, ..Conv::default() };
    let y = y.conv(kernel, None, &same)?.instance_norm(scale, bias, 1e-2)?;
    let wide = Conv { stride: vec![2], padding, ..Conv::default() };
    let y = y.conv_transpose(transposed, bias, &wide, &[1])?;
    let pool = Pool { ceil_mode: true, ..Pool::new(&[3, 2]) };
    let y = y.max_pool(2, &pool)?.0.add(&y.avg_pool(2, &pool)?)?;
    let y = y.interpolate(&Resize::Scale(vec![1.5]), Interpolation::Linear, false)?;
    let y = y.pad_mode(&[1, 2, 0, 1], PadMode::Reflect, 0.0)?;
    let stat =
        |value: f64| x.detach()?.select(0, 0)?.select(1, 0)?.select(1, 0)?.mul_scalar(0.0)?.add_scalar(value);
    let (mean, var) = (stat(0.5)?, stat(2.0)?);
    let running = || Some(RunningStats { mean: &mean, var: &var, momentum: 0.3 });
    let trained = y.batch_norm(scale, bias, running(), true, 1e-2)?;
    Ok(y.batch_norm(scale, None, running(), false, 1e-2)?.mul(&trained)?)
}

#[rstest]
fn fields_over_array_are_the_same_dense_and_sharded(#[values(1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(71);
        let shapes = [vec![2, 4, 7, 6], vec![4, 4, 3, 3], vec![4, 4, 3, 3], vec![4], vec![4]];
        let wholes: Vec<Tensor> = shapes.iter().enumerate().map(|(i, s)| numbers(s, i as i64)).collect();
        for _ in 0..10 {
            let split = [0, 2, 3];
            let layouts: Vec<_> = shapes
                .iter()
                .enumerate()
                .map(|(index, shape)| dice.layout(mesh, shape, if index == 0 { &split } else { &[] }))
                .collect();
            let with: Vec<_> = wholes.iter().zip(&layouts).collect();
            let _guard = isobar_shard::forbid_hidden_communication();
            same(
                "fields",
                &with,
                1e-8,
                |t| fields(&t[0], &t[1..]),
                |t| fields(&t[0], &t[1..]).map_err(|e| tch::TchError::Torch(e.to_string())),
            );
        }
    });
}

/// A tensor that is some rows of a larger one, as a part of a batch is, loses those elements that the larger one loses there.
#[rstest]
fn dropout_of_a_part_is_that_of_the_whole(
    #[values(1, 2, 3, 4)] mesh: usize,
    #[values([5, 4, 3], [5, 1, 3])] mask: [i64; 3],
) {
    on_mesh(MESHES[mesh], move |mesh| {
        let mut dice = Dice(5);
        for _ in 0..ROUNDS / 4 {
            let (first, rows) = (dice.roll(0, 2), dice.roll(1, 3));
            let shape = [rows, 4, 3];
            let layout = dice.layout(mesh, &shape, &dims(3));
            let window = Window::whole(&mask).narrow(0, first, rows).unwrap();
            let dropped = |x: &ShardTensor| RandomOps::dropout(x, 0.4, &Generator::new(7), &window);
            let dense = |x: &Tensor| Ok(RandomOps::dropout(x, 0.4, &Generator::new(7), &window).unwrap());
            let x = numbers(&shape, 2);
            same("dropout", &[(&x, &layout)], NEAR, |t| Ok(dropped(&t[0])?), |t| dense(&t[0]));
        }
    });
}
