//! The model against exact solutions.

use std::f64::consts::PI;

use tch::{Device, Kind, Tensor};

use super::jets::{Bump, MEAN_DEPTH, jet, start};
use super::legendre::gauss_legendre;
use super::model::{DEPTH, GRAVITY, Model, RADIUS, ROTATION, eigenvalue, inverse_laplacian, wind};
use super::transform::{GaussianGrid, Grid};

/// The largest magnitude.
fn largest(values: &Tensor) -> f64 {
    values.abs().max().double_value(&[])
}

fn advance(model: &Model, state: &Tensor, steps: usize) -> Tensor {
    (0..steps).fold(state.copy(), |state, _| model.step(&state).unwrap())
}

fn depth(model: &Model, state: &Tensor) -> Tensor {
    model.sphere().grid().fields(state).unwrap().get(DEPTH)
}

/// Sine of the latitude, `[latitude, 1]`, and longitude, `[longitude]`.
fn points(model: &Model) -> [Tensor; 2] {
    let longitudes = model.sphere().longitudes() as i64;
    let turns = Tensor::arange(longitudes, (Kind::Double, Device::Cpu)) / longitudes;
    [Tensor::from_slice(model.sphere().sines()).unsqueeze(1), turns * (2.0 * PI)]
}

#[test]
fn analysis_is_the_inverse_of_synthesis() {
    let sphere = GaussianGrid::new(42).unwrap();
    assert_eq!((sphere.sines().len(), sphere.longitudes()), (64, 128));
    tch::manual_seed(3);
    let part = || Tensor::randn([2, 43, 43], (Kind::Double, Device::Cpu)).triu(0);
    let imaginary = part();
    let _ = imaginary.narrow(1, 0, 1).fill_(0.0);
    let coefficients = Tensor::complex(&part(), &imaginary);
    let found = sphere.coefficients(&sphere.grid().fields(&coefficients).unwrap()).unwrap();
    assert!(largest(&(found - &coefficients)) < 1e-12);

    // k × ∇ψ + ∇χ has the curl Δψ and the divergence Δχ.
    let wind = sphere.grid().vector(&coefficients.get(0), &coefficients.get(1)).unwrap();
    let [divergence, curl] = sphere.divergence_and_curl(&wind.unsqueeze(0)).unwrap();
    let laplacian: Vec<f64> = (0..=42).map(|l| f64::from(-l * (l + 1))).collect();
    let exact = coefficients * Tensor::from_slice(&laplacian);
    let size = largest(&exact);
    assert!(largest(&(curl.get(0) - exact.get(0))) < 1e-13 * size);
    assert!(largest(&(divergence.get(0) - exact.get(1))) < 1e-13 * size);
}

#[test]
fn fields_are_sums_of_harmonics() {
    let latitude = 0.4_f64;
    let grid = Grid::new(2, &[latitude.sin()], 8).unwrap();
    let coefficients = Tensor::zeros([1, 3, 3], (Kind::ComplexDouble, Device::Cpu));
    let _ = coefficients.get(0).get(1).get(2).fill_(1.0);
    let field = grid.fields(&coefficients).unwrap();
    for at in 0..8 {
        let longitude = 2.0 * PI * at as f64 / 8.0;
        // P(2, 1) is √(15/4) sin φ cos φ, and the coefficients of m and −m make twice the cosine.
        let exact = 2.0 * (15.0_f64 / 4.0).sqrt() * latitude.sin() * latitude.cos() * longitude.cos();
        assert!((field.double_value(&[0, 0, at]) - exact).abs() < 1e-14);
    }
}

/// Case 2 of Williamson et al., J. Comput. Phys. 102 (1992): a balanced rotation of the fluid about an axis that is tilted by 45° against
/// the poles of the grid, and with it the planet's axis.
#[test]
fn a_rotation_of_the_fluid_is_steady() {
    let mut model = Model::new(21, 600.0, 0.0).unwrap();
    let (speed, tilt) = (40.0, PI / 4.0);
    let [sine, longitude] = points(&model);
    let cosine: Tensor = (1.0_f64 - sine.square()).sqrt();
    // Sine of the latitude that has the tilted axis as its pole.
    let height: Tensor = sine * tilt.cos() - longitude.cos() * cosine * tilt.sin();
    model.coriolis = &height * (2.0 * ROTATION);
    let depth_of = MEAN_DEPTH - height.square() * ((RADIUS * ROTATION + speed / 2.0) * speed / GRAVITY);
    let vorticity = &height * (2.0 * speed / RADIUS);
    let state = Tensor::stack(&[&vorticity, &vorticity.zeros_like(), &depth_of], 0);
    let state = model.sphere().coefficients(&state).unwrap();
    let change = advance(&model, &state, 72) - &state;
    let depth = largest(&depth(&model, &change));
    assert!(depth < 1e-7, "{depth:e} m");
    let inverse = inverse_laplacian(21).unwrap();
    let wind = largest(&wind(model.sphere().grid(), &inverse, &change).unwrap());
    assert!(wind < 1e-9, "{wind:e} m/s");
}

/// Without rotation, a small wave of degree l has the frequency √(g H l (l + 1)) / a.
#[test]
fn a_gravity_wave_returns_after_its_period() {
    let period = 2.0 * PI / (-GRAVITY * MEAN_DEPTH * eigenvalue(5.0)).sqrt();
    let steps = 400;
    let mut model = Model::new(10, period / f64::from(steps), 0.0).unwrap();
    model.coriolis = model.coriolis.zeros_like();
    let state = Tensor::zeros([3, 11, 11], (Kind::ComplexDouble, Device::Cpu));
    let _ = state.get(DEPTH).get(0).get(0).fill_(MEAN_DEPTH * 2.0_f64.sqrt());
    let _ = state.get(DEPTH).get(3).get(5).fill_(1e-5);
    let half = advance(&model, &state, steps as usize / 2);
    let wave = |state: &Tensor| state.get(DEPTH).get(3).get(5).real().double_value(&[]) / 1e-5;
    assert!((wave(&half) + 1.0).abs() < 1e-7, "{}", wave(&half));
    let after = wave(&advance(&model, &half, steps as usize / 2));
    assert!((after - 1.0).abs() < 1e-7, "{after}");
}

/// Hyperdiffusion alone: a wave of vorticity of degree l decays at the rate K (l (l + 1) / a²)².
#[test]
fn waves_decay_by_hyperdiffusion() {
    let mut model = Model::new(10, 100.0, 1e22).unwrap();
    model.coriolis = model.coriolis.zeros_like();
    let state = Tensor::zeros([3, 11, 11], (Kind::ComplexDouble, Device::Cpu));
    let _ = state.get(0).get(0).get(4).fill_(1e-12);
    let after = advance(&model, &state, 3).get(0).get(0).get(4).real().double_value(&[]);
    let exact = 1e-12 * (-1e22 * eigenvalue(4.0).powi(2) * 300.0).exp();
    assert!((after / exact - 1.0).abs() < 1e-9 && exact < 0.9e-12, "{after:e} {exact:e}");
}

/// Jets without bumps stay. Their depth falls towards the poles as the balance of Coriolis, centrifugal and pressure forces demands:
/// g dh/dφ = −u (a f + u tan φ).
#[test]
fn jets_are_in_balance() {
    let model = Model::new(85, 240.0, 0.0).unwrap();
    let state = start(&model, &[]).unwrap();
    let change = advance(&model, &state, 15) - &state;
    let moved = largest(&depth(&model, &change));
    assert!(moved < 1e-6, "{moved:e} m");

    for hemisphere in [1.0, -1.0] {
        let points = 4000;
        let width = PI / 2.0 / f64::from(points);
        let fall: f64 = (0..points)
            .map(|at| {
                let latitude = hemisphere * (f64::from(at) + 0.5) * width;
                let (wind, sine) = (jet(latitude), latitude.sin());
                wind * (2.0 * ROTATION * RADIUS * sine + wind * latitude.tan()).abs() * width / GRAVITY
            })
            .sum();
        let ends = Grid::new(85, &[0.0, hemisphere * 1.5_f64.sin()], 256).unwrap().fields(&state).unwrap();
        let found = ends.double_value(&[DEPTH, 0, 0]) - ends.double_value(&[DEPTH, 1, 0]);
        assert!((found / fall - 1.0).abs() < 1e-4 && fall > 700.0, "{found} m, {fall} m");
    }
}

/// The integral of the depth by quadrature does not depend on the time.
#[test]
fn mass_is_conserved() {
    let model = Model::new(21, 600.0, 1e17).unwrap();
    let bump = Bump { latitude: PI / 4.0, longitude: 1.0, height: 120.0 };
    let state = start(&model, &[bump]).unwrap();
    let (_, weights) = gauss_legendre(model.sphere().sines().len());
    let mass = |state: &Tensor| {
        let rows = depth(&model, state).mean_dim(1, false, None);
        (rows * Tensor::from_slice(&weights)).sum(None).double_value(&[]) / 2.0
    };
    assert!((mass(&state) / MEAN_DEPTH - 1.0).abs() < 1e-12);
    let later = advance(&model, &state, 36);
    assert!(largest(&(depth(&model, &later) - depth(&model, &state))) > 1.0);
    assert!((mass(&later) / MEAN_DEPTH - 1.0).abs() < 1e-12, "{}", mass(&later));
}
