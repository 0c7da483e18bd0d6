//! Every linear collective against its adjoint: ⟨Fx, y⟩ = ⟨x, F*y⟩, summed over what the ranks hold (design decision
//! 1), with random sizes, empty parts among them; and gradients of gradients.

use isobar_collectives::{
    Error, Group, ReduceOp, all_gather_v, all_reduce, all_to_all_v, broadcast, gather_v,
    indexed_all_to_all_v, reduce, reduce_scatter_v, scatter_v, send_recv, transpose,
};
use isobar_torch::autograd::{self, BackwardOptions, Function};
use tch::{Device, Kind, Tensor};

use super::data::{mix, repeated};
use super::{Case, Suite};

pub(crate) const CASES: &[Case] = &[
    ("adjoint of all_gather_v", gather_everywhere),
    ("adjoint of gather_v", gather_at_one),
    ("adjoint of scatter_v", scatter),
    ("adjoint of scatter_v without sizes", scatter_equal),
    ("adjoint of reduce_scatter_v", reduce_scatter),
    ("adjoint of all_to_all_v", all_to_all),
    ("adjoint of transpose", transposes),
    ("adjoint of indexed_all_to_all_v", indexed),
    ("adjoint of all_reduce", all_reduces),
    ("adjoint of broadcast", broadcasts),
    ("adjoint of reduce", reduces),
    ("adjoint of send_recv", ring),
    ("undefined gradients", undefined),
    ("gradients of strided and complex tensors", strided),
    ("without gradients", without),
    ("rooted collectives' gradients", rooted),
];

/// Drawn cases for each map.
const ROUNDS: u64 = 4;
const TOLERANCE: f64 = 1e-12;

/// Draws numbers that all ranks draw alike.
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: usize) -> i64 {
        self.0 = mix(self.0);
        (self.0 % bound as u64) as i64
    }

    /// Extents of 0 to 3 for each rank.
    fn sizes(&mut self, ranks: usize) -> Vec<i64> {
        (0..ranks).map(|_| self.below(4)).collect()
    }
}

type Map<'a> = dyn Fn(&Tensor, &Group) -> Result<Tensor, Error> + 'a;

/// The property, and the gradient of a gradient, of `map` at data of this rank's `shape`.
fn holds(suite: &mut Suite<'_>, what: &str, shape: &[i64], map: &Map<'_>) -> Result<(), Error> {
    let id = suite.fresh();
    let group = suite.group;
    let x = suite.data(id, suite.rank(), shape, Kind::Double).set_requires_grad(true);
    let z = map(&x, group)?;
    suite.check(z.requires_grad(), || format!("{what}: the result is not attached"));
    let y = suite.data(id + 1, suite.rank(), &z.size(), Kind::Double);
    let gradient = gradient(&z, &x, &y, false)?;
    suite.check(gradient.size() == x.size(), || {
        format!("{what}: the gradient has shape {:?}", gradient.size())
    });
    let forward = dot(&z, &y);
    let size = dot(&z.abs(), &y.abs());
    let sums = summed(group, &[forward, dot(&x, &gradient), size])?;
    suite.check((sums[0] - sums[1]).abs() <= TOLERANCE * sums[2].max(1.0), || {
        format!("{what}: <Fx, y> = {}, <x, F*y> = {}", sums[0], sums[1])
    });
    twice(suite, what, &x, map)
}

/// Of Σ (Fx)³ the gradient is F*(3 (Fx)²), and of its product with v it is F*(6 Fx · Fv).
fn twice(suite: &mut Suite<'_>, what: &str, x: &Tensor, map: &Map<'_>) -> Result<(), Error> {
    let group = suite.group;
    let z = map(x, group)?;
    let first = gradient(&z.pow_tensor_scalar(3), x, &z.ones_like(), true)?;
    suite.check(first.requires_grad(), || format!("{what}: the gradient is not attached"));
    let id = suite.fresh();
    let v = suite.data(id, suite.rank(), &x.size(), Kind::Double);
    let second = gradient(&first, x, &v, false)?;
    let image = map(&v, group)?;
    let z = map(x, group)?;
    let cotangent = z.detach() * image * 6.0;
    let want = gradient(&z, x, &cotangent, false)?;
    suite.near(&format!("{what}: the gradient of the gradient"), &second, &want, TOLERANCE);
    Ok(())
}

pub(crate) fn gradient(z: &Tensor, x: &Tensor, y: &Tensor, create_graph: bool) -> Result<Tensor, Error> {
    let options = BackwardOptions { create_graph, ..Default::default() };
    let mut found = autograd::grad(&[z], &[x], &[Some(y.shallow_clone())], options)?;
    found.pop().flatten().ok_or_else(|| Error::Torch("no gradient came".into()))
}

fn dot(a: &Tensor, b: &Tensor) -> f64 {
    (a.detach() * b.detach()).sum(Kind::Double).double_value(&[])
}

/// The sums over ranks, exchanged as bytes so as not to trust what is tested.
fn summed(group: &Group, values: &[f64]) -> Result<Vec<f64>, Error> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let all = group.all_gather_bytes(&bytes)?;
    let value = |bytes: &[u8], n: usize| f64::from_le_bytes(std::array::from_fn(|i| bytes[8 * n + i]));
    Ok((0..values.len()).map(|n| all.iter().map(|bytes| value(bytes, n)).sum()).collect())
}

/// Draws a shape of three dims, its extent along a drawn dim to be replaced: dim and shape.
fn drawn(draw: &mut Draw) -> (i64, Vec<i64>) {
    let shape = (0..3).map(|_| draw.below(3) + 1).collect();
    (draw.below(3), shape)
}

fn with(shape: &[i64], dim: i64, extent: i64) -> Vec<i64> {
    super::gathers::with_extent(shape, dim, extent)
}

fn rounds(
    suite: &mut Suite<'_>,
    body: impl Fn(&mut Suite<'_>, &mut Draw) -> Result<(), Error>,
) -> Result<(), Error> {
    for round in 0..ROUNDS {
        let mut draw = Draw(mix(suite.seed ^ mix(round)));
        body(suite, &mut draw)?;
    }
    Ok(())
}

fn gather_everywhere(suite: &mut Suite<'_>) -> Result<(), Error> {
    rounds(suite, |suite, draw| {
        let sizes = draw.sizes(suite.ranks());
        let (dim, shape) = drawn(draw);
        let own = with(&shape, dim, sizes[suite.rank()]);
        let what = format!("{sizes:?} along {dim}");
        holds(suite, &what, &own, &|x, group| all_gather_v(x, Some(&sizes), dim, true, group))?;
        holds(suite, "equal", &shape, &|x, group| all_gather_v(x, None, dim - 3, false, group))
    })
}

fn gather_at_one(suite: &mut Suite<'_>) -> Result<(), Error> {
    rounds(suite, |suite, draw| {
        let sizes = draw.sizes(suite.ranks());
        let dst = draw.below(suite.ranks()) as usize;
        let (dim, shape) = drawn(draw);
        let own = with(&shape, dim, sizes[suite.rank()]);
        let what = format!("{sizes:?} along {dim} to {dst}");
        holds(suite, &what, &own, &|x, group| gather_v(x, Some(&sizes), dim, dst, group))?;
        holds(suite, "equal", &shape, &|x, group| gather_v(x, None, dim - 3, dst, group))
    })
}

fn scatter(suite: &mut Suite<'_>) -> Result<(), Error> {
    rounds(suite, |suite, draw| {
        let sizes = draw.sizes(suite.ranks());
        let src = draw.below(suite.ranks()) as usize;
        let (dim, shape) = drawn(draw);
        let elsewhere = draw.below(3);
        let extent = if suite.rank() == src { sizes.iter().sum() } else { elsewhere };
        let what = format!("{sizes:?} along {dim} from {src}");
        holds(suite, &what, &with(&shape, dim, extent), &|x, group| {
            scatter_v(x, Some(&sizes), dim, src, group)
        })
    })
}

fn scatter_equal(suite: &mut Suite<'_>) -> Result<(), Error> {
    rounds(suite, |suite, draw| {
        let src = draw.below(suite.ranks()) as usize;
        let (dim, shape) = drawn(draw);
        let extent = if suite.rank() == src { 2 * suite.ranks() as i64 } else { 1 };
        holds(suite, &format!("along {dim} from {src}"), &with(&shape, dim, extent), &|x, group| {
            scatter_v(x, None, dim, src, group)
        })
    })
}

fn reduce_scatter(suite: &mut Suite<'_>) -> Result<(), Error> {
    rounds(suite, |suite, draw| {
        let sizes = draw.sizes(suite.ranks());
        let (dim, shape) = drawn(draw);
        let whole = with(&shape, dim, sizes.iter().sum());
        for op in [ReduceOp::Sum, ReduceOp::Avg] {
            let what = format!("{op:?} of {sizes:?} along {dim}");
            holds(suite, &what, &whole, &|x, group| reduce_scatter_v(x, Some(&sizes), dim, op, true, group))?;
        }
        let whole = with(&shape, dim, 2 * suite.ranks() as i64);
        holds(suite, "equal", &whole, &|x, group| reduce_scatter_v(x, None, dim, ReduceOp::Sum, false, group))
    })
}

fn all_to_all(suite: &mut Suite<'_>) -> Result<(), Error> {
    rounds(suite, |suite, draw| {
        let (rank, ranks) = (suite.rank(), suite.ranks());
        let table: Vec<_> = (0..ranks).map(|_| draw.sizes(ranks)).collect();
        let receive: Vec<i64> = table.iter().map(|from| from[rank]).collect();
        let (dim, shape) = drawn(draw);
        let own = with(&shape, dim, table[rank].iter().sum());
        holds(suite, &format!("{table:?} along {dim}"), &own, &|x, group| {
            all_to_all_v(x, Some(&table[rank]), Some(&receive), dim, group)
        })?;
        holds(suite, "equal", &with(&shape, dim, ranks as i64), &|x, group| {
            all_to_all_v(x, None, None, dim, group)
        })
    })
}

fn transposes(suite: &mut Suite<'_>) -> Result<(), Error> {
    rounds(suite, |suite, draw| {
        let (split_sizes, concat_sizes) = (draw.sizes(suite.ranks()), draw.sizes(suite.ranks()));
        let (split, shape) = drawn(draw);
        let concat = (split + 1 + draw.below(2)) % 3;
        let own = with(&with(&shape, split, split_sizes.iter().sum()), concat, concat_sizes[suite.rank()]);
        let what = format!("from {concat} {concat_sizes:?} to {split} {split_sizes:?}");
        holds(suite, &what, &own, &|x, group| {
            transpose(x, split, Some(&split_sizes), concat, Some(&concat_sizes), group)
        })?;
        let equal = with(&shape, split, suite.ranks() as i64);
        holds(suite, "equal", &equal, &|x, group| transpose(x, split, None, concat, None, group))
    })
}

fn indexed(suite: &mut Suite<'_>) -> Result<(), Error> {
    rounds(suite, |suite, draw| {
        let (rank, ranks) = (suite.rank(), suite.ranks());
        let table: Vec<_> = (0..ranks).map(|_| draw.sizes(ranks)).collect();
        let (dim, shape) = drawn(draw);
        let extent = draw.below(4) + 1;
        let mut own_draw = Draw(mix(draw.0 ^ rank as u64));
        let indices: Vec<Tensor> = table[rank]
            .iter()
            .map(|&count| (0..count).map(|_| own_draw.below(extent as usize)).collect::<Vec<i64>>())
            .map(|rows| Tensor::from_slice(&rows))
            .collect();
        holds(suite, &format!("{table:?} along {dim}"), &with(&shape, dim, extent), &|x, group| {
            indexed_all_to_all_v(x, &indices, &table, true, dim, group)
        })
    })
}

fn all_reduces(suite: &mut Suite<'_>) -> Result<(), Error> {
    for shape in [vec![], vec![0, 2], vec![3, 2], vec![2500]] {
        for op in [ReduceOp::Sum, ReduceOp::Avg] {
            holds(suite, &format!("{op:?} of {shape:?}"), &shape, &|x, group| all_reduce(x, op, group))?;
        }
    }
    Ok(())
}

fn broadcasts(suite: &mut Suite<'_>) -> Result<(), Error> {
    let last = suite.ranks() - 1;
    for (shape, root) in [(vec![], last), (vec![3, 2], 0), (vec![2500], last)] {
        holds(suite, &format!("{shape:?} from {root}"), &shape, &|x, group| broadcast(x, root, group))?;
    }
    Ok(())
}

fn reduces(suite: &mut Suite<'_>) -> Result<(), Error> {
    let last = suite.ranks() - 1;
    for (shape, dst) in [(vec![], last), (vec![3, 2], 0), (vec![2500], last)] {
        for op in [ReduceOp::Sum, ReduceOp::Avg] {
            holds(suite, &format!("{op:?} of {shape:?} at {dst}"), &shape, &|x, group| {
                reduce(x, op, dst, group)
            })?;
        }
    }
    Ok(())
}

fn ring(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    if ranks > 1 {
        let (next, last) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        holds(suite, "ring", &[rank as i64, 3], &|x, group| {
            send_recv(x, Some(next), Some(last), &[last as i64, 3], group)
        })?;
    }
    // The last sends nothing, the first receives nothing.
    let (next, last) = ((rank + 1 < ranks).then_some(rank + 1), rank.checked_sub(1));
    holds(suite, "shift", &[4], &|x, group| send_recv(x, next, last, &[4], group))
}

/// A rank whose result nothing depends on takes part in backward with zeros.
fn undefined(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    if ranks == 1 {
        // The result is the tensor itself.
        return Ok(());
    }
    let id = suite.fresh();
    let x = suite.data(id, rank, &[2, 3], Kind::Double).set_requires_grad(true);
    let z = all_gather_v(&x, None, 0, true, suite.group)?;
    let y = suite.data(id + 1, 0, &z.size(), Kind::Double);
    // On rank 0 no gradient comes back from here.
    let stops = rank == 0;
    let value = z.detach() * 1.0;
    let mut out = Function::new("stop").apply(&[&z], vec![value], move |_, gradients| {
        Ok(vec![if stops { None } else { gradients[0].as_ref().map(Tensor::shallow_clone) }])
    })?;
    let out = out.pop().unwrap_or_default();
    let got = gradient(&out, &x, &y, false)?;
    let own = y.narrow(0, 2 * rank as i64, 2);
    suite.near("the gradient", &got, &(own * (ranks as f64 - 1.0)), TOLERANCE);
    Ok(())
}

/// Gradients arrive as autograd makes them: expanded, transposed, conjugated.
fn strided(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    let id = suite.fresh();
    let sizes: Vec<i64> = (1..=ranks as i64).collect();
    for kind in [Kind::Double, Kind::ComplexDouble] {
        let x = suite.data(id, rank, &[3, sizes[rank]], kind).set_requires_grad(true);
        let z = all_gather_v(&x, Some(&sizes), 1, true, suite.group)?;
        let expanded = Tensor::ones([1], (kind, Device::Cpu)).expand(z.size(), false);
        let got = gradient(&z, &x, &expanded, false)?;
        suite.near("of an expanded one", &got, &(x.detach().ones_like() * ranks as f64), TOLERANCE);
        let z = all_gather_v(&x, Some(&sizes), 1, true, suite.group)?;
        let y = suite.data(id + 1, 0, &[z.size()[1], 3], kind).transpose(0, 1).conj();
        let got = gradient(&z, &x, &y, false)?;
        let want = y.resolve_conj().narrow(1, sizes[..rank].iter().sum(), sizes[rank]) * ranks as f64;
        suite.near("of a transposed, conjugated one", &got, &want, TOLERANCE);
    }
    // A gradient that is the negative of what lies in memory.
    let x = suite.data(id, rank, &[4], Kind::Double).set_requires_grad(true);
    let indices = repeated(&[3, 0], ranks);
    let z = indexed_all_to_all_v(&x, &indices, &vec![vec![2; ranks]; ranks], true, 0, suite.group)?;
    let y = suite.data(id + 2, 0, &z.size(), Kind::ComplexDouble).conj().imag();
    let got = gradient(&z, &x, &y, false)?;
    let block = y.resolve_neg().narrow(0, 2 * rank as i64, 2) * ranks as f64;
    let want = Tensor::zeros([4], (Kind::Double, Device::Cpu)).index_add(0, &indices[0], &block);
    suite.near("of a negated one", &got, &want, TOLERANCE);
    Ok(())
}

/// Tensors that require gradients, where none are recorded.
fn without(suite: &mut Suite<'_>) -> Result<(), Error> {
    let id = suite.fresh();
    let ranks = suite.ranks();
    let x = suite.data(id, suite.rank(), &[ranks as i64, 2], Kind::Double).set_requires_grad(true);
    let _guard = isobar_torch::guard::NoGrad::new();
    let results = [
        all_gather_v(&x, None, 0, true, suite.group)?,
        all_reduce(&x, ReduceOp::Max, suite.group)?,
        reduce(&x, ReduceOp::Product, 0, suite.group)?,
        reduce_scatter_v(&x, None, 0, ReduceOp::Min, true, suite.group)?,
        scatter_v(&x, None, 0, 0, suite.group)?,
        broadcast(&x, 0, suite.group)?,
        all_to_all_v(&x, None, None, 0, suite.group)?,
    ];
    for (n, result) in results.iter().enumerate() {
        suite.check(!result.requires_grad(), || format!("result {n} is attached"));
    }
    Ok(())
}

/// Results on ranks that receive nothing are attached to the graph, and all ranks call backward.
fn rooted(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    let id = suite.fresh();
    let sizes: Vec<i64> = (1..=ranks as i64).collect();
    let total: i64 = sizes.iter().sum();
    let src = ranks - 1;
    let x =
        suite.data(id, rank, &[if rank == src { total } else { 2 }, 3], Kind::Double).set_requires_grad(true);
    let part = scatter_v(&x, Some(&sizes), 0, src, suite.group)?;
    autograd::backward(&[&(&part * (rank as f64 + 1.0)).sum(Kind::Double)], &[], BackwardOptions::default())?;
    let want = match rank == src {
        true => {
            let blocks: Vec<Tensor> = sizes
                .iter()
                .enumerate()
                .map(|(r, &n)| Tensor::full([n, 3], r as f64 + 1.0, (Kind::Double, Device::Cpu)))
                .collect();
            Tensor::cat(&blocks, 0)
        }
        false => Tensor::zeros([2, 3], (Kind::Double, Device::Cpu)),
    };
    suite.same("the gradient of scatter_v", &x.grad(), &want);
    let x = suite.data(id, rank, &[sizes[rank], 3], Kind::Double).set_requires_grad(true);
    let all = gather_v(&x, Some(&sizes), 0, src, suite.group)?;
    suite.check(all.requires_grad(), || "the result of gather_v is not attached".into());
    autograd::backward(&[&(&all * 3.0).sum(Kind::Double)], &[], BackwardOptions::default())?;
    suite.same("the gradient of gather_v", &x.grad(), &(x.detach().ones_like() * 3.0));
    Ok(())
}
