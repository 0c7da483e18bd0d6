//! The spectral solver, against exact solutions and its own orders of convergence.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

use std::f64::consts::TAU;

use isobar_data::generate::etdrk::{
    Advection, AdvectionDiffusion, Burgers, Diffusion, Dispersion, Domain, FisherKpp, GrayScott,
    HyperDiffusion, Initial, InitialConfig, KortewegDeVries, KuramotoSivashinsky, MakeConfig, NavierStokes,
    Solver, SwiftHohenberg, SystemKind, make,
};
use isobar_data::{WellFile, generate::etdrk};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

fn line(domain: &Domain) -> Tensor {
    Tensor::from_slice(&domain.coordinates())
}

fn error(one: &Tensor, other: &Tensor) -> f64 {
    ((one - other).square().mean(Kind::Double) / other.square().mean(Kind::Double)).sqrt().double_value(&[])
}

/// exp(i k · x) travels and decays alone: u(x, t) = e^(−rate t) sin(k · x − speed t + phase), for two waves.
#[rstest]
fn linear_systems_are_exact(#[values(1, 2, 3)] dims: usize) {
    let domain = Domain { dims, points: 10, length: 2.5 };
    let (time, steps) = (0.7, 3);
    let k = |m: f64| TAU * m / domain.length;
    // Waves with these numbers along each dim.
    let waves = [[1.0, 2.0, -1.0], [3.0, -1.0, 2.0]];
    let field = |law: &dyn Fn([f64; 3]) -> (f64, f64)| {
        let mut sum = Tensor::from(0.0);
        for wave in waves {
            let mut k = wave.map(k);
            k[dims..].fill(0.0);
            let (rate, shift) = law(k);
            let mut phase = Tensor::from(0.4 - shift);
            for dim in 0..dims {
                let mut view = vec![1; dims];
                view[dim] = 10;
                phase = &phase + line(&domain).view(&view[..]) * k[dim];
            }
            sum = &sum + phase.sin() * (-rate).exp();
        }
        let mut shape = vec![1, 1];
        shape.extend(vec![10; dims]);
        sum.view(&shape[..])
    };
    let start = field(&|_| (0.0, 0.0));
    let square = |k: [f64; 3]| k.iter().map(|k| k * k).sum::<f64>();
    let velocity = [0.9, -0.4, 0.3];
    let dot = |k: [f64; 3]| k.iter().zip(velocity).map(|(k, c)| k * c).sum::<f64>();
    let cubes = |k: [f64; 3]| k.iter().map(|k| k * k * k).sum::<f64>();
    let check = |system: SystemKind, law: &dyn Fn([f64; 3]) -> (f64, f64)| {
        let solver = Solver::new(&system, domain, time / f64::from(steps), 4).unwrap();
        let found = solver.solve(&start, steps as usize).unwrap();
        let error = error(&found, &field(law));
        assert!(error < 1e-13, "{} in {dims} dims: {error:e}", system.name());
    };
    let velocity = velocity[..dims].to_vec();
    check(Advection { velocity: velocity.clone() }.into(), &|k| (0.0, dot(k) * time));
    check(Diffusion { diffusivity: 0.1 }.into(), &|k| (0.1 * square(k) * time, 0.0));
    check(AdvectionDiffusion { velocity, diffusivity: 0.05 }.into(), &|k| {
        (0.05 * square(k) * time, dot(k) * time)
    });
    // ∂³ of e^(ikx) is −i k³.
    check(Dispersion { dispersivity: 0.01 }.into(), &|k| (0.0, 0.01 * cubes(k) * time));
    check(HyperDiffusion { hyper_diffusivity: 1e-3 }.into(), &|k| (1e-3 * square(k).powi(2) * time, 0.0));
}

/// Cole and Hopf: u = −2ν φ_x / φ for φ = b + a e^(−ν k² t) cos(k x), which solves the heat equation.
fn cole_hopf(domain: &Domain, viscosity: f64, time: f64) -> Tensor {
    let k = TAU / domain.length;
    let (x, decay) = (line(domain), 0.6 * (-viscosity * k * k * time).exp());
    let u = (&x * k).sin() * (2.0 * viscosity * k * decay) / ((&x * k).cos() * decay + 1.0);
    u.view([1, 1, domain.points as i64])
}

/// Errors against an exact or a very fine solution, at steps that halve: the ratio of the last two gives the order.
fn order(
    system: &SystemKind,
    domain: Domain,
    start: &Tensor,
    time: f64,
    order: usize,
    steps: [usize; 2],
    exact: &Tensor,
) -> (f64, f64) {
    let errors = steps.map(|steps| {
        let solver = Solver::new(system, domain, time / steps as f64, order).unwrap();
        error(&solver.solve(start, steps).unwrap(), exact)
    });
    ((errors[0] / errors[1]).log2() / (steps[1] as f64 / steps[0] as f64).log2(), errors[1])
}

#[test]
fn burgers_agrees_with_cole_and_hopf_at_each_order() {
    let domain = Domain { dims: 1, points: 96, length: TAU };
    let system = Burgers { viscosity: 0.5 }.into();
    let (start, exact) = (cole_hopf(&domain, 0.5, 0.0), cole_hopf(&domain, 0.5, 2.0));
    for (expected, steps) in [(1, [64, 128]), (2, [64, 128]), (3, [32, 64]), (4, [16, 32])] {
        let (found, error) = order(&system, domain, &start, 2.0, expected, steps, &exact);
        assert!((found - expected as f64).abs() < 0.25, "order {found} of {expected}, error {error:e}");
    }
    let solver = Solver::new(&system, domain, 2.0 / 1024.0, 4).unwrap();
    let error = error(&solver.solve(&start, 1024).unwrap(), &exact);
    assert!(error < 1e-11, "{error:e}");
}

/// A plane wave of Burgers' equation along a diagonal is the one-dimensional solution: u = (w, w) / 2 of the coordinate x + y.
#[test]
fn burgers_in_two_dims_has_the_plane_wave() {
    let domain = Domain { dims: 2, points: 48, length: TAU };
    // w_t + w w_s = 2ν w_ss for s = x + y and u = v = w / 2.
    let wave = |time: f64| {
        let s = line(&domain).unsqueeze(1) + line(&domain);
        let decay = 0.6 * (-0.5 * time).exp();
        let w = s.sin() * (2.0 * 0.5 * decay) / (s.cos() * decay + 1.0);
        (w * 0.5).expand([1, 2, 48, 48], false)
    };
    let solver = Solver::new(&Burgers { viscosity: 0.25 }.into(), domain, 1.0 / 64.0, 4).unwrap();
    let error = error(&solver.solve(&wave(0.0), 64).unwrap(), &wave(1.0));
    assert!(error < 1e-8, "{error:e}");
}

#[test]
fn a_soliton_of_korteweg_and_de_vries_keeps_its_shape() {
    let domain = Domain { dims: 1, points: 192, length: 40.0 };
    let speed = 1.5_f64;
    let soliton = |time: f64| {
        let away = line(&domain) - (20.0 + speed * time);
        let away = &away - (&away / 40.0).round() * 40.0;
        let cosh = (away * (speed.sqrt() / 2.0)).cosh();
        (cosh.square().reciprocal() * (speed / 2.0)).view([1, 1, 192])
    };
    let system = KortewegDeVries::default().into();
    let (found, error) = order(&system, domain, &soliton(0.0), 2.0, 4, [100, 200], &soliton(2.0));
    assert!((found - 4.0).abs() < 0.3 && error < 1e-6, "order {found}, error {error:e}");
}

/// Orders against a solution with many more steps.
#[rstest]
#[case(KuramotoSivashinsky { conservative: true }.into(), 1, 32, 22.0, 4.0, [80, 160])]
#[case(KuramotoSivashinsky { conservative: false }.into(), 2, 24, 16.0, 2.0, [40, 80])]
#[case(GrayScott::default().into(), 1, 64, 1.0, 40.0, [20, 40])]
#[case(GrayScott::default().into(), 2, 24, 1.0, 40.0, [20, 40])]
#[case(SwiftHohenberg::default().into(), 1, 48, 30.0, 2.0, [40, 80])]
#[case(KortewegDeVries { hyper_diffusivity: 1e-3, diffusivity: 1e-2, ..KortewegDeVries::default() }.into(), 2, 24, 20.0, 1.0, [50, 100])]
#[case(NavierStokes { viscosity: 1e-2, ..NavierStokes::default() }.into(), 2, 24, 1.0, 1.0, [10, 20])]
fn nonlinear_systems_converge_with_order_four(
    #[case] system: SystemKind,
    #[case] dims: usize,
    #[case] points: usize,
    #[case] length: f64,
    #[case] time: f64,
    #[case] steps: [usize; 2],
) {
    let domain = Domain { dims, points, length };
    let initial: Initial = InitialConfig { cutoff: Some(2), ..InitialConfig::default() }
        .over(system.initial(), &domain)
        .unwrap();
    let random = initial.draw(&domain, system.draws(dims), 3, 0).unwrap();
    let start = system.start(random).unwrap().unsqueeze(0);
    let many = steps[1] * 8;
    let exact = Solver::new(&system, domain, time / many as f64, 4).unwrap().solve(&start, many).unwrap();
    let (found, error) = order(&system, domain, &start, time, 4, steps, &exact);
    assert!(
        (found - 4.0).abs() < 0.4 && error < 1e-3,
        "{} in {dims} dims: order {found}, error {error:e}",
        system.name()
    );
}

/// ω = 2k cos(k x) cos(k y) does not carry itself: it only decays.
#[test]
fn vortices_of_taylor_and_green_decay() {
    let domain = Domain { dims: 2, points: 16, length: 1.0 };
    let line = line(&domain) * TAU;
    let vortices = (line.cos().unsqueeze(1) * line.cos() * 2.0 * TAU).view([1, 1, 16, 16]);
    let system = NavierStokes { viscosity: 0.01, drag: 0.2, force: 0.0, ..NavierStokes::default() };
    let found = Solver::new(&system.into(), domain, 0.1, 4).unwrap().solve(&vortices, 10).unwrap();
    let exact = vortices * (-(2.0 * 0.01 * TAU * TAU + 0.2)).exp();
    assert!(error(&found, &exact) < 1e-12);
}

/// Without diffusion or place, growth is logistic.
#[test]
fn fisher_grows_by_the_logistic_law() {
    let domain = Domain { dims: 3, points: 4, length: 1.0 };
    let start = Tensor::full([1, 1, 4, 4, 4], 0.1, (Kind::Double, Device::Cpu));
    let solver = Solver::new(&FisherKpp { diffusivity: 0.1, rate: 2.0 }.into(), domain, 0.01, 4).unwrap();
    let grown = 0.1 * 2.0_f64.exp();
    let exact = start.full_like(grown / (0.9 + grown));
    assert!(error(&solver.solve(&start, 100).unwrap(), &exact) < 1e-8);
}

fn small(system: SystemKind) -> MakeConfig {
    MakeConfig { system, samples: 3, frames: 4, points: Some(12), warm_up: Some(1), ..MakeConfig::default() }
}

fn read(file: &std::path::Path) -> Vec<f32> {
    let file = WellFile::open(file).unwrap();
    let names: Vec<&str> = file.fields().iter().map(|field| field.name()).collect();
    let points = vec![0..12; file.spatial_dims().len()];
    let all = (0..file.trajectories()).map(|at| file.read(&names, at, 0..file.frames(), &points).unwrap());
    Vec::try_from(Tensor::cat(&all.collect::<Vec<_>>(), 0).flatten(0, -1)).unwrap()
}

#[test]
fn every_registered_system_makes_files_of_the_well() {
    let folder = tempfile::tempdir().unwrap();
    for name in etdrk::registered() {
        let system: SystemKind = serde_json::from_value(serde_json::json!({ "type": name })).unwrap();
        for dims in system.dims() {
            let config = MakeConfig { dims: Some(dims), ..small(system.clone()) };
            let path = folder.path().join(format!("{name}_{dims}.h5"));
            let mut last = (0, 0);
            make(&config, &path, |done, of| last = (done, of)).unwrap();
            assert_eq!(last, (12, 12));
            let file = WellFile::open(&path).unwrap();
            assert_eq!((file.trajectories(), file.frames(), file.spatial_dims().len()), (3, 4, dims));
            assert!((0..dims).all(|dim| file.is_periodic(dim)));
        }
    }
}

#[test]
fn samples_depend_on_seed_and_number_only() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, config: &MakeConfig| make(config, folder.path().join(name), |_, _| {}).unwrap();
    let three = small(Burgers::default().into());
    let all = read(&file("three.h5", &MakeConfig { threads: 1, ..three.clone() })[0]);
    assert_eq!(all, read(&file("again.h5", &MakeConfig { threads: 3, ..three.clone() })[0]));
    let one = read(&file("one.h5", &MakeConfig { samples: 1, ..three.clone() })[0]);
    assert_eq!(all[..one.len()], one[..]);
    assert_ne!(all, read(&file("other.h5", &MakeConfig { seed: 1, ..three.clone() })[0]));

    // The same samples, in three files.
    let parts = MakeConfig { samples: 1, valid_samples: 1, test_samples: 1, ..three };
    let files = file("parts", &parts);
    let names = ["train/burgers.h5", "valid/burgers.h5", "test/burgers.h5"]
        .map(|name| folder.path().join("parts").join(name));
    assert_eq!(files, names);
    assert_eq!(all, files.iter().flat_map(|file| read(file)).collect::<Vec<f32>>());
}

#[test]
fn a_solution_that_is_not_finite_says_when_and_how_to_mend_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ks.h5");
    let config =
        MakeConfig { dt: Some(500.0), substeps: Some(2), ..small(KortewegDeVries::default().into()) };
    let error = make(&config, &path, |_, _| {}).unwrap_err().to_string();
    assert!(error.contains("is not finite at time") && error.contains("--set substeps=8"), "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn absurd_settings_are_errors_that_mend() {
    let folder = tempfile::tempdir().unwrap();
    let base = small(Burgers::default().into());
    let error =
        |config: MakeConfig| make(&config, folder.path().join("x.h5"), |_, _| {}).unwrap_err().to_string();
    for config in [
        MakeConfig { samples: 0, ..base.clone() },
        MakeConfig { points: Some(1 << 60), ..base.clone() },
        MakeConfig { points: Some(2), ..base.clone() },
        MakeConfig { dims: Some(7), ..base.clone() },
        MakeConfig { dt: Some(0.0), ..base.clone() },
        MakeConfig { dt: Some(f64::NAN), ..base.clone() },
        MakeConfig { length: Some(-1.0), ..base.clone() },
        MakeConfig { substeps: Some(0), ..base.clone() },
        MakeConfig { frames: usize::MAX, ..base.clone() },
        MakeConfig { order: 5, ..base.clone() },
        MakeConfig { system: Burgers { viscosity: f64::INFINITY }.into(), ..base.clone() },
        MakeConfig { system: Advection { velocity: vec![1.0; 5] }.into(), ..base.clone() },
        MakeConfig { system: NavierStokes::default().into(), dims: Some(1), ..base.clone() },
        MakeConfig {
            system: KuramotoSivashinsky { conservative: true }.into(),
            dims: Some(2),
            ..base.clone()
        },
    ] {
        let shown = format!("{config:?}");
        let error = error(config);
        assert!(error.contains("--set"), "{shown}: {error}");
    }
    let many = error(MakeConfig { samples: usize::MAX, ..base });
    assert!(many.contains("set fewer samples"), "{many}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
