//! reduce_scatter_v, all_to_all_v, transpose and indexed_all_to_all_v against slices and concatenation.

use isobar_collectives::{
    Error, ReduceOp, all_to_all_v, indexed_all_to_all_v, reduce_scatter_v, start, transpose,
};
use tch::{Kind, Tensor};

use super::data::{KINDS, Memory, is_channels_last, laid_out, mix, splits};
use super::gathers::{forms, with_extent};
use super::reductions::{combined, reducible};
use super::{Case, Suite};

pub(crate) const CASES: &[Case] = &[
    ("reduce_scatter_v", reduce_scatter),
    ("all_to_all_v", all_to_all),
    ("transpose", transposes),
    ("indexed_all_to_all_v", indexed),
    ("indexed_scatter_add_v", indexed_back),
];

fn reduce_scatter(suite: &mut Suite<'_>) -> Result<(), Error> {
    let ops = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];
    for (n, (shape, dim, kind, memory)) in forms().into_iter().enumerate() {
        let sizes = &splits(suite.ranks())[n % 4];
        let op = ops[n % 5];
        if !reducible(op, kind) {
            continue;
        }
        let id = suite.fresh();
        let whole = with_extent(&shape, dim, sizes.iter().sum());
        let inputs: Vec<Tensor> =
            (0..suite.ranks()).map(|r| laid_out(&suite.data(id, r, &whole, kind), memory)).collect();
        let own = &inputs[suite.rank()];
        let equal = sizes.iter().all(|&size| size == sizes[0]);
        let given = (!equal || n % 3 == 0).then_some(sizes.as_slice());
        let got = suite.unchanged(&[own], |s| reduce_scatter_v(own, given, dim, op, true, s.group))?;
        let start: i64 = sizes[..suite.rank()].iter().sum();
        let want = combined(&inputs, op, true).narrow(dim, start, sizes[suite.rank()]);
        let what = format!("{op:?} of {shape:?} {memory:?} along {dim} with sizes {sizes:?}");
        suite.same_reduction(&what, op, &got, &want);
    }
    Ok(())
}

/// Extents that rank `from` sends to rank `to`, empty ones among them.
fn count(seed: u64, from: usize, to: usize) -> i64 {
    (mix(seed ^ mix((from * 64 + to) as u64)) % 4) as i64
}

fn table(seed: u64, ranks: usize) -> Vec<Vec<i64>> {
    (0..ranks).map(|from| (0..ranks).map(|to| count(seed, from, to)).collect()).collect()
}

fn all_to_all(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    for (n, (shape, dim, kind, memory)) in forms().into_iter().enumerate() {
        let id = suite.fresh();
        let equal = n % 5 == 0;
        let table = if equal { vec![vec![2; ranks]; ranks] } else { table(id, ranks) };
        let inputs: Vec<Tensor> = (0..ranks)
            .map(|r| suite.data(id, r, &with_extent(&shape, dim, table[r].iter().sum()), kind))
            .map(|tensor| laid_out(&tensor, memory))
            .collect();
        let own = &inputs[rank];
        let receive: Vec<i64> = table.iter().map(|from| from[rank]).collect();
        let got = suite.unchanged(&[own], |s| match equal {
            true => all_to_all_v(own, None, None, dim, s.group),
            false => all_to_all_v(own, Some(&table[rank]), Some(&receive), dim, s.group),
        })?;
        let blocks: Vec<Tensor> = (0..ranks)
            .map(|r| inputs[r].narrow(dim, table[r][..rank].iter().sum(), table[r][rank]))
            .collect();
        suite.same(
            &format!("{shape:?} {memory:?} along {dim} by {table:?}"),
            &got,
            &Tensor::cat(&blocks, dim),
        );
    }
    Ok(())
}

fn transposes(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    let shapes: [(&[i64], Kind); 4] = [
        (&[0, 0], Kind::Int8),
        (&[0, 0, 3], Kind::Float),
        (&[2, 0, 0, 3], Kind::ComplexFloat),
        (&[0, 3, 40, 0], Kind::Double),
    ];
    for (shape, kind) in shapes {
        let dims = shape.len() as i64;
        for (n, memory) in [Memory::Contiguous, Memory::Transposed, Memory::Window, Memory::ChannelsLast]
            .into_iter()
            .enumerate()
        {
            for (split, concat) in [(0, 1), (1, 0), (0, dims - 1), (-1, 0)] {
                let splits = splits(ranks);
                let (split_sizes, concat_sizes) = (&splits[(n + 1) % 4], &splits[(n + 2) % 4]);
                let id = suite.fresh();
                let mut dense: Vec<i64> = shape.iter().map(|&extent| extent.max(2)).collect();
                dense = with_extent(&dense, split, split_sizes.iter().sum());
                dense = with_extent(&dense, concat, concat_sizes.iter().sum());
                let dense = suite.data(id, 0, &dense, kind);
                let part =
                    |dim: i64, sizes: &[i64]| dense.narrow(dim, sizes[..rank].iter().sum(), sizes[rank]);
                let own = laid_out(&part(concat, concat_sizes), memory);
                let got = suite.unchanged(&[&own], |s| {
                    transpose(&own, split, Some(split_sizes), concat, Some(concat_sizes), s.group)
                })?;
                suite.same(
                    &format!(
                        "{shape:?} {memory:?} from {concat} {concat_sizes:?} to {split} {split_sizes:?}"
                    ),
                    &got,
                    &part(split, split_sizes),
                );
            }
        }
    }
    let id = suite.fresh();
    let dense = suite.data(id, 0, &[2 * ranks as i64, 3, 3 * ranks as i64], Kind::Int);
    let own = dense.narrow(0, 2 * rank as i64, 2);
    let got = transpose(&own, 2, None, 0, None, suite.group)?;
    suite.same("equal parts", &got, &dense.narrow(2, 3 * rank as i64, 3));
    Ok(())
}

/// Rows that every rank sends to every other: `rows[from][to]`.
struct Rows {
    rows: Vec<Vec<Vec<i64>>>,
    sizes: Vec<Vec<i64>>,
}

impl Rows {
    /// Draws rows, each below the sender's extent: repeated ones, several for one, none for some.
    fn draw(seed: u64, extents: &[i64]) -> Self {
        let ranks = extents.len();
        let row = |from: usize, to: usize, n: i64| {
            (mix(seed ^ mix((from * 4096 + to * 64) as u64 + n as u64)) % extents[from] as u64) as i64
        };
        let counted = |from: usize, to: usize| if extents[from] == 0 { 0 } else { count(seed, from, to) * 2 };
        let rows: Vec<Vec<Vec<i64>>> = (0..ranks)
            .map(|from| {
                (0..ranks).map(|to| (0..counted(from, to)).map(|n| row(from, to, n)).collect()).collect()
            })
            .collect();
        let sizes = rows.iter().map(|to| to.iter().map(|list| list.len() as i64).collect()).collect();
        Self { rows, sizes }
    }

    fn indices(&self, rank: usize) -> Vec<Tensor> {
        self.rows[rank].iter().map(|list| Tensor::from_slice(list)).collect()
    }
}

fn indexed(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    for (n, (shape, dim, kind, memory)) in forms().into_iter().enumerate() {
        let id = suite.fresh();
        // Ranks hold different extents, one of them nothing.
        let extents: Vec<i64> = (0..ranks as i64).map(|r| if n % 4 == 1 { r } else { r + 2 }).collect();
        let inputs: Vec<Tensor> = (0..ranks)
            .map(|r| laid_out(&suite.data(id, r, &with_extent(&shape, dim, extents[r]), kind), memory))
            .collect();
        let rows = Rows::draw(id, &extents);
        let indices = rows.indices(rank);
        let own = &inputs[rank];
        let mut watched: Vec<&Tensor> = vec![own];
        watched.extend(&indices);
        let got = suite
            .unchanged(&watched, |s| indexed_all_to_all_v(own, &indices, &rows.sizes, true, dim, s.group))?;
        let blocks: Vec<Tensor> = (0..ranks)
            .map(|from| inputs[from].index_select(dim, &Tensor::from_slice(&rows.rows[from][rank])))
            .collect();
        let what = format!("{shape:?} {memory:?} along {dim} by {:?}", rows.rows);
        suite.same(&what, &got, &Tensor::cat(&blocks, dim));
        suite.check(
            !is_channels_last(own) || got.numel() == 0 || is_channels_last(&got) || got.size()[1] == 1,
            || format!("{what}: channels-last was lost"),
        );
    }
    Ok(())
}

fn indexed_back(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    for kind in KINDS {
        for (dim, memory) in [(0, Memory::Contiguous), (1, Memory::Transposed), (-1, Memory::Conjugated)] {
            if kind == Kind::Bool {
                continue;
            }
            let id = suite.fresh();
            let extents: Vec<i64> = (0..ranks as i64).map(|r| r + 1).collect();
            let rows = Rows::draw(id, &extents);
            let extent = |from: usize| rows.sizes.iter().map(|to| to[from]).sum();
            let inputs: Vec<Tensor> = (0..ranks)
                .map(|r| laid_out(&suite.data(id, r, &with_extent(&[2, 3, 2], dim, extent(r)), kind), memory))
                .collect();
            let own = &inputs[rank];
            let indices = rows.indices(rank);
            let got = suite.unchanged(&[own], |s| {
                start::indexed_scatter_add_v(own, &indices, &rows.sizes, extents[rank], dim, true, s.group)?
                    .wait()
            })?;
            let wide = match kind {
                Kind::Half | Kind::BFloat16 => Kind::Float,
                kind => kind,
            };
            let mut want =
                Tensor::zeros(with_extent(&[2, 3, 2], dim, extents[rank]), (wide, tch::Device::Cpu));
            for to in 0..ranks {
                let start = rows.sizes[..rank].iter().map(|from| from[to]).sum();
                let block = inputs[to].narrow(dim, start, rows.sizes[rank][to]).to_kind(wide);
                want = want.index_add(dim, &indices[to], &block.resolve_conj());
            }
            suite.same(&format!("{kind:?} {memory:?} along {dim}"), &got, &want.to_kind(kind));
        }
    }
    Ok(())
}
