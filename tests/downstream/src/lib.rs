//! Operators that a program adds to Isobar from outside, in the three ways that there are.
//!
//! - `row_energy` comes with its own handler of sharded tensors.
//! - `biased_gelu` is a dense function whose acceptable shardings are declared.
//! - `softmax` replaces the built-in operator of that name.
//!
//! Every rank calls [`register`] before its first use of them.

use std::error::Error;

use isobar::array::{Attrs, register_op};
use isobar::collectives::ReduceOp;
use isobar::shard::rules::{
    LocalMap, LocalOutput, Sharding, Shardings, local_map, register_sharded_op, register_sharding,
};
use isobar::shard::{Layout, Placement, ShardTensor};
use isobar::tch::{Kind, Tensor};

/// Error of a handler.
type Failure = Box<dyn Error + Send + Sync>;

/// Adds the operators.
pub fn register() {
    register_sharded_op("row_energy", row_energy);
    register_op("biased_gelu", |inputs, _| Ok(vec![inputs[0].f_add(inputs[1])?.f_gelu("none")?]));
    register_sharding("biased_gelu", biased_gelu_shardings);
    register_sharded_op("softmax", softmax);
}

/// The sum of squares of each row `[rows, columns]`, in `[rows]`: ranks that have rows keep theirs, ranks that have columns
/// have partial sums.
fn row_energy(inputs: &[&ShardTensor], _: &Attrs) -> Result<Vec<ShardTensor>, Failure> {
    let [x] = inputs else { return Err("row_energy takes one tensor".into()) };
    let placed = x.placements().iter().map(|placement| match *placement {
        Placement::Shard(1) => Placement::Partial(ReduceOp::Sum),
        other => other,
    });
    let tables = (0..1).map(|dim| Ok((dim, x.layout().sizes(dim)?)));
    let sizes = isobar::shard::Sizes::Explicit(tables.collect::<Result<_, isobar::shard::Error>>()?);
    let placements: Vec<Placement> = placed.collect();
    let output = match placements.iter().any(|placement| placement.dim() == Some(0)) {
        true => LocalOutput::Placed { placements, sizes, shape: Some(vec![x.shape()[0]]) },
        false => LocalOutput::placed(&placements),
    };
    let energy = |parts: &[Tensor]| Ok(vec![parts[0].f_square()?.f_sum_dim_intlist(1, false, None)?]);
    Ok(local_map(energy, &[x], &[output], &LocalMap { name: "row_energy".into(), ..LocalMap::default() })?)
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
