//! Scaled dot product attention.
//!
//! It depends on no model: masks and positions come as arguments.

mod context;
mod exact;
mod kernel;
pub(crate) mod plan;
pub(crate) mod ring;
mod ring_attention;
mod tiles;

use isobar_array::Window;
use isobar_array::kernel::{lowered, lowered_kind};
use isobar_torch::guard::is_grad_enabled;
use tch::{Kind, TchError, Tensor};

pub use context::context_parallel;

use self::kernel::{Dropout, Inputs, Kernel};
use self::plan::Plan;
use self::ring_attention::RingSchedule;
use super::align::fit;
use super::random::drawn;
use super::{operator, refuse};
use crate::error::{Error, Result};
use crate::promote::{Operand, operand, promote_optional};
use crate::rules::Call;
use crate::tensor::{ShardTensor, same_mesh};
use isobar_array::Attrs;

const NAME: &str = "scaled_dot_product_attention";

/// Options of attention; the mask is sharded, or a plain tensor that is the same on all ranks.
pub type AttentionOptions<'a> = isobar_array::AttentionOptions<'a, dyn Operand + 'a>;

/// Returns the options by PyTorch's names, but the mask; with dropout, also the generator's draw.
fn args(options: &AttentionOptions<'_>) -> Attrs {
    let draws = options.generator.filter(|_| options.dropout_p > 0.0);
    args!(
        "is_causal": options.is_causal,
        "scale": options.scale,
        "enable_gqa": options.enable_gqa,
        "dropout_p": options.dropout_p,
        "generator": draws.map(drawn),
        "batch": options.batch.map(|(offset, total)| [offset, total]),
    )()
}

/// Error of libtorch.
fn torch<T>(result: Result<T, TchError>) -> Result<T> {
    super::torch(NAME, result)
}

impl ShardTensor {
    /// softmax(`query` `key`ᵀ · scale + mask) `value` over the keys: `query` `[…, heads, queries, features]`, `key`
    /// `[…, heads, keys, features]`, `value` `[…, heads, keys, out]`, the result `[…, heads, queries, out]`, of their dtype, laid
    /// out as the query where that is possible. A query that sees no key gets zeros. Keys and values of one sample, or of one head,
    /// are broadcast to all.
    ///
    /// Batch, heads and sequences may be split in any way and over any axes, in parts of any sizes; what is split over batch or
    /// heads is local. Where sequences are split, see [`AttentionStrategy`](isobar_array::AttentionStrategy). The matrix of scores is never whole in memory, and
    /// sums are in fp32 at least. On CPU, without dropout and gradients of the mask, blocks are computed by libtorch's flash
    /// attention.
    ///
    /// All ranks of the mesh call. Gradients have gradients, by way of the whole matrix of scores and all keys on each rank;
    /// only where `Auto` combines results, not.
    ///
    /// ```
    /// use isobar_collectives::Group;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{AttentionOptions, Placement, ShardTensor};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
    /// let whole = Tensor::randn([1, 2, 6, 4], (Kind::Double, Device::Cpu));
    /// let x = ShardTensor::distribute(&whole, &mesh, &[Placement::Shard(2)])?;
    /// let options = AttentionOptions { is_causal: true, ..Default::default() };
    /// let y = ShardTensor::scaled_dot_product_attention(&x, &x, &x, &options)?;
    /// assert_eq!(y.shape(), [1, 2, 6, 4]);
    /// // The first query sees the first key only.
    /// assert!((y.local() - &whole).narrow(2, 0, 1).abs().max().double_value(&[]) < 1e-12);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Shapes, dtypes or meshes that do not fit; a mask together with `is_causal`; dropout without a generator; `AllToAll` with
    /// too few heads; the errors of the exchange.
    pub fn scaled_dot_product_attention(
        query: &Self,
        key: &dyn Operand,
        value: &dyn Operand,
        options: &AttentionOptions<'_>,
    ) -> Result<Self> {
        let (key, value) = (&*key.promote(NAME, query)?, &*value.promote(NAME, query)?);
        let mask = promote_optional(NAME, query, options.attn_mask)?;
        let mask = mask.as_deref();
        let inputs: Vec<&Self> = [query, key, value].into_iter().chain(mask).collect();
        let args = || args(options);
        operator(NAME, &inputs, args, || {
            same_mesh(NAME, &inputs)?;
            let (key, value) = (over_batch(key, query, options)?, over_batch(value, query, options)?);
            let (key, value) = (&key, &value);
            validate(query, key, value, mask, options)?;
            let ready = |x: &Self| {
                let x = x.resolved()?.consecutive()?;
                Ok::<_, Error>(Self::new(torch(lowered(x.local()))?, x.layout().clone()))
            };
            attend(&ready(query)?, &ready(key)?, &ready(value)?, mask, options)
        })
    }
}

/// Broadcasts keys or values to the batch and the heads of the queries.
fn over_batch(x: &ShardTensor, query: &ShardTensor, options: &AttentionOptions<'_>) -> Result<ShardTensor> {
    let lead = if x.ndim() == query.ndim() { x.ndim().saturating_sub(2) } else { 0 };
    let mut shape = x.shape().to_vec();
    let batch = if options.enable_gqa { lead.saturating_sub(1) } else { lead };
    for (extent, &wide) in shape.iter_mut().zip(query.shape()).take(batch) {
        if *extent == 1 {
            *extent = wide;
        }
    }
    if shape == x.shape() { Ok(x.shallow_clone()) } else { x.resolved()?.expand(&shape) }
}

fn validate(
    query: &ShardTensor,
    key: &ShardTensor,
    value: &ShardTensor,
    mask: Option<&ShardTensor>,
    options: &AttentionOptions<'_>,
) -> Result<()> {
    let n = query.ndim();
    let shapes = || format!("query {:?}, key {:?}, value {:?}", query.shape(), key.shape(), value.shape());
    if n < 2 || key.ndim() != n || value.ndim() != n {
        return refuse(NAME, format!("{}: expected as many dims, at least 2", shapes()));
    }
    let (q, k, v) = (query.shape(), key.shape(), value.shape());
    let heads_fit = |dim: usize| {
        let grouped = options.enable_gqa && dim + 3 == n;
        q[dim] == k[dim] || (grouped && k[dim] > 0 && q[dim] % k[dim] == 0)
    };
    if k[..n - 1] != v[..n - 1] || q[n - 1] != k[n - 1] || !(0..n - 2).all(heads_fit) {
        let grouped = if options.enable_gqa { ", heads of queries a multiple" } else { "" };
        return refuse(NAME, format!("{}: expected equal batch, heads, keys, features{grouped}", shapes()));
    }
    if options.batch.is_some() && n < 3 {
        return refuse(
            NAME,
            format!("{}: a part of a batch needs a dim of samples before the queries", shapes()),
        );
    }
    if let Some(mask) = mask {
        if options.is_causal {
            return refuse(NAME, "a mask and is_causal: give one of them");
        }
        let scores: Vec<i64> = [&q[..n - 1], &[k[n - 2]]].concat();
        let fits = |(extent, wide): (&i64, &i64)| extent == wide || *extent == 1;
        if mask.ndim() > n || !mask.shape().iter().rev().zip(scores.iter().rev()).all(fits) {
            let mask = mask.shape();
            return refuse(NAME, format!("the mask {mask:?} does not broadcast to the scores {scores:?}"));
        }
        let lowered = |x: &ShardTensor| lowered_kind(x.kind(), x.device());
        if !matches!(mask.kind(), Kind::Bool | Kind::Float) && lowered(mask) != lowered(query) {
            let (kind, expected) = (mask.kind(), query.kind());
            return refuse(NAME, format!("a mask of dtype {kind:?}, expected Bool or {expected:?}"));
        }
    }
    let p = options.dropout_p;
    if !(0.0..1.0).contains(&p) || (p > 0.0 && options.generator.is_none()) {
        return refuse(NAME, format!("dropout of {p}: expected [0, 1), and a generator to draw from"));
    }
    Ok(())
}

fn attend(
    query: &ShardTensor,
    key: &ShardTensor,
    value: &ShardTensor,
    mask: Option<&ShardTensor>,
    options: &AttentionOptions<'_>,
) -> Result<ShardTensor> {
    let plan = Plan::new(query, key, value, options)?;
    let features = plan.query.shape().last().copied().unwrap_or(0);
    let dropout = match options.generator {
        Some(generator) if options.dropout_p > 0.0 => {
            let at = generator.clone();
            generator.next_u64();
            let scores = Window::of_batch(plan.scores.shape(), options.batch)?;
            let lead = plan.scores.intervals();
            let lead = lead[..plan.scores.ndim() - 2].iter();
            let lead = lead.map(|part| part.first().map_or((0, 0), |part| (part.start, part.len))).collect();
            Some(Dropout { p: options.dropout_p, generator: at, scores, lead })
        }
        _ => None,
    };
    let kernel = Kernel {
        scale: options.scale.unwrap_or(1.0 / (features as f64).sqrt()),
        dropout,
        mask_gradient: is_grad_enabled() && mask.is_some_and(ShardTensor::requires_grad),
    };
    let mask = mask.map(|mask| four_dims(mask, query.kind(), &plan)).transpose()?;
    let query = blocks(&query.to_layout(&plan.query)?.local().shallow_clone())?;
    let key = blocks(&key.to_layout(&plan.key)?.mark_varying(&plan.query_axes)?)?;
    let value = blocks(&value.to_layout(&plan.value)?.mark_varying(&plan.query_axes)?)?;
    let inputs = Inputs { query: &query, key: &key, value: &value, mask: mask.as_ref() };
    let output = RingSchedule::new(&plan, kernel, options.is_causal)?.apply(&inputs)?;
    let output = torch(output.f_reshape(plan.output.local_shape()))?;
    ShardTensor::new(output, plan.output.clone()).to_layout(&plan.returned)
}

/// As `[batch, heads, sequence, features]`, in one piece of memory.
fn blocks(local: &Tensor) -> Result<Tensor> {
    torch(local.f_contiguous().and_then(|t| t.f_reshape(four(&local.size()))))
}

/// Four dims, all but the last three as one.
fn four(shape: &[i64]) -> Vec<i64> {
    let n = shape.len();
    let rest = n.saturating_sub(3);
    let mut four = vec![shape[..rest].iter().product()];
    four.extend(vec![1; 3_usize.saturating_sub(n)]);
    four.extend(&shape[rest..]);
    four
}

/// This rank's part of a mask, added to scores of four dims.
fn four_dims(mask: &ShardTensor, kind: Kind, plan: &Plan) -> Result<Tensor> {
    let mask = mask.resolved()?.consecutive()?;
    let local = fit(&mask, &plan.scores)?;
    let n = plan.scores.ndim();
    let local = match local.kind() {
        Kind::Bool => {
            let hidden = torch(local.f_logical_not())?;
            let open = torch(Tensor::f_zeros(local.size(), (kind, local.device())))?;
            torch(open.f_masked_fill(&hidden, f64::NEG_INFINITY))?
        }
        own if own == kind || own == Kind::Float => local,
        _ => torch(local.f_to_kind(kind))?,
    };
    let mut shape = vec![1; n - mask.ndim()];
    shape.extend(local.size());
    let mut local = torch(local.f_reshape(&shape[..]))?;
    if n > 4 {
        // The batch dims become one, along which it is whole.
        let lead = plan.scores.local_shape()[..n - 3].iter().copied();
        let wide: Vec<i64> = lead.chain(shape[n - 3..].iter().copied()).collect();
        local = torch(local.f_expand(wide, false))?;
    }
    torch(local.f_reshape(four(&local.size())))
}

crate::register! {
    /// softmax(q kᵀ · scale + mask) v.
    "scaled_dot_product_attention"(query: Floating, key: Operand, value: Operand, attn_mask; is_causal, scale, enable_gqa, dropout_p, generator, batch) Attention:
        |call| attention(call);
}

fn attention(call: &Call<'_>) -> Result<ShardTensor> {
    let generator = call.generator()?;
    let options = AttentionOptions {
        attn_mask: operand(call.optional_tensor(3)),
        is_causal: call.or("is_causal", false)?,
        scale: call.optional("scale")?,
        enable_gqa: call.or("enable_gqa", false)?,
        dropout_p: call.or("dropout_p", 0.0)?,
        generator: generator.as_ref(),
        batch: call.optional("batch")?,
        ..AttentionOptions::default()
    };
    let (query, key, value) = (call.tensor(0)?, call.tensor(1)?, call.tensor(2)?);
    ShardTensor::scaled_dot_product_attention(query, key, value, &options)
}
