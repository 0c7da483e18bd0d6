//! PDEBench's layouts, against the values that were written.
#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]
#![expect(clippy::single_range_in_vec_init, reason = "the window of a single dim")]

use std::path::Path;

use hdf5_metno::File;
use isobar_data::{
    Content, DataConfig, DataVariable, Dataset, Dim, Error, PredictionMeta, Storage, TimeUnit, Window, writer,
};
use ndarray::ArrayD;
use rstest::rstest;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

/// Writes a dataset whose values count up from `first`.
fn counted(file: &File, name: &str, shape: &[usize], first: usize) {
    let count: usize = shape.iter().product();
    let values = (first..first + count).map(|at| at as f32).collect();
    let values = ArrayD::from_shape_vec(shape, values).unwrap();
    let _ = file.new_dataset_builder().with_data(&values).create(name).unwrap();
}

fn open(path: &Path, fields: &[&str], own: Value) -> Result<Box<dyn Dataset>, Error> {
    let table = json!({ "path": path, "format": "pdebench", "fields": fields, "pdebench": own });
    serde_json::from_value::<DataConfig>(table).unwrap().open()
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double).flatten(0, -1)).unwrap()
}

fn names(data: &dyn Dataset) -> Vec<&str> {
    data.dims().iter().map(|dim| dim.name.as_str()).collect()
}

/// Burgers and advection: times have a number more than there are frames.
#[test]
fn one_dimensional_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("1D_Burgers_Sols_Nu0.1.hdf5");
    {
        let file = File::create(&path).unwrap();
        counted(&file, "tensor", &[3, 4, 5], 0);
        counted(&file, "x-coordinate", &[5], 10);
        counted(&file, "t-coordinate", &[5], 0);
    }
    let data = open(&path, &["tensor"], json!({ "periodic": ["x"] })).unwrap();
    assert_eq!((data.samples(), data.times()), (3, Some(&[0.0, 1.0, 2.0, 3.0][..])));
    assert_eq!((names(&*data), data.dims()[0].periodic), (vec!["x"], true));
    assert_eq!(data.dims()[0].coordinates[0], 10.0);
    let window = Window { frames: 1..3, points: vec![2..4] };
    assert_eq!(numbers(&data.read(&window, &[2], &["tensor"]).unwrap()), [47.0, 48.0, 52.0, 53.0]);
    let cut = open(&path, &["tensor"], json!({ "cut": 1 })).unwrap();
    assert_eq!((cut.samples(), cut.times().unwrap().len()), (9, 2));
}

/// Parameters are attributes of the file, or in its name; of several files each has its own.
#[test]
fn parameters_are_scalars() {
    let folder = tempfile::tempdir().unwrap();
    for (name, rho) in [("ReacDiff_Nu0.5_Rho1.0.hdf5", 1.5), ("ReacDiff_Nu1.e-2_Rho2.0.hdf5", 2.5)] {
        let file = File::create(folder.path().join(name)).unwrap();
        counted(&file, "tensor", &[2, 4, 5], 0);
        counted(&file, "x-coordinate", &[5], 10);
        file.new_attr::<f64>().create("rho").unwrap().write_scalar(&rho).unwrap();
    }
    let config = |scalars: &[&str]| {
        let table =
            json!({ "path": folder.path(), "format": "pdebench", "fields": ["tensor"], "scalars": scalars });
        serde_json::from_value::<DataConfig>(table).unwrap()
    };
    let data = config(&["nu", "rho"]).open().unwrap();
    assert!(data.variables()[1].uniform && !data.variables()[0].uniform);
    let window = Window { frames: 0..2, points: vec![1..3] };
    let read = data.read(&window, &[3, 1], &["nu", "rho"]).unwrap();
    assert_eq!(read.size(), [2, 2, 2, 2]);
    let of_sample =
        |nu: f32, rho: f32| [f64::from(nu), f64::from(nu), f64::from(rho), f64::from(rho)].repeat(2);
    assert_eq!(numbers(&read), [of_sample(0.01, 2.5), of_sample(0.5, 1.5)].concat());
    let statistics = data.statistics(&["tensor", "rho"], 0..4).unwrap();
    let rho = statistics[1].unwrap();
    assert_eq!((rho.count, rho.mean, rho.std, rho.min, rho.max), (4 * 4, 2.0, 0.5, 1.5, 2.5));
    assert_eq!(statistics[0].unwrap().count, 4 * 4 * 5);
    let error = config(&["xi"]).open().unwrap_err().to_string();
    assert!(error.contains("xi") && error.contains("tensor"), "{error}");
}

#[rstest]
fn compressible_flow(#[values(2, 3)] dims: usize) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2D_CFD_Rand.hdf5");
    let shape = [&[2, 3][..], &[4, 5, 2][..dims]].concat();
    let fields = ["Vx", "Vy", "density", "pressure"];
    {
        let file = File::create(&path).unwrap();
        for (at, name) in fields.iter().enumerate() {
            counted(&file, name, &shape, 1000 * at);
        }
        for (name, extent) in ["x", "y", "z"].iter().zip(&shape[2..]) {
            counted(&file, &format!("{name}-coordinate"), &[*extent], 0);
        }
        counted(&file, "t-coordinate", &[4], 0);
    }
    let data = open(&path, &["density", "Vy"], json!({})).unwrap();
    assert_eq!((data.samples(), data.times().unwrap().len()), (2, 3));
    assert_eq!(names(&*data), ["x", "y", "z"][..dims]);
    let mut points = vec![1..2, 2..4];
    points.resize(dims, 0..2);
    let read = data.read(&Window { frames: 2..3, points }, &[1], &["Vy", "density"]).unwrap();
    let extents: Vec<i64> = shape.iter().map(|&extent| extent as i64).collect();
    let all =
        Tensor::arange(extents.iter().product::<i64>(), (Kind::Double, tch::Device::Cpu)).view(&extents[..]);
    let part = numbers(&all.get(1).get(2).get(1).narrow(0, 2, 2));
    let expected: Vec<f64> =
        [1000.0, 2000.0].iter().flat_map(|first| part.iter().map(move |at| first + at)).collect();
    assert_eq!(numbers(&read), expected);
    assert_eq!(
        open(&path, &[], json!({})).unwrap_err().to_string().matches("density").count(),
        2,
        "it is proposed"
    );
}

/// Reaction and diffusion, and the radial dam break: a group for each sample.
#[test]
fn groups_of_samples() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2D_diff-react_NA_NA.h5");
    let write = |shape_of_last: &[usize], last_time: usize| {
        let file = File::create(&path).unwrap();
        for (at, group) in ["0000", "0001", "0010"].iter().enumerate() {
            let shape: &[usize] = if at == 2 { shape_of_last } else { &[3, 4, 5, 2] };
            let _ = file.create_group(&format!("{group}/grid")).unwrap();
            counted(&file, &format!("{group}/data"), shape, 1000 * at);
            counted(&file, &format!("{group}/grid/x"), &[4], 0);
            counted(&file, &format!("{group}/grid/y"), &[5], 0);
            counted(&file, &format!("{group}/grid/t"), &[3], if at == 2 { last_time } else { 0 });
        }
    };
    write(&[3, 4, 5, 2], 0);
    let data = open(&path, &["data"], json!({})).unwrap();
    assert_eq!((data.samples(), data.times()), (3, Some(&[0.0, 1.0, 2.0][..])));
    assert_eq!(data.variables()[0].channels, ["data_0", "data_1"]);
    let window = Window { frames: 1..2, points: vec![3..4, 1..3] };
    let read = data.read(&window, &[2, 0], &["data"]).unwrap();
    assert_eq!(read.size(), [2, 1, 2, 1, 2]);
    // Place (1, 3, 1, 0) is 40 + 30 + 2.
    assert_eq!(numbers(&read), [2072.0, 2074.0, 2073.0, 2075.0, 72.0, 74.0, 73.0, 75.0]);
    drop(data);
    write(&[3, 4, 4, 2], 0);
    let error = open(&path, &["data"], json!({})).unwrap_err().to_string();
    assert!(error.contains("`0010/data` is of shape [3, 4, 4, 2], expected [3, 4, 5, 2]"), "{error}");
    write(&[3, 4, 5, 2], 7);
    let error = open(&path, &["data"], json!({})).unwrap_err().to_string();
    assert!(error.contains("`0010/grid/t` is of different times"), "{error}");
}

#[test]
fn incompressible_flow() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ns_incom_inhom_2d_512-0.h5");
    let file = File::create(&path).unwrap();
    counted(&file, "velocity", &[2, 3, 4, 4, 2], 0);
    counted(&file, "particles", &[2, 3, 4, 4, 1], 0);
    counted(&file, "force", &[2, 4, 4, 2], 0);
    let times = ArrayD::from_shape_vec(vec![2, 3], vec![0.0_f32, 0.5, 1.0, 0.0, 0.5, 1.0]).unwrap();
    let _ = file.new_dataset_builder().with_data(&times).create("t").unwrap();
    drop(file);
    let data = open(&path, &["velocity", "particles", "force"], json!({})).unwrap();
    assert_eq!((data.samples(), data.times()), (2, Some(&[0.0, 0.5, 1.0][..])));
    let window = Window { frames: 1..3, points: vec![0..1, 3..4] };
    let read = data.read(&window, &[1], &["force", "particles"]).unwrap();
    assert_eq!(numbers(&read), [38.0, 39.0, 67.0, 38.0, 39.0, 83.0], "the force at each time");
    drop(data);
    let file = File::open_rw(&path).unwrap();
    let other = ArrayD::from_shape_vec(vec![2, 3], vec![0.0_f32, 0.5, 1.0, 0.0, 0.5, 2.0]).unwrap();
    file.dataset("t").unwrap().write(&other).unwrap();
    drop(file);
    let error = open(&path, &["velocity"], json!({})).unwrap_err().to_string();
    assert!(error.contains("different times for sample 1"), "{error}");
}

#[test]
fn other_layouts_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("other.h5");
    let file = File::create(&path).unwrap();
    counted(&file, "u", &[3, 4, 5], 0);
    drop(file);
    let error = open(&path, &["u"], json!({})).unwrap_err().to_string();
    assert!(error.contains("not a file of trajectories of PDEBench"), "{error}");
    let error = open(&super::common::excerpt(), &["u"], json!({})).unwrap_err().to_string();
    assert!(error.contains("--set data.format=darcy"), "{error}");
    let file = File::create(&path).unwrap();
    counted(&file, "tensor", &[3, 4, 5], 0);
    counted(&file, "x-coordinate", &[5], 0);
    counted(&file, "t-coordinate", &[3], 0);
    drop(file);
    let error = open(&path, &["tensor"], json!({})).unwrap_err().to_string();
    assert!(error.contains("`t-coordinate` is 3 times, expected at least 4"), "{error}");
}

const SAMPLES: usize = 2;
const TIMES: [f64; 3] = [0.0, 0.5, 1.0];

/// Content of two samples on 5 points along each dim; a variable is its name and number of channels, 0 for a scalar.
fn content(variables: &[(&str, usize)], times: &[f64], dims: usize) -> Content {
    let variable = |&(name, channels): &(&str, usize)| match channels {
        0 => DataVariable { unit: Some("kg".to_owned()), ..DataVariable::scalar(name) },
        _ => DataVariable {
            channels: (0..channels).map(|at| format!("{name}{}", ["a", "b", "c"][at])).collect(),
            unit: Some("m s-1".to_owned()),
            has_direction: true,
            ..DataVariable::scalar(name)
        },
    };
    let dim = |name: &&str| Dim {
        name: (*name).to_owned(),
        unit: Some("m".to_owned()),
        coordinates: (0..5).map(|at| f64::from(at) * 0.25 + 1.0).collect(),
        periodic: false,
    };
    Content {
        meta: PredictionMeta {
            name: "flow".to_owned(),
            variables: variables.iter().map(|(name, _)| (*name).to_owned()).collect(),
            samples: SAMPLES,
            times: times.to_vec(),
            sample_times: Vec::new(),
            sample_numbers: Vec::new(),
            attributes: vec![("origin".to_owned(), "a test".to_owned())],
            missing: false,
            left_out: Vec::new(),
        },
        time_unit: Some(TimeUnit {
            unit: "hours since 2000-01-01".to_owned(),
            calendar: Some("noleap".to_owned()),
        }),
        dims: ["a", "b", "c"][..dims].iter().map(dim).collect(),
        variables: variables.iter().map(variable).collect(),
        parameters: vec![("beta".to_owned(), 0.25)],
        storage: Storage::default(),
    }
}

/// Values of a variable, `[sample, frame, channel, x, …]`.
fn values(content: &Content, at: usize) -> Tensor {
    let frames = content.meta.times.len().max(1);
    let mut shape = vec![SAMPLES, frames, content.variables[at].channels.len()];
    shape.extend(content.dims.iter().map(|dim| dim.coordinates.len()));
    let shape: Vec<i64> = shape.into_iter().map(|extent| extent as i64).collect();
    (Tensor::arange(shape.iter().product::<i64>(), (Kind::Float, Device::Cpu)) + 1000.0 * at as f64)
        .view(&shape[..])
}

/// Every layout, in windows of two ranks that share the first dim; names of PDEBench replace others.
#[rstest]
#[case::one_scalar(&[("u", 0)], 1, &["tensor"])]
#[case::flow_in_three_dims(&[("density", 0), ("Vx", 0), ("pressure", 0)], 3, &["density", "Vx", "pressure"])]
#[case::incompressible(&[("velocity", 2), ("particles", 1)], 2, &["velocity", "particles"])]
#[case::particles_alone(&[("particles", 2)], 2, &["data"])]
#[case::groups(&[("species", 2)], 2, &["data"])]
#[case::groups_in_one_dim(&[("species", 3)], 1, &["data"])]
fn trajectories_that_are_written_are_read(
    #[case] variables: &[(&str, usize)],
    #[case] dims: usize,
    #[case] names: &[&str],
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("flow.hdf5");
    let content = content(variables, &TIMES, dims);
    let mut target = writer(Some("pdebench"), &path).unwrap().create(&path, &content).unwrap();
    for (at, (name, _)) in variables.iter().enumerate() {
        for sample in (0..SAMPLES).rev() {
            for rows in [0..3, 3..5] {
                let mut points = vec![0..5; dims];
                points[0] = rows.clone();
                let own =
                    values(&content, at).get(sample as i64).narrow(2, rows.start as i64, rows.len() as i64);
                target.write_window(name, sample, 1, &points, &own.narrow(0, 1, 2)).unwrap();
                target.write_window(name, sample, 0, &points, &own.narrow(0, 0, 1)).unwrap();
            }
        }
    }
    target.finish().unwrap();
    assert!(File::open(&path).unwrap().attr("origin").is_ok());

    let data = open(&path, names, json!({})).unwrap();
    assert_eq!((data.samples(), data.times()), (SAMPLES, Some(&TIMES[..])));
    assert_eq!(data.dims()[0].coordinates, content.dims[0].coordinates);
    assert_eq!((data.dims()[0].unit.as_deref(), data.time_unit()), (Some("m"), content.time_unit.as_ref()));
    for (found, written) in data.variables().iter().zip(&content.variables) {
        assert_eq!(found.unit, written.unit);
        if written.channels.len() > 1 {
            assert_eq!(found.channels, written.channels);
        }
    }
    let with_beta = open(&path, &[names, &["beta"]].concat(), json!({})).unwrap();
    let beta = with_beta.read(&Window { frames: 0..1, points: vec![0..1; dims] }, &[1], &["beta"]).unwrap();
    assert_eq!(numbers(&beta), [0.25]);
    for (at, name) in names.iter().enumerate() {
        let read = data.read(&Window { frames: 0..3, points: vec![0..5; dims] }, &[0, 1], &[name]).unwrap();
        assert_eq!(read, values(&content, at), "{name}");
    }
}

#[rstest]
#[case::no_times(content(&[("u", 0)], &[], 2), "no times")]
#[case::two_unknown_scalars(content(&[("u", 0), ("v", 0)], &TIMES, 2), "expected a single variable")]
#[case::flow_in_three_dims(content(&[("velocity", 3), ("particles", 1)], &TIMES, 3), "expected a single variable")]
#[case::no_dims(content(&[("u", 0)], &TIMES, 0), "0 spatial dims")]
fn content_that_no_layout_holds_is_an_error(#[case] content: Content, #[case] says: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("flow.hdf5");
    let error = writer(Some("pdebench"), &path).unwrap().create(&path, &content).err().unwrap().to_string();
    assert!(error.contains(says) && error.contains("write hdf5, netcdf or zarr"), "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
}

/// With the source of the data set; other content is an error.
#[test]
fn darcy_flow_that_is_written_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("darcy.h5");
    let fields = content(&[("u", 0), ("nu", 0)], &[], 2);
    let create = |content: &Content| writer(Some("darcy"), &path).unwrap().create(&path, content);
    let mut target = create(&fields).unwrap();
    for sample in 0..SAMPLES {
        for (at, name) in ["u", "nu"].into_iter().enumerate() {
            target.write(name, sample, 0, &values(&fields, at).get(sample as i64)).unwrap();
        }
    }
    target.finish().unwrap();
    let table = json!({ "path": path, "format": "darcy" });
    let data = serde_json::from_value::<DataConfig>(table).unwrap().open().unwrap();
    assert_eq!(data.parameters(), [("beta".to_owned(), 0.25)]);
    assert_eq!(data.dims()[1].coordinates, fields.dims[1].coordinates);
    let read = data.read(&Window { frames: 0..1, points: vec![0..5; 2] }, &[0, 1], &["u", "nu"]).unwrap();
    assert_eq!(read, Tensor::cat(&[values(&fields, 0), values(&fields, 1)], 2));

    let without_source = Content { parameters: Vec::new(), ..fields };
    for (content, says) in [
        (without_source, "no source `beta`"),
        (content(&[("u", 0)], &[], 2), "the variables are u"),
        (content(&[("u", 0), ("nu", 2)], &[], 2), "`nu` is not a scalar"),
        (content(&[("u", 0), ("nu", 0)], &TIMES, 2), "samples have times"),
        (content(&[("u", 0), ("nu", 0)], &[], 1), "[5] points"),
    ] {
        let error = create(&content).err().unwrap().to_string();
        assert!(error.contains(says), "{error}");
    }
}
