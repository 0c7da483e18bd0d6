//! Files of The Well's schema: reading by windows, statistics, writing, and what is refused.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

mod common;

use isobar_data::{DarcyFile, Statistics, WellFile};
use tch::Tensor;

fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.flatten(0, -1)).unwrap()
}

fn close(got: Statistics, count: u64, [mean, std, min, max]: [f64; 4]) {
    assert_eq!((got.count, got.min, got.max), (count, min, max));
    // The means are 1e-7 of the deviations and less: sums in another order differ by rounding of the latter.
    assert!((got.mean - mean).abs() < 1e-13 * std, "mean {} against {mean}", got.mean);
    assert!((got.std / std - 1.0).abs() < 1e-12, "std {} against {std}", got.std);
}

/// The project's Navier-Stokes data set, where it is, against the figures that numpy computed.
#[test]
fn a_file_written_by_h5py_holds_what_numpy_found() {
    let (Some(path), Some(reference)) =
        (common::shared("navier_stokes_64.h5"), common::shared("reference.json"))
    else {
        return;
    };
    let file = WellFile::open(&path).unwrap();
    assert_eq!((file.path(), file.name(), file.grid_type()), (&*path, "navier_stokes_64", "cartesian"));
    assert_eq!((file.trajectories(), file.frames(), file.grid()), (24, 20, &[64, 64][..]));
    assert_eq!(file.spatial_dims(), ["x", "y"]);
    assert_eq!(file.times(), (0..20).map(f64::from).collect::<Vec<_>>());
    for dim in 0..2 {
        assert_eq!(file.coordinates(dim), (0..64).map(|i| f64::from(i) / 64.0).collect::<Vec<_>>());
        assert!(file.is_periodic(dim));
    }
    let parameters = [("viscosity".to_owned(), 0.001), ("forcing_amplitude".to_owned(), 0.1)];
    assert_eq!(file.parameters(), parameters);
    let fields: Vec<_> =
        file.fields().iter().map(|field| (field.name(), field.order(), field.components())).collect();
    assert_eq!(fields, [("vorticity", 0, 1), ("velocity", 1, 2)]);

    let reference: serde_json::Value = serde_json::from_slice(&std::fs::read(reference).unwrap()).unwrap();
    let variables = &reference["files"]["navier_stokes_64.h5"]["variables"];
    let statistics = file.statistics(&["vorticity", "velocity"], 0..24).unwrap();
    let figures =
        |entry: &serde_json::Value| ["mean", "std", "min", "max"].map(|key| entry[key].as_f64().unwrap());
    let points = 24 * 20 * 64 * 64;
    let velocity = &variables["t1_fields/velocity"];
    close(statistics[0], points, figures(&variables["t0_fields/vorticity"]));
    close(statistics[1], points, figures(&velocity["components"][0]));
    close(statistics[2], points, figures(&velocity["components"][1]));
    let [x, y] = [statistics[1], statistics[2]];
    let (mean, half) = (f64::midpoint(x.mean, y.mean), (x.mean - y.mean) / 2.0);
    let std = (f64::midpoint(x.std.powi(2), y.std.powi(2)) + half.powi(2)).sqrt();
    let both = Statistics { count: 2 * points, mean, std, min: x.min.min(y.min), max: x.max.max(y.max) };
    close(both, 2 * points, figures(velocity));
    for (name, coordinates) in
        [("time", file.times()), ("x", file.coordinates(0)), ("y", file.coordinates(1))]
    {
        let got = Statistics::of(&Tensor::from_slice(coordinates)).unwrap();
        close(got, coordinates.len() as u64, figures(&variables[format!("dimensions/{name}")]));
    }

    let mut checked = 0;
    for field in ["t0_fields/vorticity", "t1_fields/velocity"] {
        for entry in variables[field]["values_at"].as_array().unwrap() {
            let index: Vec<usize> =
                entry[0].as_array().unwrap().iter().map(|i| i.as_u64().unwrap() as usize).collect();
            let [trajectory, frame, x, y, ..] = index[..] else { panic!("{index:?}") };
            let name = field.split_once('/').unwrap().1;
            let point = file.read(&[name], trajectory, frame..frame + 1, &[x..x + 1, y..y + 1]).unwrap();
            let component = index.get(4).copied().unwrap_or(0);
            assert_eq!(values(&point)[component], entry[1].as_f64().unwrap() as f32, "{name} {index:?}");
            checked += 1;
        }
    }
    assert_eq!(checked, 10);
}

#[test]
fn a_darcy_file_and_one_of_the_well_are_not_taken_for_each_other() {
    let path = common::excerpt();
    let error = WellFile::open(&path).unwrap_err().to_string();
    let shown = path.display();
    assert_eq!(error, format!("{shown}: not a file of The Well's schema, but of PDEBench's Darcy layout"));
    let Some(path) = common::shared("navier_stokes_64.h5") else {
        return;
    };
    let error = DarcyFile::open(&path).unwrap_err().to_string();
    let shown = path.display();
    assert_eq!(error, format!("{shown}: not a file of PDEBench's Darcy layout, but of The Well's schema"));
}
