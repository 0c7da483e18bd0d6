//! Files of The Well's schema: reading by windows, statistics, writing, and what is refused.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

use crate::common;
use std::ops::Range;
use std::path::{Path, PathBuf};

use hdf5_metno::types::VarLenUnicode;
use isobar_data::{
    DarcyFile, DataConfig, Error, Statistics, WellDim, WellFile, WellMeta, WellWriter, Window,
};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

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
    let both = Statistics {
        count: 2 * points,
        weight: 2.0 * points as f64,
        mean,
        std,
        min: x.min.min(y.min),
        max: x.max.max(y.max),
    };
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

/// Three trajectories of four frames with a field of each order, over `grid`; the first dim is periodic.
fn meta(grid: &[usize]) -> WellMeta {
    let dims = ["x", "y", "z"].into_iter().zip(grid).enumerate();
    WellMeta {
        name: "written".to_owned(),
        trajectories: 3,
        times: vec![0.0, 0.5, 1.0, 2.5],
        dims: dims
            .map(|(at, (name, &points))| WellDim {
                name: name.to_owned(),
                coordinates: (0..points).map(|point| point as f64 / 8.0 - 0.25).collect(),
                periodic: at == 0,
            })
            .collect(),
        fields: vec![("stress".to_owned(), 2), ("density".to_owned(), 0), ("velocity".to_owned(), 1)],
        parameters: vec![("viscosity".to_owned(), 1e-3), ("seed".to_owned(), 7.0)],
        ..WellMeta::default()
    }
}

/// Different numbers everywhere, exact in float32: `[frame, channel, x, …]` of a field and trajectory.
fn numbers(meta: &WellMeta, field: usize, trajectory: usize) -> Tensor {
    let dims = meta.dims.len();
    let components = dims.pow(meta.fields[field].1 as u32);
    let shape: Vec<i64> = [meta.times.len(), components]
        .into_iter()
        .chain(meta.dims.iter().map(|dim| dim.coordinates.len()))
        .map(|extent| extent as i64)
        .collect();
    let count: i64 = shape.iter().product();
    let first = (10 * field + trajectory) as i64 * 10_000;
    Tensor::arange_start(first, first + count, (Kind::Float, Device::Cpu)).view(&*shape)
}

/// A file of [`meta`] and [`numbers`] in a folder of its own.
fn written(grid: &[usize]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("written.h5");
    let meta = meta(grid);
    let mut writer = WellWriter::create(&path, &meta).unwrap();
    for (at, (field, _)) in meta.fields.iter().enumerate() {
        for trajectory in (0..meta.trajectories).rev() {
            let values = numbers(&meta, at, trajectory);
            // In portions, in any order, of another kind, and not contiguous.
            writer.write(field, trajectory, 3, &values.narrow(0, 3, 1).to_kind(Kind::Double)).unwrap();
            writer.write(field, trajectory, 1, &values.narrow(0, 0, 0)).unwrap();
            let swapped = values.narrow(0, 0, 3).transpose(0, 1).contiguous().transpose(0, 1);
            writer.write(field, trajectory, 0, &swapped).unwrap();
        }
    }
    assert!(!path.exists(), "nothing is seen before it is whole");
    writer.finish().unwrap();
    (folder, path)
}

fn all(points: &[usize]) -> Vec<Range<usize>> {
    points.iter().map(|&points| 0..points).collect()
}

#[rstest::rstest]
#[case(&[5])]
#[case(&[4, 3])]
#[case(&[2, 1, 3])]
fn what_is_written_is_read_back(#[case] grid: &[usize]) {
    let (_folder, path) = written(grid);
    let meta = meta(grid);
    let file = WellFile::open(&path).unwrap();
    let d = grid.len();
    // In the order of the fields' orders, whatever order they were given in.
    let fields: Vec<_> =
        file.fields().iter().map(|field| (field.name(), field.order(), field.components())).collect();
    assert_eq!(fields, [("density", 0, 1), ("velocity", 1, d), ("stress", 2, d * d)]);
    let mut same = file.meta();
    same.fields.rotate_right(1);
    assert_eq!(same, meta);
    for trajectory in 0..3 {
        let got = file.read(&["stress", "density", "velocity"], trajectory, 0..4, &all(grid)).unwrap();
        let want: Vec<Tensor> = (0..3).map(|field| numbers(&meta, field, trajectory)).collect();
        assert_eq!(got, Tensor::cat(&want, 1));
    }
    let statistics = file.statistics(&["velocity", "density"], 1..3).unwrap();
    assert_eq!(statistics.len(), d + 1);
    for (channel, got) in statistics.into_iter().enumerate() {
        let (field, component) = if channel < d { (2, channel) } else { (1, 0) };
        let values: Vec<Tensor> =
            [1, 2].map(|trajectory| numbers(&meta, field, trajectory).select(1, component as i64)).into();
        let direct = Statistics::of(&Tensor::stack(&values, 0)).unwrap();
        close(got, direct.count, [direct.mean, direct.std, direct.min, direct.max]);
    }
    // A file like it, of the same bytes.
    let (_other, again) = written(grid);
    assert_eq!(std::fs::read(path).unwrap(), std::fs::read(again).unwrap());
}

/// Puts chunks whose last ones are partial in the place of a field.
fn in_chunks(path: &Path, field: &str, chunk: &[usize]) {
    let file = hdf5_metno::File::open_rw(path).unwrap();
    let (group, name) = field.split_once('/').unwrap();
    let group = file.group(group).unwrap();
    let whole = group.dataset(name).unwrap();
    let values = whole.read_dyn::<f32>().unwrap();
    let builder = group.new_dataset::<f32>().shape(whole.shape()).chunk(chunk.to_vec()).shuffle().deflate(4);
    let chunked = builder.create("chunked").unwrap();
    chunked.write(&values).unwrap();
    for flag in ["sample_varying", "time_varying"] {
        chunked.new_attr::<bool>().create(flag).unwrap().write_scalar(&true).unwrap();
    }
    let dims = whole.attr("dim_varying").unwrap().read_1d::<bool>().unwrap();
    chunked.new_attr_builder().with_data(&dims).create("dim_varying").unwrap();
    group.unlink(name).unwrap();
    group.relink("chunked", name).unwrap();
}

fn range(points: usize) -> impl Strategy<Value = Range<usize>> {
    (0..=points, 0..=points).prop_map(|(a, b)| a.min(b)..a.max(b))
}

proptest! {
    // A quarter of the usual number, or of PROPTEST_CASES, since each case reads a file.
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases / 4, ..ProptestConfig::default() })]

    /// Windows across the edges of chunks, and empty ones.
    #[test]
    fn a_window_is_that_part_of_the_whole(
        trajectory in 0_usize..3,
        frames in range(4),
        x in range(9),
        y in range(7),
    ) {
        static FILE: std::sync::LazyLock<(tempfile::TempDir, PathBuf)> = std::sync::LazyLock::new(|| {
            let made = written(&[9, 7]);
            in_chunks(&made.1, "t0_fields/density", &[2, 3, 4, 5]);
            in_chunks(&made.1, "t1_fields/velocity", &[1, 3, 5, 7, 1]);
            made
        });
        let file = WellFile::open(&FILE.1).unwrap();
        let fields = ["velocity", "density", "stress"];
        let window = file.read(&fields, trajectory, frames.clone(), &[x.clone(), y.clone()]).unwrap();
        let meta = meta(&[9, 7]);
        let whole: Vec<Tensor> = [2, 1, 0].map(|field| numbers(&meta, field, trajectory)).into();
        let want = Tensor::cat(&whole, 1)
            .narrow(0, frames.start as i64, frames.len() as i64)
            .narrow(2, x.start as i64, x.len() as i64)
            .narrow(3, y.start as i64, y.len() as i64);
        prop_assert_eq!(window.kind(), Kind::Float);
        prop_assert_eq!(window.size(), want.size());
        prop_assert_eq!(&window, &want);
        let statistics = file.statistics(&["density"], trajectory..trajectory + 1).unwrap()[0];
        let direct = Statistics::of(&numbers(&meta, 1, trajectory)).unwrap();
        prop_assert_eq!((statistics.count, statistics.min, statistics.max), (direct.count, direct.min, direct.max));
    }
}

/// A mask of obstacles is the same in every trajectory and frame; a profile lies along one dim only.
#[test]
fn a_field_that_does_not_vary_is_repeated() {
    let (_folder, path) = written(&[4, 3]);
    let file = hdf5_metno::File::open_rw(&path).unwrap();
    let add = |group: &str, names: &[&str], field: &str, shape: &[usize], flags: [bool; 4]| {
        let group = file.group(group).unwrap();
        let dataset = group.new_dataset::<f32>().shape(shape).create(field).unwrap();
        let count: usize = shape.iter().product();
        dataset.write_raw(&(0..count).map(|i| i as f32).collect::<Vec<_>>()).unwrap();
        let flag = |name: &str, value: bool| {
            dataset.new_attr::<bool>().create(name).unwrap().write_scalar(&value).unwrap();
        };
        flag("sample_varying", flags[0]);
        flag("time_varying", flags[1]);
        dataset.new_attr_builder().with_data(&flags[2..]).create("dim_varying").unwrap();
        group.delete_attr("field_names").unwrap();
        // Of fixed length, as h5py writes bytes.
        let names: Vec<hdf5_metno::types::FixedAscii<12>> =
            names.iter().map(|name| hdf5_metno::types::FixedAscii::from_ascii(name).unwrap()).collect();
        group.new_attr_builder().with_data(&names).create("field_names").unwrap();
    };
    add("t0_fields", &["density", "mask"], "mask", &[4, 3], [false, false, true, true]);
    add("t1_fields", &["velocity", "profile"], "profile", &[4, 3, 2], [false, true, false, true]);
    add("t2_fields", &["stress", "constant"], "constant", &[2, 2], [false; 4]);
    drop(file);

    let file = WellFile::open(&path).unwrap();
    let got = file.read(&["mask", "profile", "constant"], 2, 1..3, &[1..4, 1..3]).unwrap();
    assert_eq!(got.size(), [2, 7, 3, 2]);
    let mask = Tensor::from_slice(&[4_f32, 5.0, 7.0, 8.0, 10.0, 11.0]).view([1, 3, 2]);
    assert_eq!(got.select(1, 0), mask.expand([2, 3, 2], false));
    // [time, y, component]: 6 t + 2 y + c.
    let profile = Tensor::from_slice(&[8_f32, 10.0, 14.0, 16.0]).view([2, 1, 2]).expand([2, 3, 2], false);
    assert_eq!(got.select(1, 1), profile);
    assert_eq!(got.select(1, 2), profile + 1.0);
    for component in 0..4 {
        assert_eq!(values(&got.select(1, 3 + component)), [component as f32; 12]);
    }
    let statistics = file.statistics(&["mask"], 1..3).unwrap()[0];
    assert_eq!((statistics.count, statistics.mean), (2 * 4 * 12, 5.5));
}

/// Of a name, HDF5 takes the encoding as the file has it: 255 is none.
#[test]
fn attributes_with_names_of_no_known_encoding_are_read_by_their_names() {
    let (_folder, path) = written(&[4, 3]);
    let mut bytes = std::fs::read(&path).unwrap();
    let mut damaged = 0;
    for name in [&b"\x01n_trajectories\0"[..], b"\x01bc_type\0", b"\x01sample_varying\0"] {
        for at in 0..bytes.len() - name.len() {
            if bytes[at..].starts_with(name) {
                bytes[at] = 255;
                damaged += 1;
            }
        }
    }
    assert!(damaged > 3, "{damaged}");
    std::fs::write(&path, bytes).unwrap();
    match WellFile::open(&path) {
        Ok(file) => assert_eq!(file.trajectories(), 3),
        // The helper lists the names with the bindings, which end in debug builds.
        Err(Error::Rejected { path: named, .. }) => assert_eq!(named, path),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn an_attribute_that_is_not_there_is_named() {
    let (_folder, path) = written(&[4, 3]);
    let file = hdf5_metno::File::open_rw(&path).unwrap();
    file.dataset("t0_fields/density").unwrap().delete_attr("time_varying").unwrap();
    drop(file);
    let error = WellFile::open(&path).unwrap_err().to_string();
    let shown = path.display();
    assert_eq!(error, format!("{shown}: the attribute `t0_fields/density@time_varying` is missing"));
    let file = hdf5_metno::File::open_rw(&path).unwrap();
    file.delete_attr("n_trajectories").unwrap();
    drop(file);
    let error = WellFile::open(&path).unwrap_err().to_string();
    assert_eq!(error, format!("{shown}: the root attribute `n_trajectories` is missing"));
}

/// Names as The Well has them, units where the file says them, and how much each channel changes from frame to frame.
#[test]
fn channels_have_names_units_and_changes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("units.h5");
    let units = vec![("density".to_owned(), "kg m-3".to_owned())];
    let meta = WellMeta { units, ..meta(&[3, 2]) };
    let mut writer = WellWriter::create(&path, &meta).unwrap();
    let mut all = Vec::new();
    for (at, (name, _)) in meta.fields.iter().enumerate() {
        for trajectory in 0..meta.trajectories {
            let values = numbers(&meta, at, trajectory).square();
            writer.write(name, trajectory, 0, &values).unwrap();
            if name == "velocity" && trajectory < 2 {
                all.push(values);
            }
        }
    }
    writer.attribute("isobar_checkpoint", "step 7").unwrap();
    writer.finish().unwrap();

    let file = WellFile::open(&path).unwrap();
    let channels = file.channels(&["velocity", "density", "stress"]).unwrap();
    let names: Vec<&str> = channels.iter().map(|(name, _)| &**name).collect();
    let stress = ["stress_xx", "stress_xy", "stress_yx", "stress_yy"];
    assert_eq!(names, [&["velocity_x", "velocity_y", "density"][..], &stress].concat());
    let units: Vec<_> = channels.iter().filter_map(|(_, unit)| unit.as_deref()).collect();
    assert_eq!((units, channels[2].1.as_deref()), (vec!["kg m-3"], Some("kg m-3")));
    assert_eq!(file.meta().units, meta.units);

    let changes = file.change_statistics(&["velocity"], 0..2).unwrap();
    let frames = Tensor::stack(&all, 0).to_kind(Kind::Double);
    let differences = frames.narrow(1, 1, 3) - frames.narrow(1, 0, 3);
    for (component, found) in changes.iter().enumerate() {
        let own = differences.select(2, component as i64);
        assert_eq!(found.count, own.numel() as u64);
        assert!((found.mean - own.mean(None).double_value(&[])).abs() <= 1e-9 * found.mean.abs());
        assert!((found.std - own.std(false).double_value(&[])).abs() <= 1e-9 * found.std);
    }
}

/// Numbers of the group `scalars`: the same for all trajectories of a file, for each, or for each time.
#[test]
fn scalars_are_variables_where_they_are_named() {
    let folder = tempfile::tempdir().unwrap();
    for (name, viscosity) in [("a.h5", 0.25), ("b.h5", 0.75)] {
        let dim = WellDim { name: "x".to_owned(), coordinates: vec![0.0, 1.0, 2.0], periodic: true };
        let meta = WellMeta {
            trajectories: 2,
            times: vec![0.0, 1.0],
            dims: vec![dim],
            fields: vec![("u".to_owned(), 0)],
            parameters: vec![("viscosity".to_owned(), viscosity)],
            ..WellMeta::default()
        };
        let path = folder.path().join(name);
        let mut writer = WellWriter::create(&path, &meta).unwrap();
        for trajectory in 0..2 {
            writer.write("u", trajectory, 0, &Tensor::rand([2, 1, 3], (Kind::Float, Device::Cpu))).unwrap();
        }
        writer.finish().unwrap();
        let file = hdf5_metno::File::append(&path).unwrap();
        let group = file.group("scalars").unwrap();
        let names = ["viscosity", "force", "load"].map(|name| name.parse::<VarLenUnicode>().unwrap());
        group.attr("field_names").and_then(|_| group.delete_attr("field_names")).unwrap();
        group.new_attr_builder().with_data(&names).create("field_names").unwrap();
        for (name, shape, times) in [("force", vec![2], false), ("load", vec![2, 2], true)] {
            let count: usize = shape.iter().product();
            let values = (0..count).map(|at| at as f32 + viscosity as f32).collect();
            let values = ndarray::ArrayD::from_shape_vec(shape, values).unwrap();
            let scalar = group.new_dataset_builder().with_data(&values).create(name).unwrap();
            for (flag, on) in [("sample_varying", true), ("time_varying", times)] {
                scalar.new_attr::<bool>().create(flag).unwrap().write_scalar(&on).unwrap();
            }
        }
    }
    let table = serde_json::json!({
        "path": folder.path(), "format": "the_well", "fields": ["u"], "scalars": ["viscosity", "force", "load"],
    });
    let config: DataConfig = serde_json::from_value(table).unwrap();
    let data = config.open().unwrap();
    let uniform: Vec<bool> = data.variables().iter().map(|variable| variable.uniform).collect();
    assert_eq!(uniform, [false, true, true, true]);
    let window = Window { frames: 0..2, points: std::iter::once(1..3).collect() };
    let read = data.read(&window, &[3, 0], &["load", "viscosity", "force"]).unwrap();
    let of = |frames: [[f32; 3]; 2]| {
        frames.concat().into_iter().flat_map(|value| [value, value]).collect::<Vec<_>>()
    };
    let expected = [of([[2.75, 0.75, 1.75], [3.75, 0.75, 1.75]]), of([[0.25; 3], [1.25, 0.25, 0.25]])];
    assert_eq!(values(&read), expected.concat());
    let statistics = data.statistics(&["viscosity"], 0..4).unwrap()[0].unwrap();
    assert_eq!((statistics.mean, statistics.std, statistics.min, statistics.max), (0.5, 0.25, 0.25, 0.75));
    let config = DataConfig { scalars: Vec::new(), ..config };
    assert_eq!(config.open().unwrap().variables().len(), 1, "other commands see fields only");
}
