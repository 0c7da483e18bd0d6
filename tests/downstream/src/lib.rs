//! Operators that a program adds to Isobar from outside, in four ways.
//!
//! - `row_energy` has a rule of sharded tensors, registered as the built-in operators are; `softsign` replaces a built-in one so.
//! - `biased_gelu` is a dense function whose acceptable shardings are declared.
//! - `softmax` replaces the built-in operator of that name.
//!
//! Every rank calls [`register`] before its first use of the last two.

use std::error::Error;

use isobar::array::{Attrs, Elementwise, Unary, register_op};
use isobar::collectives::ReduceOp;
use isobar::shard::rules::{
    LocalMap, LocalOutput, Sharding, Shardings, local_map, register_sharded_op, register_sharding,
};
use isobar::shard::{Layout, Placement, ShardTensor, Sizes};
use isobar::tch::{Kind, Tensor};

/// Error of a handler.
type Failure = Box<dyn Error + Send + Sync>;

/// Adds the operators.
pub fn register() {
    register_op("biased_gelu", |inputs, _| Ok(vec![inputs[0].f_add(inputs[1])?.f_gelu("none")?]));
    register_sharding("biased_gelu", biased_gelu_shardings);
    register_sharded_op("softmax", softmax);
}

isobar::shard::register! {
    /// The sum of squares of each row `[rows, columns]` times `factor`, or 1, in `[rows]`.
    "row_energy"(input; factor) Nothing: |call| row_energy(&call.tensor(0)?.mul_scalar(call.or("factor", 1.0)?)?);
    /// x / (1 + |x|) in double precision, whatever comes in.
    "softsign"(input) Nothing: |call| call.tensor(0)?.to_kind(Kind::Double)?.unary(Unary::Softsign);
}

/// Ranks that have rows keep theirs, ranks that have columns have partial sums.
fn row_energy(x: &ShardTensor) -> Result<Vec<ShardTensor>, isobar::shard::Error> {
    let placed = x.placements().iter().map(|placement| match *placement {
        Placement::Shard(1) => Placement::Partial(ReduceOp::Sum),
        other => other,
    });
    let placements: Vec<Placement> = placed.collect();
    let output = match placements.iter().any(|placement| placement.dim() == Some(0)) {
        true => LocalOutput::Placed {
            placements,
            sizes: Sizes::Explicit([(0, x.layout().sizes(0)?)].into()),
            shape: Some(vec![x.shape()[0]]),
        },
        false => LocalOutput::placed(&placements),
    };
    let energy = |parts: &[Tensor]| Ok(vec![parts[0].f_square()?.f_sum_dim_intlist(1, false, None)?]);
    local_map(energy, &[x], &[output], &LocalMap { name: "row_energy".into(), ..LocalMap::default() })
}

/// gelu(x + bias), `x` `[…, channels]`, may be split along any dim; along channels, the bias is too.
fn biased_gelu_shardings(layouts: &[&Layout], _: &Attrs) -> Result<Shardings, Failure> {
    let [x, _bias] = layouts else { return Err("biased_gelu takes a tensor and a bias".into()) };
    let channels = x.ndim().checked_sub(1).ok_or("x must have channels")?;
    let along = |dim: usize| {
        let bias = if dim == channels { Placement::Shard(0) } else { Placement::Replicate };
        Sharding::new(&[Placement::Shard(dim), bias], &[Placement::Shard(dim)])
    };
    Ok(Shardings::new((0..=channels).map(along).collect()).with_shapes(vec![x.shape().to_vec()]))
}

/// A softmax over the last dim that computes in double precision, whatever comes in.
fn softmax(inputs: &[&ShardTensor], _: &Attrs) -> Result<Vec<ShardTensor>, Failure> {
    let [x] = inputs else { return Err("softmax takes one tensor".into()) };
    let last = x.ndim().checked_sub(1).ok_or("a number has no softmax")?;
    // Rows must be whole.
    let whole = |placement: &Placement| match placement.dim() {
        Some(dim) if dim != last => *placement,
        _ => Placement::Replicate,
    };
    let placements: Vec<Placement> = x.placements().iter().map(whole).collect();
    let x = x.redistribute(None, &placements)?;
    let rows = |parts: &[Tensor]| Ok(vec![parts[0].f_softmax(-1, Kind::Double)?]);
    Ok(local_map(rows, &[&x], &[LocalOutput::Like(x.layout().clone())], &LocalMap::default())?)
}
