//! Operators on tensors without memory.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_torch::meta;
use tch::{Device, Kind, Tensor};

fn field(shape: &[i64], kind: Kind) -> Tensor {
    meta::enable().unwrap();
    Tensor::f_rand(shape, (kind, meta::DEVICE)).unwrap()
}

/// Shape of the same operator on the CPU, and on the meta device; with those of the gradients.
fn same_shapes(shapes: &[&[i64]], op: impl Fn(&[Tensor]) -> Tensor) {
    meta::enable().unwrap();
    let run = |device: Device| {
        let inputs: Vec<Tensor> = shapes
            .iter()
            .map(|shape| Tensor::rand(*shape, (Kind::Float, device)).set_requires_grad(true))
            .collect();
        let output = op(&inputs);
        output.abs().sum(Kind::Float).backward();
        let grads: Vec<_> = inputs.iter().map(|input| (input.grad().size(), input.grad().stride())).collect();
        assert_eq!(output.device(), device);
        (output.size(), output.stride(), output.kind(), grads)
    };
    assert_eq!(run(meta::DEVICE), run(Device::Cpu));
}

#[test]
fn convolutions() {
    for groups in [1, 2] {
        same_shapes(&[&[2, 4, 9, 11], &[6, 4 / groups, 3, 2], &[6]], |t| {
            t[0].conv2d(&t[1], Some(&t[2]), [2, 1], [1, 3], [1, 2], groups)
        });
        same_shapes(&[&[2, 4, 9, 11], &[4, 6 / groups, 3, 2], &[6]], |t| {
            t[0].conv_transpose2d(&t[1], Some(&t[2]), [2, 1], [1, 0], [1, 0], groups, [1, 2])
        });
    }
    same_shapes(&[&[2, 3, 7], &[5, 3, 3], &[5]], |t| t[0].conv1d(&t[1], Some(&t[2]), 1, 1, 1, 1));
    same_shapes(&[&[1, 3, 7, 8, 9], &[5, 3, 3, 3, 3]], |t| t[0].conv3d(&t[1], None::<&Tensor>, 1, 1, 1, 1));
}

#[test]
fn transforms() {
    same_shapes(&[&[2, 6, 9]], |t| t[0].fft_rfft2(None::<&[i64]>, [-2, -1], "ortho"));
    same_shapes(&[&[2, 6, 9]], |t| {
        t[0].fft_rfft2(None::<&[i64]>, [-2, -1], "ortho").fft_irfft2([6_i64, 9].as_slice(), [-2, -1], "ortho")
    });
    same_shapes(&[&[2, 6, 9]], |t| t[0].fft_fft(None, 2, "backward"));
}

#[test]
fn norms() {
    same_shapes(&[&[2, 4, 6], &[4, 6], &[4, 6]], |t| {
        t[0].layer_norm([4, 6], Some(&t[1]), Some(&t[2]), 1e-5, false)
    });
    same_shapes(&[&[2, 4, 6], &[4], &[4]], |t| t[0].group_norm(2, Some(&t[1]), Some(&t[2]), 1e-5, false));
    let none = None::<&Tensor>;
    same_shapes(&[&[2, 4, 6], &[4], &[4]], |t| {
        t[0].batch_norm(Some(&t[1]), Some(&t[2]), none, none, true, 0.1, 1e-5, false)
    });
    same_shapes(&[&[2, 4, 6]], |t| t[0].var_correction([0, 2].as_slice(), 0, true));
    same_shapes(&[&[2, 4, 6]], |t| t[0].var_mean_correction([-1].as_slice(), 0, false).1);
}

#[test]
fn choices_and_products() {
    same_shapes(&[&[4, 5], &[5]], |t| t[0].where_self(&t[0].gt(0.5), &t[1]));
    same_shapes(&[&[4, 5]], |t| {
        let index = Tensor::from_slice(&[0_i64, 3, 3]).to_device(t[0].device());
        t[0].index_select(0, &index)
    });
    same_shapes(&[&[2, 3, 4, 5], &[2, 3, 6, 5], &[2, 3, 6, 5]], |t| {
        Tensor::scaled_dot_product_attention(&t[0], &t[1], &t[2], None::<&Tensor>, 0.0, false, None, false)
    });
    same_shapes(&[&[4, 5], &[6, 5], &[6]], |t| {
        t[0].linear(&t[1], Some(&t[2])).gelu("none").softmax(-1, None)
    });
}

#[test]
fn the_rest() {
    same_shapes(&[&[4, 5]], |t| t[0].relu().flip([1]).roll([1], [0]).hardtanh());
    same_shapes(&[&[2, 3, 8, 6]], |t| {
        t[0].adaptive_avg_pool2d([4, 3]) + t[0].reflection_pad2d([1, 0, 2, 1]).max()
    });
    same_shapes(&[&[2, 3, 9, 7, 6]], |t| t[0].max_pool3d([2, 3, 2], [2, 2, 2], [1, 1, 1], [1, 1, 1], true));
    same_shapes(&[&[2, 3, 8, 6], &[2, 5, 4, 2]], |t| t[0].grid_sampler(&t[1], 0, 0, false));
    same_shapes(&[&[7, 3]], |t| {
        let index = Tensor::from_slice(&[1_i64, 6]).to_device(t[0].device());
        Tensor::embedding(&t[0], &index, -1, false, false)
    });
    same_shapes(&[&[4, 9]], |t| t[0].unfold(1, 3, 2));
    same_shapes(&[&[4, 2], &[5, 2]], |t| Tensor::cdist(&t[0], &t[1], 2.0, None));
    same_shapes(&[&[4, 2], &[4, 2]], |t| t[0].huber_loss(&t[1], tch::Reduction::None, 1.0));
    same_shapes(&[&[4, 2], &[4, 2]], |t| t[0].mse_loss(&t[1], tch::Reduction::Mean) * t[0].std(true));
    same_shapes(&[&[4, 2], &[2]], |t| t[1].rsub(&t[0]) + t[1].floor_divide(&t[0]).detach());
    same_shapes(&[&[4, 2]], |t| t[0].log_sigmoid() * t[0].isnan().logical_not());
}

/// Values that are read are 0, in whatever way.
#[test]
fn values_are_zero() {
    let x = field(&[3, 2], Kind::Double);
    assert_eq!(x.double_value(&[1, 1]), 0.0);
    assert_eq!(Vec::<f64>::try_from(x.to_device(Device::Cpu).reshape(-1)).unwrap(), [0.0; 6]);
    let mut host = Tensor::ones([3, 2], (Kind::Double, Device::Cpu));
    host.copy_(&x);
    assert_eq!(host.sum(Kind::Double).double_value(&[]), 0.0);
}

/// Tensors saved for backward are counted.
#[test]
fn saved_tensors_count() {
    meta::enable().unwrap();
    let before = meta::live_bytes();
    let x = field(&[1 << 10, 1 << 10], Kind::Float).set_requires_grad(true);
    let y = x.exp().exp();
    // Each exponential keeps its result.
    assert_eq!(meta::live_bytes() - before, 3 << 22);
    meta::reset_peak();
    y.sum(Kind::Float).backward();
    drop(y);
    assert!(meta::peak_bytes() - before >= 4 << 22);
    assert_eq!(meta::live_bytes() - before, 2 << 22, "x and its gradient");
}
