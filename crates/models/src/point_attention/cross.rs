//! Attention to a context.

use isobar_array::Array;
use isobar_nn::{Linear, LinearOptions};
use isobar_shard::{Init, Params, Placement};
use tch::{Kind, Tensor};

use super::spec::{AttentionKind, AttentionSpec, MixingMode};
use crate::error::Result;

/// Projections of an attention to the context, and the joining of its result with that of the attention within the points.
#[derive(Debug)]
pub(crate) struct Cross<A> {
    query: Linear<A>,
    key: Linear<A>,
    value: Linear<A>,
    mixing: Mixing<A>,
}

#[derive(Debug)]
enum Mixing<A> {
    /// σ(w) self + (1 − σ(w)) cross
    Weighted(A),
    /// gelu(W [self, cross])
    ConcatProject(Linear<A>),
}

impl<A: Array> Cross<A> {
    /// Makes the projections, in models that have a context.
    pub(super) fn of_spec(spec: &AttentionSpec, params: &mut impl Params<Array = A>) -> Result<Option<Self>> {
        let Some((context, mode)) = spec.context else { return Ok(None) };
        let features = spec.features();
        if context == 0 {
            if spec.kind == AttentionKind::Slices {
                unused(features, mode, params)?;
            }
            return Ok(None);
        }
        let mut linear =
            |name: &str, inputs: i64| spec.start.linear([inputs, features], true, &mut params.scope(name));
        let (query, key) = (linear("cross_q", features)?, linear("cross_k", context)?);
        let value = linear("cross_v", context)?;
        let mixing = match mode {
            MixingMode::Weighted => {
                let weight = params.param("state_mixing", &[], Init::Constant(0.0), Placement::Replicate)?;
                Mixing::Weighted(weight)
            }
            MixingMode::ConcatProject => Mixing::ConcatProject(linear("concat_project.0", 2 * features)?),
        };
        Ok(Some(Self { query, key, value, mixing }))
    }

    pub(super) fn query(&self, x: &A) -> Result<A> {
        Ok(self.query.forward(x)?)
    }

    /// Keys and values of the context.
    pub(super) fn keys(&self, context: &A) -> Result<[A; 2]> {
        Ok([self.key.forward(context)?, self.value.forward(context)?])
    }

    /// Joins the results of both attentions.
    pub(super) fn mix(&self, own: &A, cross: &A) -> Result<A> {
        Ok(match &self.mixing {
            // σ(w) self + (1 − σ(w)) cross
            Mixing::Weighted(weight) => {
                let gate = weight.unary(isobar_array::Unary::Sigmoid)?;
                cross.add(&own.sub(cross)?.mul(&gate)?)?
            }
            Mixing::ConcatProject(linear) => linear.forward(&A::cat(&[own, cross], -1)?)?.gelu()?,
        })
    }
}

/// PhysicsNeMo's layers of an attention to no context, which are never used: here they are buffers.
fn unused<A: Array>(features: i64, mode: MixingMode, params: &mut impl Params<Array = A>) -> Result<()> {
    let mut layers = vec![("cross_q", features), ("cross_k", 0), ("cross_v", 0)];
    let whole = Placement::Replicate;
    match mode {
        MixingMode::Weighted => drop(params.buffer("state_mixing", &[], Init::Constant(0.0), whole)?),
        MixingMode::ConcatProject => layers.push(("concat_project.0", 2 * features)),
    }
    for (name, inputs) in layers {
        let mut params = params.scope(name);
        let start = || if inputs == 0 { Init::Constant(0.0) } else { Init::FanIn(inputs) };
        params.buffer("weight", &[features, inputs], start(), whole)?;
        params.buffer("bias", &[features], start(), whole)?;
    }
    Ok(())
}

/// Makes a linear layer whose weight starts orthogonal: Saxe et al., *Exact solutions to the nonlinear dynamics of learning in deep
/// linear neural networks*, arXiv:1312.6120. Its bias starts as PyTorch's.
pub(super) fn orthogonal<A: Array>(
    [inputs, outputs]: [i64; 2],
    params: &mut impl Params<Array = A>,
) -> Result<Linear<A>> {
    let normal = Init::Normal { mean: 0.0, std: 1.0 };
    let drawn = params.draw("weight", &[outputs, inputs], &normal, Placement::Replicate)?;
    let (values, layout) = drawn.into_local()?;
    // A counter draws nothing.
    let values = if values.dim() == 2 { orthogonalized(&values)? } else { values };
    let weight_init = Some(Init::Given(A::from_local(values, &layout)));
    let options = LinearOptions { weight_init, ..LinearOptions::default() };
    Ok(Linear::with_options(inputs, outputs, options, params)?)
}

/// The orthogonal factor of a matrix, or of its transpose where that is taller, with the signs that make it unique.
fn orthogonalized(matrix: &Tensor) -> Result<Tensor> {
    let run = || {
        let [rows, columns] = matrix.size()[..] else { return Ok(matrix.shallow_clone()) };
        let double = matrix.f_detach()?.f_to_kind(Kind::Double)?;
        let tall = if rows < columns { double.f_transpose(0, 1)? } else { double };
        let (q, r) = Tensor::f_linalg_qr(&tall, "reduced")?;
        let q = q.f_mul(&r.f_diagonal(0, 0, 1)?.f_sign()?)?;
        let q = if rows < columns { q.f_transpose(0, 1)? } else { q };
        q.f_to_kind(matrix.kind())?.f_contiguous()
    };
    Ok(isobar_array::kernel::named("orthogonal", &[matrix], run())?)
}
