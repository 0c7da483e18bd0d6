//! Statistics with weights, and over values that are missing.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use isobar_data::{
    Content, DataConfig, DataVariable, Dataset, Dim, Part, PredictionMeta, Result, Statistics, Storage,
    Summary, Window, area_weights, check_window, merge_channels, summarize, writer,
};
use tch::{Device, Kind, Tensor};

use crate::writers::{FRAMES, SAMPLES, content, open, values, write};

/// The content of a file of plain text, as of other tools.
fn written() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("air.nc");
    write("netcdf", &path, Storage::default(), &[[0..5, 0..4]]);
    (folder, path)
}

#[test]
fn statistics_are_weighted_by_cell_area() {
    let (_folder, path) = written();
    let data = open(&path, "netcdf");
    let mut last = (0, 0);
    let found = summarize(&*data, &["h", "wind"], 0..SAMPLES, |read, all| last = (read, all)).unwrap();
    assert_eq!(last, (1440, 1440), "every byte once");
    let (dim, weights) = area_weights(data.dims()).unwrap();
    assert_eq!(dim, 0);
    let sine = |degrees: f64| degrees.to_radians().sin();
    // Cells between −90, −60, −20, 20, 60 and 90 degrees.
    let exact = [1.0 - sine(60.0), sine(60.0) - sine(20.0), 2.0 * sine(20.0)];
    for (found, exact) in weights.iter().zip(exact) {
        assert!((found - exact * 2.5).abs() < 1e-12, "{found} {exact}");
    }
    let weights = Tensor::from_slice(&weights).view([5, 1]);
    let all = [values(1).select(2, 0), values(2).select(2, 0), values(2).select(2, 1)];
    for (summary, values) in found.iter().zip(all) {
        let values = values.to_kind(Kind::Double);
        let mean = (&values * &weights).mean(Kind::Double).double_value(&[]);
        let std = ((&values - mean).square() * &weights).mean(Kind::Double).double_value(&[]).sqrt();
        let Statistics { count, mean: own_mean, std: own_std, min, max, .. } = summary.values.unwrap();
        assert!((own_mean / mean - 1.0).abs() < 1e-13 && (own_std / std - 1.0).abs() < 1e-13);
        assert_eq!(count as usize, values.numel());
        assert_eq!((min, max), (values.min().double_value(&[]), values.max().double_value(&[])));
        let changes = summary.changes.unwrap();
        assert_eq!(changes.count as usize, values.numel() / FRAMES * (FRAMES - 1));
        assert!(changes.std < 1e-12 && changes.min == changes.max && changes.mean > 0.0, "{changes:?}");
    }
    // Training takes the same.
    let names = ["h", "wind"];
    let own = [data.statistics(&names, 0..SAMPLES), data.change_statistics(&names, 0..SAMPLES)];
    let [own, changes] = own.map(Result::unwrap);
    for (summary, (values, changes)) in found.iter().zip(own.iter().zip(&changes)) {
        near(&summary.values.unwrap(), &values.unwrap());
        near(&summary.changes.unwrap(), &changes.unwrap());
    }
    assert!(summarize(&*data, &["h"], 1..1, |_, _| ()).is_err());
    assert!(summarize(&*data, &["q"], 0..1, |_, _| ()).is_err());
}

fn near(one: &Statistics, other: &Statistics) {
    let pairs = [
        (one.weight, other.weight),
        (one.mean, other.mean),
        (one.std, other.std),
        (one.min, other.min),
        (one.max, other.max),
    ];
    let near = pairs.iter().all(|(one, other)| (one - other).abs() <= 1e-12 * other.abs().max(1.0));
    assert!(one.count == other.count && near, "{one:?} {other:?}");
}

/// Parts merge to the statistics of all, though missing values leave them other weights than counts.
#[test]
fn weighted_statistics_merge_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let (part, _) = with_gaps(&folder.path().join("gaps.nc"), |_, values| {
        // The tropics of the second sample.
        let _ = values.get(1).narrow(2, 1, 3).fill_(f64::NAN);
    });
    let portions = [0..1, 1..2].map(|samples| part.data.statistics(&["h"], samples).unwrap());
    let merged = merge_channels(&portions).unwrap()[0].unwrap();
    near(&merged, &part.data.statistics(&["h"], 0..2).unwrap()[0].unwrap());
    let (_, weights) = area_weights(part.data.dims()).unwrap();
    let weights = Tensor::from_slice(&weights).view([5, 1]).expand([FRAMES as i64, 5, 4], false);
    let values = values(1).select(2, 0).to_kind(Kind::Double);
    let polar =
        |field: &Tensor| Tensor::cat(&[field.narrow(1, 0, 1), field.narrow(1, 4, 1)], 1).flatten(0, -1);
    let values = Tensor::cat(&[values.get(0).flatten(0, -1), polar(&values.get(1))], 0);
    let weights = Tensor::cat(&[weights.flatten(0, -1), polar(&weights)], 0);
    let total = weights.sum(Kind::Double).double_value(&[]);
    let mean = (&values * &weights).sum(Kind::Double).double_value(&[]) / total;
    let variance = ((&values - mean).square() * &weights).sum(Kind::Double).double_value(&[]) / total;
    let (min, max) = (values.min().double_value(&[]), values.max().double_value(&[]));
    let count = values.numel() as u64;
    near(&merged, &Statistics { count, weight: total, mean, std: variance.sqrt(), min, max });
}

/// Without latitudes, all points count alike.
#[test]
fn statistics_without_latitudes_are_those_of_the_data_set() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plane.h5");
    let mut plane = content(Storage::default());
    plane.dims[0].name = "y".to_owned();
    plane.dims[0].unit = None;
    let mut target = writer(None, &path).unwrap().create(&path, &plane).unwrap();
    for sample in 0..SAMPLES {
        for (name, channels) in [("h", 1), ("wind", 2)] {
            let wavy = values(channels).get(sample as i64).sin();
            target.write(name, sample, 0, &wavy).unwrap();
        }
    }
    target.finish().unwrap();
    let data = open(&path, "hdf5");
    let names = ["h", "wind"];
    let found = summarize(&*data, &names, 0..SAMPLES, |_, _| ()).unwrap();
    let exact = data.statistics(&names, 0..SAMPLES).unwrap();
    let changes = data.change_statistics(&names, 0..SAMPLES).unwrap();
    for ((summary, values), changes) in found.iter().zip(&exact).zip(&changes) {
        near(&summary.values.unwrap(), &values.unwrap());
        near(&summary.changes.unwrap(), &changes.unwrap());
        assert_eq!(values.unwrap().weight, values.unwrap().count as f64);
    }
}

/// The training samples of a file that [`content`] describes, with NaN where `hide` puts it.
fn with_gaps(path: &Path, hide: impl Fn(&str, &Tensor)) -> (Part, DataConfig) {
    let content = Content {
        meta: PredictionMeta { missing: true, ..content(Storage::default()).meta },
        ..content(Storage::default())
    };
    let mut file = writer(None, path).unwrap().create(path, &content).unwrap();
    for (name, channels) in [("h", 1), ("wind", 2)] {
        let values = values(channels);
        hide(name, &values);
        for sample in 0..SAMPLES {
            file.write(name, sample, 0, &values.get(sample as i64)).unwrap();
        }
    }
    file.finish().unwrap();
    let fields = ["h", "wind"];
    let table = serde_json::json!({ "path": path, "format": "netcdf", "fields": fields, "missing": "mask", "validation_samples": 0 });
    let config: DataConfig = serde_json::from_value(table).unwrap();
    (config.train_part().unwrap(), config)
}

/// Values that are missing have no part in statistics.
#[test]
fn statistics_leave_out_missing_values() {
    let folder = tempfile::tempdir().unwrap();
    let (part, _) = with_gaps(&folder.path().join("gaps.nc"), |_, values| {
        let _ = values.narrow(4, 1, 3).fill_(f64::NAN);
    });
    let found = summarize(&*part.data, &["h"], part.samples, |_, _| ()).unwrap();
    let there = values(1).narrow(4, 0, 1).contiguous();
    let own = found[0].values.unwrap();
    assert_eq!(own.count, there.numel() as u64);
    assert_eq!((own.min, own.max), (there.min().double_value(&[]), there.max().double_value(&[])));
    assert!(own.mean.is_finite() && own.std.is_finite());
    assert!((found[0].changes.as_ref().unwrap().mean - 10.0).abs() < 1e-12);
}

/// A channel without any value has no statistics, and one without any in a portion has those of the others.
#[test]
fn without_a_value_there_are_no_statistics() {
    let folder = tempfile::tempdir().unwrap();
    let (part, config) = with_gaps(&folder.path().join("gaps.nc"), |name, values| {
        // The height of the second sample, and a component of the wind.
        let hidden = if name == "h" { values.get(1) } else { values.select(2, 1) };
        let _ = { hidden }.fill_(f64::NAN);
    });
    let names = ["h", "wind"];
    let found = summarize(&*part.data, &names, part.samples.clone(), |_, _| ()).unwrap();
    let told = serde_json::to_value(&found).unwrap();
    assert!(told[0]["values"]["mean"].is_number() && told[1]["changes"]["mean"].is_number(), "{told}");
    assert!(told[2]["values"].is_null() && told[2]["changes"].is_null(), "{told}");
    assert_eq!(serde_json::from_value::<Vec<Summary>>(told).unwrap(), found);
    for data in [&part.data, &config.parts().unwrap().train.data] {
        let portions = [0..1, 1..2].map(|samples| data.statistics(&names, samples).unwrap());
        let there = portions.each_ref().map(|own| [0, 1, 2].map(|channel| own[channel].is_some()));
        assert_eq!(there, [[true, true, false], [false, true, false]]);
        let merged = merge_channels(&portions).unwrap();
        assert_eq!((merged[0], merged[2]), (portions[0][0], None));
        assert_eq!(merged[1].unwrap().count, 2 * portions[0][1].unwrap().count);
        assert_eq!(data.statistics(&names, 0..2).unwrap()[0], portions[0][0]);
        let changes = [0..1, 1..2].map(|samples| data.change_statistics(&names, samples).unwrap());
        assert!(changes[0][0].is_some() && changes[1][0].is_none());
    }
}

/// Frames of 84 MB, whose values are their place along the first dim and grow by 1 a frame.
#[derive(Debug)]
struct LargeFrames {
    dims: Vec<Dim>,
    variables: Vec<DataVariable>,
    /// Most values that one read returned, and all together.
    read: [AtomicUsize; 2],
}

impl Dataset for LargeFrames {
    fn path(&self) -> &Path {
        Path::new("large")
    }

    fn samples(&self) -> usize {
        1
    }

    fn dims(&self) -> &[Dim] {
        &self.dims
    }

    fn times(&self) -> Option<&[f64]> {
        Some(&[0.0, 1.0])
    }

    fn variables(&self) -> &[DataVariable] {
        &self.variables
    }

    fn read(&self, window: &Window, samples: &[usize], _variables: &[&str]) -> Result<Tensor> {
        check_window(self, window, samples)?;
        let [frames, x, y] = [&window.frames, &window.points[0], &window.points[1]];
        let range = |of: &Range<usize>| {
            Tensor::arange_start(of.start as i64, of.end as i64, (Kind::Float, Device::Cpu))
        };
        let values = range(frames).view([1, -1, 1, 1, 1]) + range(x).view([-1, 1]);
        let shape = [1, frames.len(), 1, x.len(), y.len()].map(|extent| extent as i64);
        let values = values.expand(shape, false).contiguous();
        let _ = self.read[0].fetch_max(values.numel(), Ordering::Relaxed);
        let _ = self.read[1].fetch_add(values.numel(), Ordering::Relaxed);
        Ok(values)
    }
}

#[test]
fn no_rank_holds_a_large_frame_for_statistics() {
    let extents = [20, 1 << 20];
    let dim = |extent: usize| Dim {
        name: format!("of {extent}"),
        unit: None,
        coordinates: (0..extent).map(|at| at as f64).collect(),
        periodic: false,
    };
    let data = LargeFrames {
        dims: extents.map(dim).to_vec(),
        variables: vec![DataVariable::scalar("a")],
        read: Default::default(),
    };
    let [points, rows] = [extents[0] * extents[1], (64 << 20) / 4];
    let found = data.statistics(&["a"], 0..1).unwrap()[0].unwrap();
    assert_eq!((found.count, found.mean, found.min, found.max), (2 * points as u64, 10.0, 0.0, 20.0));
    assert_eq!(data.read.each_ref().map(|read| read.swap(0, Ordering::Relaxed)), [rows, 2 * points]);
    let found = data.change_statistics(&["a"], 0..1).unwrap()[0].unwrap();
    assert_eq!((found.count, found.mean, found.std), (points as u64, 1.0, 0.0));
    // A change takes two frames.
    assert!(data.read[0].load(Ordering::Relaxed) <= 2 * rows);
}
