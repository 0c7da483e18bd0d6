//! Scaled dot product attention.

use std::fmt;

use tch::{Kind, Tensor};

use super::{argument, named};
use crate::dtypes::{Dtype, check_dtypes};
use crate::error::Result;
use crate::random::{Generator, Window};

const OP: &str = "scaled_dot_product_attention";

/// Exchange between queries and keys that different ranks hold. Dense arrays ignore it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AttentionStrategy {
    /// The strategy that moves the fewest bytes: one of the others; or, for few queries, all queries on every rank, and a
    /// reduction of the results for each rank's keys.
    #[default]
    Auto,
    /// Queries stay; blocks of keys and values travel while the block at hand is computed, as in
    /// [Ring Attention](https://arxiv.org/abs/2310.01889). A rank receives the keys and values once, and backward once more
    /// with their gradients.
    Ring,
    /// Queries, keys and values are exchanged so that each rank has all positions of some heads, and the result back, as in
    /// [DeepSpeed Ulysses](https://arxiv.org/abs/2309.14509). There must be as many heads of keys as ranks.
    AllToAll,
}

/// Options of attention beyond softmax(q kᵀ · scale) v. `M` is the type of the mask.
pub struct AttentionOptions<'a, M: ?Sized> {
    /// Mask that broadcasts to the scores `[…, heads, queries, keys]`: of dtype `Bool`, where false hides a key from a query;
    /// or of the queries' dtype, added to the scores, with a gradient.
    pub attn_mask: Option<&'a M>,
    /// Query i sees the keys 0 … i, whatever their numbers (the mask is aligned to the top left). Not with `attn_mask`.
    pub is_causal: bool,
    /// Factor of the products; 1/√features where not given.
    pub scale: Option<f64>,
    /// A head of keys may serve several heads of queries, which follow each other.
    pub enable_gqa: bool,
    /// Weights are zero with this probability, else times 1 / (1 − p): the same ones on every layout.
    pub dropout_p: f64,
    /// Generator of the dropout: one draw for each call.
    pub generator: Option<&'a Generator>,
    /// Offset of the first sample in the global batch, and the size of that batch, if dim 0 is a part of it. Dropout is then that of
    /// the global batch.
    pub batch: Option<(i64, i64)>,
    /// Exchange between ranks.
    pub strategy: AttentionStrategy,
    /// Deals causal queries out to the ranks so that all have as much to do; where not given, if the sequence is long and its
    /// split uneven in work.
    pub balance: Option<bool>,
}

impl<M: ?Sized> Default for AttentionOptions<'_, M> {
    fn default() -> Self {
        Self {
            attn_mask: None,
            is_causal: false,
            scale: None,
            enable_gqa: false,
            dropout_p: 0.0,
            generator: None,
            batch: None,
            strategy: AttentionStrategy::Auto,
            balance: None,
        }
    }
}

impl<M: ?Sized> Clone for AttentionOptions<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: ?Sized> Copy for AttentionOptions<'_, M> {}

impl<M: ?Sized + fmt::Debug> fmt::Debug for AttentionOptions<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttentionOptions")
            .field("attn_mask", &self.attn_mask)
            .field("is_causal", &self.is_causal)
            .field("scale", &self.scale)
            .field("enable_gqa", &self.enable_gqa)
            .field("dropout_p", &self.dropout_p)
            .field("batch", &self.batch)
            .field("strategy", &self.strategy)
            .field("balance", &self.balance)
            .finish_non_exhaustive()
    }
}

impl<'a, M: ?Sized> AttentionOptions<'a, M> {
    /// Returns the options with another mask.
    ///
    /// ```
    /// use isobar_array::AttentionOptions;
    /// use tch::Tensor;
    ///
    /// let options = AttentionOptions::<Tensor> { scale: Some(0.5), ..AttentionOptions::default() };
    /// let mask = Tensor::from_slice(&[true, false]);
    /// let masked = options.with_mask(Some(&mask));
    /// assert_eq!((masked.scale, masked.attn_mask.is_some()), (Some(0.5), true));
    /// ```
    pub fn with_mask<N: ?Sized>(self, attn_mask: Option<&'a N>) -> AttentionOptions<'a, N> {
        AttentionOptions {
            attn_mask,
            is_causal: self.is_causal,
            scale: self.scale,
            enable_gqa: self.enable_gqa,
            dropout_p: self.dropout_p,
            generator: self.generator,
            batch: self.batch,
            strategy: self.strategy,
            balance: self.balance,
        }
    }
}

/// Attention.
pub trait Attention: Sized {
    /// Computes softmax(`query` `key`ᵀ · scale + mask) `value` over the keys: `query` `[…, heads, queries, features]`, `key`
    /// `[…, heads, keys, features]`, `value` `[…, heads, keys, out]`, the result `[…, heads, queries, out]`. Keys and values
    /// of one sample are broadcast to all.
    ///
    /// # Errors
    ///
    /// Shapes or dtypes that do not fit; a mask together with `is_causal`; dropout without a generator.
    ///
    /// ```
    /// use isobar_array::{Attention, AttentionOptions};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let x = Tensor::randn([1, 2, 6, 4], (Kind::Double, Device::Cpu));
    /// let options = AttentionOptions { is_causal: true, ..Default::default() };
    /// let y = Attention::scaled_dot_product_attention(&x, &x, &x, &options)?;
    /// // The first query sees the first key only.
    /// assert!((&y - &x).narrow(2, 0, 1).abs().max().double_value(&[]) < 1e-12);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn scaled_dot_product_attention(
        query: &Self,
        key: &Self,
        value: &Self,
        options: &AttentionOptions<'_, Self>,
    ) -> Result<Self>;
}

impl Attention for Tensor {
    fn scaled_dot_product_attention(
        query: &Self,
        key: &Self,
        value: &Self,
        options: &AttentionOptions<'_, Self>,
    ) -> Result<Self> {
        let AttentionOptions { attn_mask, is_causal, scale, enable_gqa, dropout_p, generator, .. } = *options;
        let operand = |name, x: &Self| (name, x.kind(), Dtype::Operand);
        let tensors =
            [("query", query.kind(), Dtype::Floating), operand("key", key), operand("value", value)];
        check_dtypes(OP, tensors, Tensor::device(query))?;
        if options.batch.is_some() && query.dim() < 3 {
            let shape = query.size();
            let reason =
                format!("query {shape:?}: a part of a batch needs a dim of samples before the queries");
            return Err(argument(OP, reason));
        }
        if is_causal && attn_mask.is_some() {
            return Err(argument(OP, "a mask and is_causal: give one of them"));
        }
        if dropout_p == 0.0 {
            let result = Tensor::f_scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa,
            );
            return named(OP, &[query, key, value], result);
        }
        let Some(generator) = generator.filter(|_| (0.0..1.0).contains(&dropout_p)) else {
            let reason = format!("dropout of {dropout_p}: expected [0, 1), and a generator to draw from");
            return Err(argument(OP, reason));
        };
        // libtorch's own dropout would not be the same on every layout.
        let weights = named(OP, &[query, key, value], weights(query, key, options))?;
        let window = Window::of_batch(&weights.size(), options.batch)?;
        let mask = generator.dropout_mask(&window, dropout_p, (weights.kind(), weights.device()))?;
        let product =
            weights.f_mul(&mask).and_then(|kept| kept.f_matmul(&repeated(value, query, enable_gqa)?));
        named(OP, &[query, key, value], product)
    }
}

/// Returns the softmax of the scores; a query that sees no key has weights of 0.
fn weights(
    query: &Tensor,
    key: &Tensor,
    options: &AttentionOptions<'_, Tensor>,
) -> Result<Tensor, tch::TchError> {
    let features = query.size().last().copied().unwrap_or(1);
    let scale = options.scale.unwrap_or((features as f64).sqrt().recip());
    let key = repeated(key, query, options.enable_gqa)?.f_transpose(-2, -1)?;
    let scores = query.f_matmul(&key)?.f_mul_scalar(scale)?;
    let causal;
    let mask = match options.is_causal {
        true => {
            let shape = scores.size();
            causal = Tensor::f_ones(&shape[shape.len() - 2..], (Kind::Bool, scores.device()))?.f_tril(0)?;
            Some(&causal)
        }
        false => options.attn_mask,
    };
    let scores = match mask {
        Some(seen) if seen.kind() == Kind::Bool => {
            // tch panics if a call with a scalar argument fails, so shapes that do not broadcast must fail first.
            scores.f_masked_fill(&seen.f_logical_not()?.f_expand_as(&scores)?, f64::NEG_INFINITY)?
        }
        Some(added) => scores.f_add(added)?,
        None => scores,
    };
    let hidden = scores.f_eq(f64::NEG_INFINITY)?.f_all_dim(-1, true)?;
    scores.f_softmax(-1, scores.kind())?.f_masked_fill(&hidden, 0.0)
}

/// Repeats heads of keys or values for the heads of queries that they serve.
fn repeated(x: &Tensor, query: &Tensor, enable_gqa: bool) -> Result<Tensor, tch::TchError> {
    let (heads, wanted) = (x.size(), query.size());
    let [.., own, _, _] = heads[..] else { return Ok(x.shallow_clone()) };
    let [.., all, _, _] = wanted[..] else { return Ok(x.shallow_clone()) };
    match enable_gqa && own > 0 && own != all {
        true => x.f_repeat_interleave_self_int(all / own, -3, None),
        false => Ok(x.shallow_clone()),
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

    fn random(seed: u64, shape: &[i64]) -> Tensor {
        Generator::new(seed).normal(&Window::whole(shape), 0.0, 1.0, DOUBLE).unwrap()
    }

    fn attend(q: &Tensor, k: &Tensor, v: &Tensor, options: &AttentionOptions<'_, Tensor>) -> Tensor {
        Attention::scaled_dot_product_attention(q, k, v, options).unwrap()
    }

    #[track_caller]
    fn assert_close(got: &Tensor, want: &Tensor) {
        assert_eq!(got.size(), want.size());
        let error = (got - want).abs().max().double_value(&[]);
        assert!(error < 1e-12, "differs by {error}");
    }

    /// A generator without effect leads through the matrix of scores, with p so small that nothing is dropped.
    #[test]
    fn scores_by_hand_are_those_of_libtorch() {
        let (q, k, v) = (random(1, &[2, 4, 5, 8]), random(2, &[2, 2, 7, 8]), random(3, &[2, 2, 7, 3]));
        let generator = Generator::new(4);
        let hidden = random(5, &[5, 7]).gt(-0.5);
        let added = random(6, &[2, 1, 5, 7]);
        let grouped = AttentionOptions { enable_gqa: true, ..Default::default() };
        for options in [
            grouped,
            AttentionOptions { is_causal: true, ..grouped },
            AttentionOptions { attn_mask: Some(&hidden), scale: Some(0.7), ..grouped },
            AttentionOptions { attn_mask: Some(&added), ..grouped },
        ] {
            let p = 1e-15;
            let by_hand = AttentionOptions { dropout_p: p, generator: Some(&generator), ..options };
            assert_close(&attend(&q, &k, &v, &by_hand), &attend(&q, &k, &v, &options));
        }
    }

    #[test]
    fn a_query_that_sees_no_key_gets_zeros() {
        let x = random(1, &[1, 1, 3, 4]);
        let seen = Tensor::from_slice2(&[[true, false, true], [false, false, false], [true, true, true]]);
        let generator = Generator::new(2);
        let options = AttentionOptions { attn_mask: Some(&seen), ..Default::default() };
        for options in [options, AttentionOptions { dropout_p: 0.5, generator: Some(&generator), ..options }]
        {
            let row = attend(&x, &x, &x, &options).narrow(2, 1, 1);
            assert_eq!(row, row.zeros_like());
        }
    }

    #[test]
    fn options_that_do_not_fit_are_errors() {
        let x = random(1, &[1, 1, 3, 4]);
        let error = |options: &AttentionOptions<'_, Tensor>| {
            Attention::scaled_dot_product_attention(&x, &x, &x, options).unwrap_err().to_string()
        };
        let mask = Tensor::ones([3, 3], DOUBLE);
        let both = AttentionOptions { attn_mask: Some(&mask), is_causal: true, ..Default::default() };
        assert!(error(&both).contains("give one of them"));
        let dropout = AttentionOptions { dropout_p: 0.5, ..Default::default() };
        assert!(error(&dropout).contains("a generator to draw from"));
    }
}
