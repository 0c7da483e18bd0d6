use rstest::rstest;
use tch::{Kind, Tensor};

use super::*;
use crate::{Parameter, Parameters};

fn leaf(values: &[f64], shape: &[i64]) -> Tensor {
    Tensor::from_slice(values).view(shape).set_requires_grad(true)
}

fn params(entries: &[(&str, &Tensor)]) -> Parameters {
    Parameters::new(entries.iter().map(|(name, t)| Parameter::replicated(*name, t)).collect()).unwrap()
}

/// Gives a leaf exactly this gradient.
fn set_grad(leaf: &Tensor, grad: &Tensor) {
    leaf.grad().defined().then(|| leaf.grad().zero_());
    (leaf * grad).sum(grad.kind()).backward();
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().flatten(0, -1).to_kind(Kind::Double)).unwrap()
}

fn close(found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (f, e) in found.iter().zip(expected) {
        assert!((f - e).abs() <= tolerance * e.abs().max(1.0), "{found:?} instead of {expected:?}");
    }
}

/// The definition, an element at a time.
struct Reference {
    m: f64,
    v: f64,
    t: i32,
}

impl Reference {
    fn step(&mut self, p: f64, g: f64, lr: f64, c: &AdamWConfig, decay: f64) -> f64 {
        self.t += 1;
        self.m = c.beta1 * self.m + (1.0 - c.beta1) * g;
        self.v = c.beta2 * self.v + (1.0 - c.beta2) * g * g;
        let m_hat = self.m / (1.0 - c.beta1.powi(self.t));
        let v_hat = self.v / (1.0 - c.beta2.powi(self.t));
        p - lr * decay * p - lr * m_hat / (v_hat.sqrt() + c.eps)
    }
}

/// Takes some steps, beside `next`, which makes a number of its gradient and learning rate; whether it decays.
fn follows(
    make: impl Fn(&Parameters) -> Box<dyn Optimizer>,
    next: impl Fn(&mut Reference, f64, f64, f64, bool) -> f64,
) -> Box<dyn Optimizer> {
    let weight = leaf(&[1.0, -2.0, 0.5, 3.0], &[2, 2]);
    let bias = leaf(&[0.25, -0.75], &[2]);
    let mut optimizer = make(&params(&[("l.weight", &weight), ("l.bias", &bias)]));
    let mut expected = [1.0, -2.0, 0.5, 3.0, 0.25, -0.75];
    let mut reference: Vec<Reference> = expected.iter().map(|_| Reference { m: 0.0, v: 0.0, t: 0 }).collect();
    for step in 0..7 {
        let lr = 0.1 / (1.0 + step as f64);
        let grads: Vec<f64> = (0..6).map(|i| ((i * 7 + step * 3) as f64).sin() * 2.0).collect();
        set_grad(&weight, &Tensor::from_slice(&grads[..4]).view([2, 2]));
        set_grad(&bias, &Tensor::from_slice(&grads[4..]));
        optimizer.step(lr).unwrap();
        for (i, r) in reference.iter_mut().enumerate() {
            expected[i] = next(r, expected[i], grads[i], lr, i < 4);
        }
        close(&values(&weight), &expected[..4], 1e-13);
        close(&values(&bias), &expected[4..], 1e-13);
    }
    optimizer
}

#[test]
fn adamw_follows_its_definition() {
    let config = AdamWConfig { beta1: 0.8, beta2: 0.95, eps: 1e-6, weight_decay: 0.1, ..Default::default() };
    let _ = follows(
        |params| Box::new(AdamW::new(params, &config).unwrap()),
        |r, p, g, lr, decays| r.step(p, g, lr, &config, if decays { config.weight_decay } else { 0.0 }),
    );
}

#[test]
fn adamw_updates_large_parameters_like_small_ones() {
    let count = 70_001;
    let tensor = |phase: f64| (Tensor::arange(count, (Kind::Double, tch::Device::Cpu)) + phase).sin();
    let large = tensor(0.0).view([1, count]).set_requires_grad(true);
    let picked = [0, 32_767, 32_768, 65_536, 70_000];
    let pick = |t: &Tensor| t.view(-1).index_select(0, &Tensor::from_slice(&picked));
    let small = pick(&large.detach()).view([1, -1]).set_requires_grad(true);
    let mut adamw =
        AdamW::new(&params(&[("large", &large), ("small", &small)]), &AdamWConfig::default()).unwrap();
    for step in 0..3 {
        let grad = tensor(0.3 * f64::from(step));
        set_grad(&large, &grad.view([1, count]));
        set_grad(&small, &pick(&grad).view([1, -1]));
        adamw.step(0.1).unwrap();
    }
    close(&values(&pick(&large.detach())), &values(&small), 1e-15);
}

#[test]
fn adamw_treats_complex_elements_as_pairs() {
    let pairs = [1.0, -2.0, 0.5, 3.0];
    let complex = Tensor::from_slice(&pairs).view([2, 2]).view_as_complex().set_requires_grad(true);
    let real = leaf(&pairs, &[2, 2]);
    let config = AdamWConfig { no_decay: vec![], weight_decay: 0.0, ..Default::default() };
    let mut both = AdamW::new(&params(&[("complex", &complex), ("real", &real)]), &config).unwrap();
    for _ in 0..3 {
        complex.grad().defined().then(|| complex.grad().zero_());
        real.grad().defined().then(|| real.grad().zero_());
        complex.view_as_real().pow_tensor_scalar(4).sum(Kind::Double).backward();
        real.pow_tensor_scalar(4).sum(Kind::Double).backward();
        both.step(0.1).unwrap();
    }
    close(&values(&complex.view_as_real()), &values(&real), 0.0);
}

/// As AdamW without decay, of gradients with the penalty's.
#[test]
fn adam_follows_its_definition() {
    let config = AdamConfig { beta1: 0.8, beta2: 0.95, eps: 1e-6, weight_decay: 0.1, ..Default::default() };
    let plain = AdamWConfig { beta1: 0.8, beta2: 0.95, eps: 1e-6, weight_decay: 0.0, ..Default::default() };
    let adam = follows(
        |params| Box::new(Adam::new(params, &config).unwrap()),
        |r, p, g, lr, decays| {
            let penalty = if decays { config.weight_decay * p } else { 0.0 };
            r.step(p, g + penalty, lr, &plain, 0.0)
        },
    );
    let other = params(&[("l.weight", &leaf(&[0.0; 4], &[2, 2])), ("l.bias", &leaf(&[0.0; 2], &[2]))]);
    let refused = AdamW::new(&other, &plain).unwrap().load_state(&adam.state()).unwrap_err().to_string();
    assert!(refused.contains("adamw"), "{refused}");
}

#[test]
fn lion_follows_its_definition() {
    let config = LionConfig { beta1: 0.8, beta2: 0.95, weight_decay: 0.1, ..Default::default() };
    let weight = leaf(&[1.0, -2.0, 0.5, 3.0], &[2, 2]);
    let bias = leaf(&[0.25, -0.75], &[2]);
    let mut lion = Lion::new(&params(&[("l.weight", &weight), ("l.bias", &bias)]), &config).unwrap();
    let mut expected = [1.0, -2.0, 0.5, 3.0, 0.25, -0.75];
    let mut momentum = [0.0_f64; 6];
    for step in 0..7 {
        let lr = 0.1 / (1.0 + step as f64);
        let grads: Vec<f64> = (0..6).map(|i| ((i * 7 + step * 3) as f64).sin() * 2.0 + 0.1).collect();
        set_grad(&weight, &Tensor::from_slice(&grads[..4]).view([2, 2]));
        set_grad(&bias, &Tensor::from_slice(&grads[4..]));
        lion.step(lr).unwrap();
        for (i, grad) in grads.iter().enumerate() {
            let decay = if i < 4 { config.weight_decay } else { 0.0 };
            let direction = (config.beta1 * momentum[i] + (1.0 - config.beta1) * grad).signum();
            expected[i] -= lr * (direction + decay * expected[i]);
            momentum[i] = config.beta2 * momentum[i] + (1.0 - config.beta2) * grad;
        }
        close(&values(&weight), &expected[..4], 1e-13);
        close(&values(&bias), &expected[4..], 1e-13);
    }
    let (state, mut other) =
        (lion.state(), Lion::new(&params(&[("l.weight", &weight), ("l.bias", &bias)]), &config).unwrap());
    other.load_state(&state).unwrap();
    assert_eq!(other.state().steps, state.steps);
    let wrong = LionConfig { beta2: 1.0, ..config };
    let refused = Lion::new(&params(&[("w", &weight)]), &wrong).unwrap_err().to_string();
    assert_eq!(refused, "optimizer.beta2 is 1, expected a number in [0, 1); --set optimizer.beta2=0.99");
}

/// Orthogonalises a matrix, by its singular values.
fn polar(update: &Tensor, iterations: i32) -> Tensor {
    let (u, s, v) = (update / update.norm()).svd(true, true);
    let quintic = |s: Tensor| &s * 3.4445 - s.pow_tensor_scalar(3) * 4.7750 + s.pow_tensor_scalar(5) * 2.0315;
    let s = (0..iterations).fold(s, |s, _| quintic(s));
    u.matmul(&s.diag(0)).matmul(&v.tr())
}

#[rstest]
#[case::wide(&[2, 3], true)]
#[case::tall(&[5, 2], false)]
#[case::kernel(&[3, 2, 2], true)]
fn muon_follows_its_definition(#[case] shape: &[i64], #[case] nesterov: bool) {
    let config =
        MuonConfig { momentum: 0.8, nesterov, weight_decay: 0.1, iterations: 3, ..Default::default() };
    let count: i64 = shape.iter().product();
    let ramp =
        |from: f64| (Tensor::arange(count, (Kind::Double, tch::Device::Cpu)) * 1.7 + from).sin().view(shape);
    let weight = ramp(0.5).set_requires_grad(true);
    let bias = leaf(&[0.25, -0.75], &[2]);
    let mut muon = Muon::new(&params(&[("l.weight", &weight), ("l.bias", &bias)]), &config).unwrap();
    let (mut expected, mut momentum) = (weight.detach().copy(), ramp(0.0) * 0.0);
    let adamw = AdamWConfig::default();
    let mut reference = Reference { m: 0.0, v: 0.0, t: 0 };
    let mut number = 0.25;
    for step in 0..4 {
        let (lr, grad) = (0.1 / f64::from(step + 1), ramp(0.3 * f64::from(step)));
        set_grad(&weight, &grad);
        set_grad(&bias, &Tensor::from_slice(&[0.5, 0.0]));
        muon.step(lr).unwrap();
        momentum = &momentum * 0.8 + &grad * 0.2;
        let update = if nesterov { &grad * 0.2 + &momentum * 0.8 } else { momentum.shallow_clone() };
        let direction = polar(&update.view([shape[0], -1]), 3).view(shape);
        let size = 0.2 * (shape[0].max(count / shape[0]) as f64).sqrt();
        expected = &expected * (1.0 - lr * 0.1) - direction * (lr * size);
        close(&values(&weight), &values(&expected), 1e-12);
        number = reference.step(number, 0.5, lr, &adamw, 0.0);
        close(&values(&bias)[..1], &[number], 1e-13);
    }
    assert_eq!(
        muon.state().tensors.iter().map(|t| &t.slot[..]).collect::<Vec<_>>(),
        ["momentum_buffer", "exp_avg", "exp_avg_sq"]
    );
    let again = weight.detach().copy().set_requires_grad(true);
    let mut other = Muon::new(&params(&[("l.weight", &again), ("l.bias", &bias)]), &config).unwrap();
    other.load_state(&muon.state()).unwrap();
    for (leaf, muon) in [(&weight, &mut muon), (&again, &mut other)] {
        set_grad(leaf, &ramp(0.9));
        muon.step(0.1).unwrap();
    }
    assert_eq!(values(&again), values(&weight));
    let wrong = MuonConfig { adamw: vec!["head".to_owned()], ..config.clone() };
    let refused = Muon::new(&params(&[("l.weight", &weight)]), &wrong).unwrap_err().to_string();
    let words = r#"optimizer.adamw is "head", expected names of parameters, or their beginnings; for instance --set 'optimizer.adamw=["l.weight"]'"#;
    assert_eq!(refused, words);
    let wrong = MuonConfig { momentum: 1.0, ..config };
    let refused = Muon::new(&params(&[("l.weight", &weight)]), &wrong).unwrap_err().to_string();
    assert_eq!(
        refused,
        "optimizer.momentum is 1, expected a number in [0, 1); --set optimizer.momentum=0.95"
    );
}

#[test]
fn muon_leaves_what_is_no_matrix_to_adamw() {
    let tensor = |shape: &[i64]| Tensor::ones(shape, (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
    let entries = [
        ("fc1.weight", tensor(&[2, 3])),
        ("conv.weight", tensor(&[2, 3, 3, 3])),
        ("fc1.bias", tensor(&[2])),
        ("norm1.weight", tensor(&[4, 4])),
        ("row.weight", tensor(&[1, 9])),
        ("filter.w1", tensor(&[2, 4, 8])),
        ("head.weight", tensor(&[2, 3])),
        ("headroom.weight", tensor(&[2, 3])),
    ];
    let named: Vec<(&str, &Tensor)> = entries.iter().map(|(name, tensor)| (*name, tensor)).collect();
    let config = MuonConfig { adamw: vec!["head".to_owned()], ..Default::default() };
    let state = Muon::new(&params(&named), &config).unwrap().state();
    let matrices = state.tensors.iter().filter(|t| t.slot == "momentum_buffer").map(|t| &t.param[..]);
    assert_eq!(matrices.collect::<Vec<_>>(), ["fc1.weight", "conv.weight", "headroom.weight"]);
}

/// Matrices in parts, some of them empty or on two ranks, move as on one rank.
#[test]
fn muon_steps_parts_like_wholes() {
    let tensor = |shape: &[i64], phase: f64| {
        let count: i64 = shape.iter().product();
        (Tensor::arange(count, (Kind::Double, tch::Device::Cpu)) * 1.3 + phase).sin().view(shape)
    };
    let config = MuonConfig::default();
    let names = ["rows.weight", "columns.weight", "boxes.weight", "all.weight", "rows.bias"];
    let shapes: [&[i64]; 5] = [&[5, 4], &[3, 6], &[4, 2, 3], &[3, 3], &[5]];
    let run = |made: &Parameters, cut: &dyn Fn(usize, Tensor) -> Tensor| {
        let mut muon = OptimizerKind::from(config.clone()).build(made).unwrap();
        for step in 0..3 {
            for (index, param) in made.iter().enumerate() {
                let grad = tensor(shapes[index], f64::from(step) + index as f64 * 0.1);
                set_grad(&param.tensor, &cut(index, grad));
            }
            muon.step(0.05).unwrap();
        }
    };
    let wholes: Vec<Tensor> = shapes.iter().map(|shape| tensor(shape, 0.7).set_requires_grad(true)).collect();
    let named: Vec<(&str, &Tensor)> = names.into_iter().zip(&wholes).collect();
    run(&params(&named), &|_, grad| grad);
    let expected: Vec<Vec<f64>> = wholes.iter().map(values).collect();
    isobar_collectives::threads::run(3, std::time::Duration::from_secs(60), |group| {
        let rank = group.rank();
        let own = |index: usize, whole: Tensor| match index {
            0 | 4 => whole.narrow(0, [0, 3, 3][rank], [3, 0, 2][rank]),
            1 => whole.narrow(1, [0, 1, 3][rank], [1, 2, 3][rank]),
            // Two ranks have the same part.
            2 => whole.narrow(1, (rank / 2) as i64, 1),
            _ => whole,
        };
        let entries = names.iter().enumerate().map(|(index, name)| {
            let part = own(index, tensor(shapes[index], 0.7)).copy().set_requires_grad(true);
            match index {
                0 | 4 => Parameter::sharded(*name, &part, 0, vec![3, 0, 2]),
                1 => Parameter::sharded(*name, &part, 1, vec![1, 2, 3]),
                2 => Parameter::part(*name, &part, (shapes[2].to_vec(), vec![0, (rank / 2) as i64, 0]), 2),
                _ => Parameter::replicated(*name, &part),
            }
        });
        let made = Parameters::over(entries.collect(), &group).unwrap();
        run(&made, &own);
        for (index, param) in made.iter().enumerate() {
            let whole = Tensor::from_slice(&expected[index]).view(shapes[index]);
            close(&values(&param.tensor), &values(&own(index, whole)), 1e-12);
        }
    });
}

#[rstest]
// torch.optim.SGD's rule by hand: g = 1 throughout, p from 1, lr 0.1.
#[case::plain(SgdConfig { momentum: 0.0, ..Default::default() }, [0.9, 0.8, 0.7])]
#[case::momentum(SgdConfig { momentum: 0.5, ..Default::default() }, [0.9, 0.75, 0.575])]
#[case::nesterov(SgdConfig { momentum: 0.5, nesterov: true, ..Default::default() }, [0.85, 0.675, 0.4875])]
fn sgd_follows_its_definition(#[case] config: SgdConfig, #[case] expected: [f64; 3]) {
    let x = leaf(&[1.0], &[1, 1]);
    let mut sgd = Sgd::new(&params(&[("x", &x)]), &config).unwrap();
    for want in expected {
        set_grad(&x, &Tensor::from_slice(&[1.0]).view([1, 1]));
        sgd.step(0.1).unwrap();
        close(&values(&x), &[want], 1e-15);
    }
}

/// The momentum begins with the next gradient, as PyTorch's.
#[test]
fn sgd_with_momentum_continues_a_run_without() {
    let [x, fresh] = [leaf(&[1.0, -2.0], &[2]), leaf(&[1.0, -2.0], &[2])];
    let of = |x: &Tensor, momentum: f64| {
        Sgd::new(&params(&[("x", x)]), &SgdConfig { momentum, ..Default::default() }).unwrap()
    };
    let mut sgd = of(&x, 0.9);
    set_grad(&x, &Tensor::from_slice(&[5.0, 7.0]));
    sgd.step(0.0).unwrap();
    sgd.load_state(&of(&x, 0.0).state()).unwrap();
    let mut other = of(&fresh, 0.9);
    for (x, sgd) in [(&x, &mut sgd), (&fresh, &mut other)] {
        for gradient in [[0.5, 1.0], [-1.0, 2.0]] {
            set_grad(x, &Tensor::from_slice(&gradient));
            sgd.step(0.1).unwrap();
        }
    }
    assert_eq!(values(&x), values(&fresh));
    // One that is missing for a single parameter is an error.
    let y = leaf(&[0.0], &[1]);
    let mut both = Sgd::new(&params(&[("x", &x), ("y", &y)]), &SgdConfig::default()).unwrap();
    let mut state = both.state();
    state.tensors.pop();
    let error = both.load_state(&state).unwrap_err().to_string();
    assert!(error.contains("momentum_buffer of parameter \"y\" is missing"), "{error}");
}

#[test]
fn a_parameter_without_a_gradient_stays() {
    let (used, unused) = (leaf(&[1.0], &[1, 1]), leaf(&[1.0], &[1, 1]));
    let mut adamw =
        AdamW::new(&params(&[("used", &used), ("unused", &unused)]), &AdamWConfig::default()).unwrap();
    set_grad(&used, &Tensor::from_slice(&[1.0]).view([1, 1]));
    adamw.step(0.1).unwrap();
    assert_eq!(values(&unused), [1.0]);
    assert_eq!(adamw.state().steps["unused"], 0);
    assert_eq!(adamw.state().steps["used"], 1);
}

#[rstest]
#[case::adamw(OptimizerKind::from(AdamWConfig::default()))]
#[case::adam(OptimizerKind::from(AdamConfig { weight_decay: 0.1, ..Default::default() }))]
#[case::lion(OptimizerKind::from(LionConfig::default()))]
#[case::sgd(OptimizerKind::from(SgdConfig::default()))]
fn state_puts_back_bitwise(#[case] kind: OptimizerKind) {
    let run = |from: i64, to: i64, x: &Tensor, optimizer: &mut dyn Optimizer| {
        for step in from..to {
            set_grad(x, &Tensor::from_slice(&[(step as f64).cos(), 0.3]).view([1, 2]));
            optimizer.step(0.1).unwrap();
        }
    };
    let whole = leaf(&[1.0, 2.0], &[1, 2]);
    run(0, 6, &whole, &mut *kind.build(&params(&[("x", &whole)])).unwrap());

    let first = leaf(&[1.0, 2.0], &[1, 2]);
    let mut before = kind.build(&params(&[("x", &first)])).unwrap();
    run(0, 3, &first, &mut *before);
    let second = first.detach().copy().set_requires_grad(true);
    let mut after = kind.build(&params(&[("x", &second)])).unwrap();
    after.load_state(&before.state()).unwrap();
    run(3, 6, &second, &mut *after);
    assert_eq!(values(&second), values(&whole));
}

#[test]
fn foreign_state_is_refused() {
    let x = leaf(&[1.0], &[1, 1]);
    let mut adamw = AdamW::new(&params(&[("x", &x)]), &AdamWConfig::default()).unwrap();
    let sgd = Sgd::new(&params(&[("x", &x)]), &SgdConfig::default()).unwrap();
    let error = adamw.load_state(&sgd.state()).unwrap_err().to_string();
    insta::assert_snapshot!(error, @r#"optimizer state is refused: it was written by "sgd", this run uses "adamw"; --set optimizer.type=sgd"#);
    let other = leaf(&[1.0, 2.0], &[1, 2]);
    let state = AdamW::new(&params(&[("x", &other)]), &AdamWConfig::default()).unwrap().state();
    let error = adamw.load_state(&state).unwrap_err().to_string();
    insta::assert_snapshot!(error, @r#"optimizer state is refused: exp_avg of parameter "x" is Double [1, 2], expected Double [1, 1]"#);
}

#[rstest]
#[case("blocks.0.fc1.weight", &[2, 2], true)]
#[case("blocks.0.fc1.bias", &[2], false)]
#[case("blocks.0.norm1.weight", &[2], false)]
#[case("blocks.0.filter.b1", &[2, 4, 8], false)]
#[case("blocks.0.filter.w1", &[2, 4, 8], true)]
fn biases_and_norms_do_not_decay(#[case] name: &str, #[case] shape: &[i64], #[case] expected: bool) {
    let tensor = Tensor::zeros(shape, (Kind::Float, tch::Device::Cpu));
    assert_eq!(decays(&Parameter::replicated(name, &tensor), &default_no_decay()), expected);
}

#[test]
fn settings_out_of_range_are_refused() {
    let config = AdamWConfig { beta2: 1.0, ..Default::default() };
    let error = AdamW::new(&params(&[]), &config).unwrap_err().to_string();
    insta::assert_snapshot!(error, @"optimizer.beta2 is 1, expected a number in [0, 1); --set optimizer.beta2=0.999");
    let config = SgdConfig { nesterov: true, momentum: 0.0, ..Default::default() };
    let error = Sgd::new(&params(&[]), &config).unwrap_err().to_string();
    insta::assert_snapshot!(error, @"optimizer.nesterov is true, expected false if optimizer.momentum is 0; --set optimizer.nesterov=false");
}
