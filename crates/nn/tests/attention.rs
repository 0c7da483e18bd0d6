//! Multi-head attention.

use isobar_array::{Array, AttentionStrategy, Generator};
use isobar_nn::{Mode, MultiheadAttention, MultiheadAttentionOptions, Result};
use tch::{Kind, Tensor};

use crate::case::{Named, layer_test, normal};

fn options() -> MultiheadAttentionOptions {
    MultiheadAttentionOptions { batch_first: true, ..Default::default() }
}

/// Heads of a projection, `[batch, heads, tokens, features]`, from `[batch, tokens, width]`.
fn heads(p: &Named, x: &Tensor, third: i64, count: i64) -> Tensor {
    let width = x.size()[2];
    let weight = p.get("in_proj_weight").narrow(0, third * width, width);
    let bias = p.get("in_proj_bias").narrow(0, third * width, width);
    let y = x.linear(&weight, Some(bias));
    y.reshape([x.size()[0], x.size()[1], count, width / count]).transpose(1, 2)
}

/// Attention with a matrix of scores, to which `mask` is added; `drop` is applied to the weights.
fn reference(p: &Named, t: [&Tensor; 3], mask: Option<&Tensor>, drop: impl Fn(Tensor) -> Tensor) -> Tensor {
    let count = 4;
    let [q, k, v] = [heads(p, t[0], 0, count), heads(p, t[1], 1, count), heads(p, t[2], 2, count)];
    let scores = q.matmul(&k.transpose(2, 3)) / (q.size()[3] as f64).sqrt();
    let scores = match mask {
        Some(mask) => scores + mask,
        None => scores,
    };
    let y = drop(scores.softmax(-1, Kind::Double)).matmul(&v).transpose(1, 2).reshape(t[0].size());
    y.linear(&p.get("out_proj.weight"), Some(p.get("out_proj.bias")))
}

fn causal(tokens: i64) -> Tensor {
    Tensor::full([tokens, tokens], f64::NEG_INFINITY, (Kind::Double, tch::Device::Cpu)).triu(1)
}

/// Self-attention with options of its own.
fn attend<A: Array>(layer: &MultiheadAttention<A>, x: &A, causal: bool, mode: Mode<'_>) -> Result<A> {
    layer.forward(x, x, x, None, causal, mode)
}

layer_test!(self_attention, inputs: [normal(1, &[2, 8, 16])], splits: &[&[0], &[1], &[2]], training: false,
    make: |params| MultiheadAttention::new(16, 4, options(), params),
    run: |layer, x, mode| attend(&layer, &x[0], false, mode),
    torch: |p, t| reference(p, [&t[0]; 3], None, |weights| weights));

layer_test!(causal_ring_attention, inputs: [normal(1, &[2, 8, 16])], splits: &[&[1]], training: false,
    make: |params| MultiheadAttention::new(16, 4, MultiheadAttentionOptions { strategy: AttentionStrategy::Ring, ..options() }, params),
    run: |layer, x, mode| attend(&layer, &x[0], true, mode),
    torch: |p, t| reference(p, [&t[0]; 3], Some(&causal(8)), |weights| weights));

layer_test!(causal_all_to_all_attention, inputs: [normal(1, &[2, 8, 16])], splits: &[&[1]], training: false,
    make: |params| MultiheadAttention::new(16, 4, MultiheadAttentionOptions { strategy: AttentionStrategy::AllToAll, ..options() }, params),
    run: |layer, x, mode| attend(&layer, &x[0], true, mode),
    torch: |p, t| reference(p, [&t[0]; 3], Some(&causal(8)), |weights| weights));

layer_test!(cross_attention_with_a_mask, inputs: [normal(1, &[2, 6, 16]), normal(2, &[2, 8, 16]), normal(3, &[2, 8, 16]), normal(4, &[6, 8])],
    splits: &[&[0, 0, 0, 0], &[1, 1, 1, 1]], training: false,
    make: |params| MultiheadAttention::new(16, 4, options(), params),
    run: |layer, x, mode| layer.forward(&x[0], &x[1], &x[2], Some(&x[3]), false, mode),
    torch: |p, t| reference(p, [&t[0], &t[1], &t[2]], Some(&t[3]), |weights| weights));

layer_test!(sequence_first, inputs: [normal(1, &[8, 2, 16])], splits: &[&[0], &[1]], training: false,
    make: |params| MultiheadAttention::new(16, 4, MultiheadAttentionOptions::default(), params),
    run: |layer, x, mode| attend(&layer, &x[0], false, mode),
    torch: |p, t| reference(p, [&t[0].transpose(0, 1); 3], None, |weights| weights).transpose(0, 1));

layer_test!(windowed_attention, inputs: [normal(1, &[2, 8, 16])], splits: &[&[0], &[1]], training: false,
make: |params| MultiheadAttention::new(16, 4, MultiheadAttentionOptions { window: Some(2), ..options() }, params),
run: |layer, x, mode| attend(&layer, &x[0], false, mode),
torch: |p, t| {
    let windows: Vec<Tensor> = t[0].split(2, 1).iter().map(|x| reference(p, [x; 3], None, |weights| weights)).collect();
    Tensor::cat(&windows, 1)
});

layer_test!(attention_with_dropout, inputs: [normal(1, &[2, 8, 16])], splits: &[&[0], &[1]], training: true,
make: |params| MultiheadAttention::new(16, 4, MultiheadAttentionOptions { dropout: 0.3, ..options() }, params),
run: |layer, x, mode| attend(&layer, &x[0], false, mode),
torch: |p, t| reference(p, [&t[0]; 3], None, |weights| {
    let window = isobar_array::Window::whole(&weights.size());
    let mask = Generator::new(5).dropout_mask(&window, 0.3, (Kind::Double, tch::Device::Cpu)).unwrap();
    weights * mask
}));
