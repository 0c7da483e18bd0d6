//! The operators of sharded tensors.

use anyhow::{Context, Result};
use isobar_array::Attrs;
use isobar_shard::{ShardTensor, forbid_hidden_communication};

use super::{Forward, Held, Operator, Part, Rank, budget};
use crate::verify::case::Case;
use crate::verify::layout::{Layout, Parts};

/// An operator of `isobar-shard`, by its name there and in the cases.
pub(crate) struct Sharded {
    name: &'static str,
    /// Its tensors in order; those of the case where empty.
    tensors: &'static [&'static str],
}

const fn plain(name: &'static str) -> Sharded {
    Sharded { name, tensors: &[] }
}

const fn ordered(name: &'static str, tensors: &'static [&'static str]) -> Sharded {
    Sharded { name, tensors }
}

/// All of them.
pub(crate) static ALL: &[Sharded] = &[
    ordered("add", &["input", "other"]),
    ordered("sub", &["input", "other"]),
    ordered("mul", &["input", "other"]),
    ordered("div", &["input", "other"]),
    ordered("maximum", &["input", "other"]),
    ordered("minimum", &["input", "other"]),
    ordered("pow", &["input", "other"]),
    ordered("where", &["condition", "input", "other"]),
    plain("neg"),
    plain("abs"),
    plain("square"),
    plain("sqrt"),
    plain("rsqrt"),
    plain("reciprocal"),
    plain("exp"),
    plain("log"),
    plain("sin"),
    plain("cos"),
    plain("tanh"),
    plain("sigmoid"),
    plain("logsigmoid"),
    plain("relu"),
    plain("elu"),
    plain("selu"),
    plain("silu"),
    plain("gelu"),
    plain("softplus"),
    plain("softsign"),
    ordered("linear", &["input", "weight", "bias"]),
    ordered("matmul", &["input", "other"]),
    ordered("bmm", &["input", "other"]),
    plain("einsum"),
    ordered("conv1d", &["input", "weight", "bias"]),
    ordered("conv2d", &["input", "weight", "bias"]),
    ordered("conv3d", &["input", "weight", "bias"]),
    ordered("conv_transpose1d", &["input", "weight", "bias"]),
    ordered("conv_transpose2d", &["input", "weight", "bias"]),
    ordered("conv_transpose3d", &["input", "weight", "bias"]),
    plain("max_pool1d"),
    plain("max_pool2d"),
    plain("max_pool3d"),
    plain("avg_pool1d"),
    plain("avg_pool2d"),
    plain("avg_pool3d"),
    plain("adaptive_avg_pool1d"),
    plain("adaptive_avg_pool2d"),
    plain("adaptive_avg_pool3d"),
    plain("adaptive_max_pool1d"),
    plain("adaptive_max_pool2d"),
    plain("adaptive_max_pool3d"),
    plain("interpolate"),
    plain("pad"),
    plain("roll"),
    plain("flip"),
    plain("unfold"),
    ordered("layer_norm", &["input", "weight", "bias"]),
    ordered("group_norm", &["input", "weight", "bias"]),
    ordered("batch_norm", &["input", "weight", "bias"]),
    ordered("instance_norm", &["input", "weight", "bias"]),
    plain("softmax"),
    plain("log_softmax"),
    ordered("scaled_dot_product_attention", &["query", "key", "value", "attn_mask"]),
    plain("sum"),
    plain("mean"),
    plain("prod"),
    plain("amax"),
    plain("amin"),
    plain("var"),
    plain("std"),
    plain("norm"),
    plain("logsumexp"),
    plain("any"),
    plain("all"),
    plain("argmax"),
    plain("argmin"),
    plain("cumsum"),
    plain("sort"),
    plain("topk"),
    ordered("index_select", &["input", "index"]),
    ordered("gather", &["input", "index"]),
    ordered("index_add", &["input", "index", "source"]),
    ordered("scatter_add", &["input", "index", "source"]),
    ordered("embedding", &["input", "weight"]),
    plain("select"),
    plain("slice"),
    plain("narrow"),
    plain("unbind"),
    plain("split"),
    plain("chunk"),
    plain("view"),
    plain("reshape"),
    plain("flatten"),
    plain("permute"),
    plain("transpose"),
    plain("squeeze"),
    plain("unsqueeze"),
    plain("expand"),
    plain("repeat"),
    plain("cat"),
    plain("stack"),
    plain("fft"),
    plain("ifft"),
    plain("rfft"),
    plain("irfft"),
    plain("fft2"),
    plain("ifft2"),
    plain("rfft2"),
    plain("irfft2"),
    plain("fftn"),
    plain("ifftn"),
    plain("rfftn"),
    plain("irfftn"),
    ordered("cdist", &["a", "b"]),
    ordered("knn", &["points", "queries"]),
];

impl Sharded {
    /// The case's tensors that go in, in the operator's order.
    fn names(&self, case: &Case) -> Vec<String> {
        let inputs = case.header.inputs.iter().chain(&case.header.params);
        let there: Vec<String> = inputs.filter(|name| case.get(name).is_some()).cloned().collect();
        match self.tensors {
            [] => there,
            ordered => {
                ordered.iter().map(|name| (*name).to_owned()).filter(|name| there.contains(name)).collect()
            }
        }
    }
}

impl Operator for Sharded {
    fn name(&self) -> &'static str {
        self.name
    }

    fn forward(&self, rank: &Rank, case: &Case, layout: &Layout) -> Result<Forward> {
        let mut leaves = Vec::new();
        let mut tensors = Vec::new();
        for name in self.names(case) {
            let shape = case.tensor(&name)?.size();
            let of_shards = layout.shard(&name, &shape, &rank.mesh)?;
            let leaf = Held::leaf(rank, case, &name, layout.parts(&shape, &layout.of(&name)))?;
            tensors.push(ShardTensor::from_parts(&leaf.tensor, &of_shards)?);
            leaves.push(leaf);
        }
        // An operator that would gather its inputs silently does not count as supported.
        let _guard = forbid_hidden_communication();
        let attrs: &Attrs = case.header.attrs.as_object().context("`attrs` is no table")?;
        let inputs: Vec<&ShardTensor> = tensors.iter().collect();
        let results = ShardTensor::op(self.name, &inputs, attrs)?;
        let mut outputs = Vec::new();
        for (name, result) in case.header.outputs.iter().zip(results) {
            let whole = result.redistribute(None, &settled(&result))?;
            let part = Part::Of(Parts::of_layout(whole.layout()));
            outputs.push(Held { name: name.clone(), tensor: whole.local().shallow_clone(), part });
        }
        Ok(Forward::Ran { outputs, leaves })
    }

    fn budget(&self, case: &Case, layout: &Layout, rank: usize) -> Result<u64> {
        budget::received(self.name, &self.names(case), case, layout, rank)
    }
}

/// The placements of a tensor with what is partial replicated: the values are looked at.
pub(super) fn settled(tensor: &ShardTensor) -> Vec<isobar_shard::Placement> {
    tensor.placements().iter().map(|placement| placement.of_gradient()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_of_one_operator_each() {
        let mut names: Vec<&str> = ALL.iter().map(|operator| operator.name).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
