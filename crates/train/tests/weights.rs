//! Weights and masks of losses, and metrics: values computed by hand, and the same on shards as on full fields.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_collectives::{Group, threads};
use isobar_manager::DeviceMesh;
use isobar_shard::{Placement, ShardTensor, forbid_hidden_communication};
use isobar_train::loss::{Crps, LossKind, Mae, Mse, RelativeL2, Weighting, registered};
use isobar_train::metric::{self, Forecast, MetricKind, SpreadSkill, scores_of};
use isobar_train::{FieldLayout, Latitudes, Lead, ShardedFields, Variable, Weights, WeightsConfig};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

const ROWS: i64 = 5;
const COLUMNS: i64 = 6;

/// `[sample, channel, row, column]`.
fn fields() -> [Tensor; 2] {
    let at = Tensor::arange(4 * 2 * ROWS * COLUMNS, (Kind::Double, Device::Cpu)).view([4, 2, ROWS, COLUMNS]);
    [1.3, 2.1].map(|rate| (&at * rate).sin() * rate + 0.2)
}

/// An ensemble of three members around predictions, `[sample, member, channel, row, column]`.
fn ensemble(prediction: &Tensor) -> Tensor {
    let members: Vec<Tensor> = [0.0, 0.7, -0.4].map(|shift| prediction * (1.0 + 0.3 * shift) + shift).into();
    Tensor::stack(&members, 1)
}

/// Points of the left edge of odd rows do not count.
fn mask() -> Tensor {
    let mask = Tensor::ones([1, ROWS, COLUMNS], (Kind::Bool, Device::Cpu));
    let _ = mask.slice(1, 1, None, 2).narrow(2, 0, 2).fill_(0);
    mask
}

fn variables() -> Vec<Variable> {
    let level = Variable { part_of: Some("z".into()), ..Variable::new("z_500") };
    vec![Variable::new("u"), level]
}

fn latitudes() -> Latitudes {
    Latitudes { dim: 0, degrees: vec![72.0, 36.0, 0.0, -36.0, -72.0] }
}

fn config(latitude: bool) -> WeightsConfig {
    WeightsConfig {
        variables: [("z".to_owned(), 2.0)].into(),
        levels: [("500".to_owned(), 1.5)].into(),
        latitude,
        ..WeightsConfig::default()
    }
}

/// Weights of a window of the fields, and of its points if asked for.
fn weights(window: &[std::ops::Range<usize>], latitude: bool, masked: bool) -> Weights {
    let weights = Weights::new(&config(latitude), &variables(), Some(&latitudes()), window).unwrap();
    let part = window.iter().enumerate().fold(mask(), |part, (dim, range)| {
        part.narrow(dim as i64 + 1, range.start as i64, range.len() as i64)
    });
    if masked { weights.with_mask(part) } else { weights }
}

fn dense_weights(target: &Tensor, latitude: bool, masked: bool) -> Weighting<Tensor> {
    let window = [0..ROWS as usize, 0..COLUMNS as usize];
    let weights = weights(&window, latitude, masked);
    weights.of_fields(target, target, None, |all| Ok::<_, isobar_train::Error>(all.shallow_clone())).unwrap()
}

/// The weights as numbers that broadcast to fields: u counts 1/2, z_500 3/2; rows by the cosine of their latitude.
fn by_hand(latitude: bool, masked: bool) -> Tensor {
    let channels = Tensor::from_slice(&[0.5, 1.5]).view([1, 2, 1, 1]);
    let cosines: Vec<f64> = latitudes().degrees.iter().map(|degrees| degrees.to_radians().cos()).collect();
    let rows = Tensor::from_slice(&cosines);
    let rows = &rows / rows.mean(None);
    let all = channels.expand([4, 2, ROWS, COLUMNS], false);
    let all = if latitude { all * rows.view([1, 1, ROWS, 1]) } else { all };
    if masked { all * mask().to_kind(Kind::Double).unsqueeze(0) } else { all }
}

#[rstest]
fn weighted_losses_are_weighted_means(
    #[values(false, true)] latitude: bool,
    #[values(false, true)] masked: bool,
) {
    let [prediction, target] = fields();
    let weighting = dense_weights(&target, latitude, masked);
    let by_hand = by_hand(latitude, masked);
    let sums = |errors: Tensor| (errors * &by_hand).sum_dim_intlist([1, 2, 3].as_slice(), false, None);
    let loss = |kind: LossKind| kind.weighted(&prediction, &target, &weighting).unwrap().double_value(&[]);
    let ones = sums(target.ones_like());
    let mse = (sums((&prediction - &target).square()) / &ones).mean(None).double_value(&[]);
    let mae = (sums((&prediction - &target).abs()) / &ones).mean(None).double_value(&[]);
    let relative = (sums((&prediction - &target).square()).sqrt() / sums(target.square()).sqrt()).mean(None);
    for (kind, want) in
        [(Mse {}.into(), mse), (Mae {}.into(), mae), (RelativeL2 {}.into(), relative.double_value(&[]))]
    {
        let kind: LossKind = kind;
        let name = kind.name();
        let got = loss(kind);
        assert!((got - want).abs() < 1e-13, "{name}: {got} {want}");
    }
}

/// Missing values, NaN, have no part in the loss nor in its gradient; a sample without any point adds nothing.
#[test]
fn masked_values_do_not_count() {
    let [prediction, target] = fields();
    let present = Tensor::ones([4, 2, ROWS, COLUMNS], (Kind::Bool, Device::Cpu));
    let _ = present.select(0, 3).fill_(0);
    let _ = present.select(0, 1).narrow(1, 2, 2).fill_(0);
    let missing = target.masked_fill(&present.logical_not(), f64::NAN);
    let lay_out = |all: &Tensor| Ok::<_, isobar_train::Error>(all.shallow_clone());
    let weights = Weights::default().of_fields(&missing, &missing, Some(&present), lay_out).unwrap();
    for name in registered() {
        let kind: LossKind = serde_json::from_value(name.into()).unwrap();
        let prediction = prediction.copy().set_requires_grad(true);
        let loss = kind.weighted(&prediction, &missing, &weights).unwrap();
        assert!(loss.double_value(&[]).is_finite(), "{name}: {loss}");
        if name == "mse" {
            let error = (&prediction - &target).square().to_kind(Kind::Double);
            let of = |at: i64| error.select(0, at).masked_select(&present.select(0, at)).mean(None);
            let want = (of(0) + of(1) + of(2)) / 4.0;
            assert!((want - &loss).abs().double_value(&[]) < 1e-14);
            loss.backward();
            let gradient = prediction.grad();
            let outside = gradient.masked_select(&present.logical_not()).abs().max().double_value(&[]);
            assert!(outside == 0.0 && bool::try_from(gradient.isfinite().all()).unwrap());
        }
    }
}

fn on_mesh(shape: &[i64], body: impl Fn(&Group, &DeviceMesh, &ShardedFields) + Sync) {
    let names = ["domain", "domain_y"];
    let ranks = shape.iter().product::<i64>() as usize;
    let checked = threads::run(ranks, Duration::from_secs(240), |world| {
        let mesh = DeviceMesh::new(&world, shape, &names[..shape.len()]).unwrap();
        let layout = ShardedFields::new(&mesh, &[ROWS as usize, COLUMNS as usize]).unwrap();
        let _guard = forbid_hidden_communication();
        body(&world, &mesh, &layout);
    });
    assert_eq!(checked.len(), ranks);
}

fn window_of(full: &Tensor, window: &[std::ops::Range<usize>], first: i64) -> Tensor {
    window.iter().enumerate().fold(full.shallow_clone(), |part, (dim, range)| {
        part.narrow(dim as i64 + first, range.start as i64, range.len() as i64)
    })
}

/// An ensemble over the mesh of fields.
fn members_on(mesh: &DeviceMesh, full: &Tensor) -> ShardTensor {
    let places: Vec<Placement> = (0..mesh.ndim()).map(|axis| Placement::Shard(axis + 3)).collect();
    ShardTensor::distribute(full, mesh, &places).unwrap()
}

#[rstest]
#[case::two(&[2])]
#[case::three(&[3])]
#[case::four(&[4])]
#[case::square(&[2, 2])]
#[case::an_empty_shard(&[7])]
fn weighted_losses_are_the_same_on_shards(#[case] shape: &[i64]) {
    for (latitude, masked) in [(true, false), (true, true), (false, true)] {
        on_mesh(shape, |_, mesh, layout| {
            let window = layout.window(&[ROWS as usize, COLUMNS as usize]).unwrap();
            let [prediction, target] = fields();
            let dense = dense_weights(&target, latitude, masked);
            for name in registered() {
                let loss: LossKind = serde_json::from_value(name.into()).unwrap();
                let support = loss.support();
                let dense = if support.points { dense.without_channels() } else { dense.without_area() };
                let leaf = prediction.copy().set_requires_grad(true);
                let want = loss.weighted(&leaf, &target, &dense).unwrap();
                want.backward();

                let local = window_of(&target, &window, 2);
                let targets = layout.array(&local, 4).unwrap();
                let weights = weights(&window, latitude, masked);
                let weights =
                    weights.of_fields(&targets, &local, None, |part| layout.array(part, 4)).unwrap();
                let weights =
                    if support.points { weights.without_channels() } else { weights.without_area() };
                let part = window_of(&prediction, &window, 2).copy().set_requires_grad(true);
                let predictions = layout.array(&part, 4).unwrap();
                let got = loss.weighted(&predictions, &targets, &weights).unwrap().full_tensor(None).unwrap();
                let apart = (&got - &want).abs().double_value(&[]);
                assert!(apart < 1e-10, "{name}: {got} {want}");
                got.backward();
                let apart = (part.grad() - window_of(&leaf.grad(), &window, 2)).abs().sum(None);
                assert!(apart.double_value(&[]) < 1e-10, "{name}: {apart}");
            }
            // An ensemble, with all weights.
            let dense = dense_weights(&target, latitude, masked);
            let members = ensemble(&prediction);
            for fair in [true, false] {
                let loss = LossKind::from(Crps { fair });
                let leaf = members.copy().set_requires_grad(true);
                let want = loss.weighted(&leaf, &target, &dense).unwrap();
                want.backward();
                let local = window_of(&target, &window, 2);
                let targets = layout.array(&local, 4).unwrap();
                let weights = weights(&window, latitude, masked);
                let weights =
                    weights.of_fields(&targets, &local, None, |part| layout.array(part, 4)).unwrap();
                let sharded = members_on(mesh, &members);
                let part = sharded.local().detach().set_requires_grad(true);
                let sharded = ShardTensor::from_parts(&part, sharded.layout()).unwrap();
                let got = loss.weighted(&sharded, &targets, &weights).unwrap().full_tensor(None).unwrap();
                assert!((&got - &want).abs().double_value(&[]) < 1e-10, "{got} {want}");
                got.backward();
                let gradient = members_on(mesh, &leaf.grad());
                assert!((part.grad() - gradient.local()).abs().sum(None).double_value(&[]) < 1e-10);
            }
        });
    }
}

fn all_metrics() -> Vec<MetricKind> {
    metric::registered().into_iter().map(|name| serde_json::from_value(name.into()).unwrap()).collect()
}

#[rstest]
#[case::two(&[2])]
#[case::three(&[3])]
#[case::four(&[4])]
#[case::square(&[2, 2])]
#[case::an_empty_shard(&[7])]
fn metrics_are_the_same_on_shards(#[case] shape: &[i64]) {
    let metrics = all_metrics();
    assert!(metrics.len() >= 10);
    for (latitude, masked, members) in [(true, false, false), (true, true, true), (false, true, false)] {
        on_mesh(shape, |_, mesh, layout| {
            let window = layout.window(&[ROWS as usize, COLUMNS as usize]).unwrap();
            let [prediction, target] = fields();
            let climate = target.mean_dim(0, true, None).expand_as(&target) * 0.5;
            let forecast = match members {
                true => Forecast::new(&ensemble(&prediction), &target),
                false => Forecast::new(&prediction, &target),
            };
            let forecast = forecast.unwrap().with_climatology(&climate).unwrap();
            let want =
                scores_of(&metrics, &forecast.weighted(dense_weights(&target, latitude, masked)).unwrap());

            let local = window_of(&target, &window, 2);
            let array = |full: &Tensor| layout.array(&window_of(full, &window, 2), 4).unwrap();
            let targets = array(&target);
            let weights = weights(&window, latitude, masked);
            let weights = weights.of_fields(&targets, &local, None, |part| layout.array(part, 4)).unwrap();
            let forecast = match members {
                true => Forecast::new(&members_on(mesh, &ensemble(&prediction)), &targets),
                false => Forecast::new(&array(&prediction), &targets),
            };
            let forecast =
                forecast.unwrap().weighted(weights).unwrap().with_climatology(&array(&climate)).unwrap();
            let got = scores_of(&metrics, &forecast).unwrap();
            for ((metric, got), want) in metrics.iter().zip(&got).zip(&want.unwrap()) {
                for (got, want) in got.iter().zip(want) {
                    assert!((got - want).abs() < 1e-10, "{}: {got} {want}", metric.name());
                }
            }
        });
    }
}

/// Two samples of one variable on two points, from 60° and 0° of latitude: weights 2/3 and 4/3.
#[test]
fn metrics_follow_their_definitions() {
    let field = |values: [f64; 4]| Tensor::from_slice(&values).view([2, 1, 2, 1]);
    let target = field([1.0, 3.0, 2.0, -2.0]);
    let prediction = field([2.0, 3.0, 1.0, 0.0]);
    let climate = field([1.5, 1.0, 1.5, 1.0]);
    let score = |metrics: &[&str], weights: Weighting<Tensor>| {
        let metrics: Vec<MetricKind> =
            metrics.iter().map(|name| serde_json::from_value((*name).into()).unwrap()).collect();
        let forecast = Forecast::new(&prediction, &target).unwrap().weighted(weights).unwrap();
        let forecast = forecast.with_climatology(&climate).unwrap();
        scores_of(&metrics, &forecast).unwrap().into_iter().map(|values| values[0]).collect::<Vec<f64>>()
    };
    let near = |got: Vec<f64>, want: &[f64]| {
        assert_eq!(got.len(), want.len());
        got.iter().zip(want).for_each(|(got, want)| assert!((got - want).abs() < 1e-6, "{got} {want}"));
    };
    let names = ["rmse", "mae", "bias", "nrmse", "vrmse", "acc", "crps", "spread"];
    // Mean squares of errors 1/2 and 5/2; of truths 5 and 4; variances 2 and 8.
    let acc = [
        (0.5 * -0.5 + 2.0 * 2.0) / ((0.25_f64 + 4.0) * (0.25 + 4.0)).sqrt(),
        (-0.5 * 0.5 + 1.0 * 3.0) / ((0.25_f64 + 1.0) * (0.25 + 9.0)).sqrt(),
    ];
    let nrmse = ((0.5_f64 / 5.0).sqrt() + (2.5_f64 / 4.0).sqrt()) / 2.0;
    let vrmse = ((0.5_f64 / 2.0).sqrt() + (2.5_f64 / 8.0).sqrt()) / 2.0;
    let want = [1.5_f64.sqrt(), 1.0, 0.5, nrmse, vrmse, (acc[0] + acc[1]) / 2.0, 1.0, 0.0];
    near(score(&names, Weighting::default()), &want);

    let latitudes = Latitudes { dim: 0, degrees: vec![60.0, 0.0] };
    let config = WeightsConfig { latitude: true, ..WeightsConfig::default() };
    let weights = Weights::new(&config, &[Variable::new("u")], Some(&latitudes), &[0..2, 0..1]).unwrap();
    let lay_out = |all: &Tensor| Ok::<_, isobar_train::Error>(all.shallow_clone());
    let weights = weights.of_fields(&target, &target, None, lay_out).unwrap();
    // (2 · 1 + 4 · 0) / 6 and (2 · 1 + 4 · 4) / 6.
    let want =
        [((1.0_f64 / 3.0 + 3.0) / 2.0).sqrt(), (1.0 / 3.0 + 10.0 / 6.0) / 2.0, (1.0 / 3.0 + 1.0) / 2.0];
    near(score(&names[..3], weights), &want);
}

/// Members 1, 2 and 6 against 4: mean distance 7/3, mean distance of pairs 10/3 (20/9 with each member paired with itself).
#[test]
fn scores_of_ensembles_follow_their_definitions() {
    let members = Tensor::from_slice(&[1.0, 2.0, 6.0]).view([1, 3, 1, 1]);
    let target = Tensor::from_slice(&[4.0]).view([1, 1, 1]);
    let crps = |fair| isobar_train::loss::crps(&members, &target, fair).unwrap().double_value(&[0, 0, 0]);
    assert!((crps(true) - (7.0 / 3.0 - 10.0 / 6.0)).abs() < 1e-14);
    assert!((crps(false) - (7.0 / 3.0 - 10.0 / 9.0)).abs() < 1e-14);
    let forecast = Forecast::new(&members, &target).unwrap();
    let metrics = ["rmse", "spread", "spread_skill", "crps"];
    let kinds = metrics.map(|name| serde_json::from_value::<MetricKind>(name.into()).unwrap());
    let got: Vec<f64> = scores_of(&kinds, &forecast).unwrap().into_iter().flatten().collect();
    // The mean is 3, the variance (4 + 1 + 9) / 2.
    let want = [1.0, 7.0_f64.sqrt(), (4.0_f64 / 3.0 * 7.0).sqrt(), 7.0 / 3.0 - 10.0 / 6.0];
    got.iter().zip(want).for_each(|(got, want)| assert!((got - want).abs() < 1e-14, "{got} {want}"));
    assert_eq!(MetricKind::from(SpreadSkill {}).cost(0.75), 0.25);
    // Four members: pairs across the ensemble count once.
    let members = Tensor::from_slice(&[1.0, 2.0, 6.0, 3.0]).view([1, 4, 1, 1]);
    let crps = isobar_train::loss::crps(&members, &target, true).unwrap().double_value(&[0, 0, 0]);
    assert!((crps - (8.0 / 4.0 - (1.0 + 5.0 + 2.0 + 4.0 + 1.0 + 3.0) / 12.0)).abs() < 1e-14);
}

/// A wave of one period of amplitude a has the energy a²/4 in the shell 1, one of three periods in the shell 3.
#[test]
fn the_spectral_loss_compares_energies() {
    let x = Tensor::arange(16, (Kind::Double, Device::Cpu)) * (std::f64::consts::TAU / 16.0);
    let waves = |slow: f64, fast: f64| (x.sin() * slow + (&x * 3.0).cos() * fast).view([1, 1, 16]);
    let loss = |exponent: f64| {
        let table = serde_json::json!({ "type": "spectral", "exponent": exponent, "epsilon": 1e-3 });
        let loss: LossKind = serde_json::from_value(table).unwrap();
        loss.of(&waves(2.0, 1.0).roll([5], [2]), &waves(2.0, 0.5)).unwrap().double_value(&[])
    };
    let excess = ((0.25 + 1e-3) / (0.0625 + 1e-3_f64)).ln().powi(2);
    assert!((loss(0.0) - excess / 8.0).abs() < 1e-10);
    assert!((loss(1.0) - excess / 8.0 * 3.0 / 4.5).abs() < 1e-10);
}

#[test]
fn a_list_is_a_weighted_sum() {
    let loss: LossKind = serde_json::from_str(
        r#"["mse", { "type": "huber", "delta": 2.0, "weight": 0.5 }, { "type": "spectral" }]"#,
    )
    .unwrap();
    loss.check().unwrap();
    let [prediction, target] = fields();
    let of = |loss: &str| {
        let loss: LossKind = serde_json::from_str(loss).unwrap();
        loss.of(&prediction, &target).unwrap().double_value(&[])
    };
    let want = of(r#""mse""#) + 0.5 * of(r#"{ "type": "huber", "delta": 2.0 }"#) + of(r#""spectral""#);
    assert!((loss.of(&prediction, &target).unwrap().double_value(&[]) - want).abs() < 1e-12);
    let again: LossKind = serde_json::from_value(serde_json::to_value(&loss).unwrap()).unwrap();
    assert_eq!(again, loss);
    for (wrong, words) in [
        (r#"[{ "type": "mse", "weight": -1.0 }]"#, "the weight of train.loss[0] is -1"),
        ("[]", "a sum of 0 losses"),
        (r#"["mse", { "type": "huber", "delta": 0.0 }]"#, "train.loss.delta is 0"),
    ] {
        let error = serde_json::from_str::<LossKind>(wrong).unwrap().check().unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let error = serde_json::from_str::<LossKind>(r#"["mse2"]"#).unwrap_err().to_string();
    assert!(error.contains("did you mean \"mse\""), "{error}");
}

#[test]
fn lead_times_are_weighted() {
    let losses = [1.0, 2.0, 6.0].map(Tensor::from);
    let mean = |lead: Option<Lead>| {
        let config = WeightsConfig { lead, ..WeightsConfig::default() };
        let weights = Weights::new(&config, &[], None, &[]).unwrap();
        weights.over_steps(&losses).map(|loss| loss.double_value(&[]))
    };
    assert_eq!(mean(None).unwrap(), 3.0);
    assert_eq!(mean(Some(Lead::Decay(0.5))).unwrap(), (1.0 + 1.0 + 1.5) / 1.75);
    assert_eq!(mean(Some(Lead::Steps(vec![1.0, 0.0, 1.0, 9.0]))).unwrap(), 3.5);
    assert!(
        mean(Some(Lead::Steps(vec![1.0]))).unwrap_err().to_string().contains("a weight for each of 3 steps")
    );
    let lead: Lead = serde_json::from_str("[1, 0.5]").unwrap();
    assert_eq!(lead, Lead::Steps(vec![1.0, 0.5]));
}

#[rstest]
#[case(
    r#"{ "variables": { "w": 2.0 } }"#,
    "train.weights.variables is a weight of \"w\", expected weights of these channels"
)]
#[case(r#"{ "levels": { "850": 2.0 } }"#, "train.weights.levels is a weight of \"850\"")]
#[case(r#"{ "variables": { "u": 0.0, "z": 0.0 } }"#, "expected one above 0")]
#[case(r#"{ "latitude": true }"#, "--set train.weights.latitude=false")]
fn weights_without_their_variables_are_refused(#[case] config: &str, #[case] words: &str) {
    let config: WeightsConfig = serde_json::from_str(config).unwrap();
    let error = Weights::new(&config, &variables(), None, &[0..5, 0..6]).unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
}

#[rstest]
#[case(r#"{ "variables": { "u": -1.0 } }"#, "mse", "train.weights.variables.u is -1")]
#[case(r#"{ "lead": [0.0] }"#, "mse", "--set train.weights.lead=[1.0]")]
#[case(r#"{ "lead": -0.5 }"#, "mse", "--set train.weights.lead=0.9")]
#[case(r#"{ "regularization": -0.5 }"#, "mse", "--set train.weights.regularization=0.001")]
#[case(r#"{ "latitude": true }"#, "spectral", "takes no weights of latitude")]
fn weights_are_checked_before_a_run(#[case] config: &str, #[case] loss: &str, #[case] words: &str) {
    let config: WeightsConfig = serde_json::from_str(config).unwrap();
    let loss: LossKind = serde_json::from_value(loss.into()).unwrap();
    let error = config.check(&loss).unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
}
