//! One attention, dense and on layouts.

use isobar_mesh::DeviceMesh;
use isobar_shard::{AttentionOptions, Layout, Placement, ShardTensor, grad};
use isobar_torch::autograd::BackwardOptions;
use tch::Tensor;

use crate::common::{SPLITS, Split, difference, leaf, numbers, placements};

/// Query, key and value, and the gradient of the result.
pub(crate) struct Case {
    pub(crate) inputs: [Tensor; 3],
    pub(crate) cotangent: Tensor,
}

impl Case {
    pub(crate) fn new(query: &[i64], key: &[i64], out: i64) -> Self {
        let with = |shape: &[i64]| [&shape[..shape.len() - 1], &[out]].concat();
        let inputs = [numbers(query, 1), numbers(key, 2), numbers(&with(key), 3)];
        Self { inputs, cotangent: numbers(&with(query), 4) }
    }

    /// The result and its gradients by libtorch.
    pub(crate) fn dense(&self, mask: Option<&Tensor>, is_causal: bool, gqa: bool) -> (Tensor, Vec<Tensor>) {
        let x: Vec<Tensor> = self.inputs.iter().map(|x| x.detach().copy().set_requires_grad(true)).collect();
        let y = Tensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], mask, 0.0, is_causal, None, gqa);
        (&y * &self.cotangent).sum(None).backward();
        let grads = x.iter().map(Tensor::grad).collect();
        (y.detach(), grads)
    }

    pub(crate) fn check(
        &self,
        layouts: [&Layout; 3],
        options: &AttentionOptions<'_>,
        want: &(Tensor, Vec<Tensor>),
    ) {
        let x: Vec<ShardTensor> =
            self.inputs.iter().zip(layouts).map(|(whole, layout)| leaf(whole, layout)).collect();
        let what = || format!("{layouts:?} {:?} {:?}", options.strategy, options.balance);
        let y = ShardTensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], options);
        let y = y.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(y.local().size(), y.layout().local_shape());
        let error = difference(&y.full_tensor(None).unwrap(), &want.0);
        assert!(error < 1e-9, "{error} of {}", what());
        let g = ShardTensor::distribute_as(&self.cotangent, y.layout()).unwrap();
        let grads = grad(&[&y], &[&x[0], &x[1], &x[2]], &[Some(&g)], BackwardOptions::default()).unwrap();
        for (index, (got, want)) in grads.iter().zip(&want.1).enumerate() {
            let got = got.as_ref().unwrap();
            assert_eq!(got.layout(), layouts[index]);
            let error = difference(&got.full_tensor(None).unwrap(), want);
            assert!(error < 1e-9, "gradient {index} wrong by {error} of {}", what());
        }
    }
}

/// Layouts of query, key and value: each alone, all at once, and mixtures.
pub(crate) fn triples(mesh: &DeviceMesh, case: &Case) -> Vec<[Layout; 3]> {
    let n = case.inputs[0].dim();
    let all = placements(n - 1, mesh.ndim());
    let replicated = vec![Placement::Replicate; mesh.ndim()];
    let mut triples = Vec::new();
    for (index, placed) in all.iter().enumerate() {
        for (number, &split) in SPLITS.iter().enumerate() {
            // Every split with one mixture, so that all meet all over the placements.
            let other = &all[(index * 7 + number * 3) % all.len()];
            let last = SPLITS[(number + 1) % 4];
            let layout = |which: usize, placements: &[Placement], split: Split| {
                split.layout(mesh, placements, &case.inputs[which].size())
            };
            triples.push([layout(0, placed, split), layout(1, placed, split), layout(2, placed, split)]);
            triples.push([layout(0, placed, split), layout(1, other, last), layout(2, placed, last)]);
            match (index + number) % 3 {
                0 => triples.push([
                    layout(0, placed, split),
                    layout(1, &replicated, split),
                    layout(2, &replicated, split),
                ]),
                1 => triples.push([
                    layout(0, &replicated, split),
                    layout(1, placed, split),
                    layout(2, placed, split),
                ]),
                _ => triples.push([
                    layout(0, other, split),
                    layout(1, placed, last),
                    layout(2, &replicated, split),
                ]),
            }
        }
    }
    triples
}
