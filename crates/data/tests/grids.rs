//! Inputs and targets of two data sets, on two grids.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Arc;

use isobar_data::{
    Content, DataConfig, DataVariable, Dim, Error, HostMemory, InMemory, Parts, PredictionMeta, Reader,
    ReaderOptions, Request, Samples, Storage, StreamOptions, Streamed, TargetWindow, TimeUnit, Window,
    writer,
};
use rstest::rstest;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::{TempDir, tempdir};

/// A file of two trajectories, or samples if there are no times.
struct Series<'a> {
    variable: &'a str,
    extents: &'a [usize],
    samples: usize,
    times: &'a [f64],
    unit: &'a str,
}

const COARSE: Series<'_> = Series {
    variable: "coarse",
    extents: &[2, 3],
    samples: 2,
    times: &[0.0, 6.0, 12.0, 18.0],
    unit: "hours since 2000-01-01",
};
const FINE: Series<'_> = Series { variable: "fine", extents: &[4, 6], ..COARSE };

impl Series<'_> {
    fn write(&self, path: &Path) {
        let dim = |(name, &extent): (&str, &usize)| Dim {
            name: name.to_owned(),
            unit: None,
            coordinates: (0..extent).map(|at| at as f64 / extent as f64).collect(),
            periodic: false,
        };
        let variables = vec![DataVariable::scalar(self.variable)];
        let content = Content {
            meta: PredictionMeta {
                name: "series".to_owned(),
                variables: vec![self.variable.to_owned()],
                samples: self.samples,
                times: self.times.to_vec(),
                sample_times: Vec::new(),
                sample_numbers: Vec::new(),
                attributes: Vec::new(),
                missing: false,
                left_out: Vec::new(),
            },
            time_unit: (!self.times.is_empty())
                .then(|| TimeUnit { unit: self.unit.to_owned(), calendar: None }),
            dims: ["x", "y", "z"].into_iter().zip(self.extents).map(dim).collect(),
            variables,
            parameters: Vec::new(),
            storage: Storage::default(),
        };
        let mut file = writer(Some("netcdf"), path).unwrap().create(path, &content).unwrap();
        for sample in 0..self.samples {
            for frame in 0..self.times.len().max(1) {
                file.write(self.variable, sample, frame, &self.values(sample, frame)).unwrap();
            }
        }
        file.finish().unwrap();
    }

    /// A frame, `[1, 1, spatial…]`.
    fn values(&self, sample: usize, frame: usize) -> Tensor {
        let points = self.extents.iter().product::<usize>() as i64;
        let shape: Vec<i64> = [1, 1].into_iter().chain(self.extents.iter().map(|&at| at as i64)).collect();
        let line = Tensor::arange(points, (Kind::Float, Device::Cpu)) + (100 * sample + 1000 * frame) as f64;
        line.view(&shape[..])
    }
}

fn config(folder: &Path, own: Value) -> Result<DataConfig, Error> {
    let mut config = json!({
        "path": folder.join("coarse.nc"), "format": "netcdf", "inputs": ["coarse"], "targets": ["fine"],
        "validation_samples": 2, "target": { "path": folder.join("fine.nc") },
    });
    config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    serde_json::from_value(config).map_err(|error| Error::Config(error.to_string()))
}

fn written(coarse: &Series<'_>, fine: &Series<'_>) -> TempDir {
    let folder = tempdir().unwrap();
    coarse.write(&folder.path().join("coarse.nc"));
    fine.write(&folder.path().join("fine.nc"));
    folder
}

fn parts(folder: &TempDir, own: Value) -> Result<Parts, Error> {
    config(folder.path(), own)?.parts()
}

fn extents(data: &dyn isobar_data::Dataset) -> Vec<usize> {
    data.dims().iter().map(|dim| dim.coordinates.len()).collect()
}

/// Frames of the same time are a sample, whatever the unit of the times.
#[test]
fn frames_of_the_same_time_are_pairs() {
    let other = Series { times: &[-24.0, -18.0, -12.0, -6.0], unit: "hours since 2000-01-02", ..FINE };
    for fine in [FINE, other] {
        let folder = written(&COARSE, &fine);
        let Parts { train, validation, .. } = parts(&folder, json!({})).unwrap();
        assert_eq!((train.samples.clone(), validation.samples), (0..6, 6..8));
        assert_eq!((extents(&*train.data), extents(&**train.targets())), (vec![2, 3], vec![4, 6]));
        assert!(train.data.times().is_none() && train.targets().times().is_none());
        // In any order, by windows.
        let read = train.targets().read(&Window::still(&[1..3, 0..6]), &[5, 0, 1], &["fine"]).unwrap();
        let frame = |sample, frame| fine.values(sample, frame).narrow(2, 1, 2).unsqueeze(0);
        assert_eq!(read, Tensor::cat(&[frame(1, 1), frame(0, 0), frame(0, 1)], 0));
        assert_eq!(
            train.data.read(&Window::still(&[0..1, 1..3]), &[], &["coarse"]).unwrap().size(),
            [0, 1, 1, 1, 2]
        );
        assert!(train.data.read(&Window::still(&[0..1, 1..3]), &[8], &["coarse"]).is_err());
    }
}

#[test]
fn times_select_frames_of_both() {
    let folder = written(&COARSE, &FINE);
    let own = json!({ "train_times": [0, 6], "validation_times": [12, 12], "test_times": [18, 18] });
    let Parts { train, validation, test, .. } = parts(&folder, own).unwrap();
    let test = test.unwrap();
    assert_eq!((train.samples.len(), validation.samples.len(), test.samples.len()), (4, 2, 2));
    let read = test.targets().read(&Window::still(&[0..4, 0..6]), &[1], &["fine"]).unwrap();
    assert_eq!(read, FINE.values(1, 3).unsqueeze(0));
}

/// Variables of one file on two grids.
#[test]
fn one_file_may_have_two_grids() {
    let folder = tempdir().unwrap();
    let array = |name: &str, shape: &str, count: u8| {
        let header = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({shape}), }}");
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.bytes());
        bytes.extend(0..count);
        std::fs::write(folder.path().join(name), bytes).unwrap();
    };
    array("coarse.npy", "5, 2", 10);
    array("fine.npy", "5, 4", 20);
    let own = json!({
        "path": folder.path(), "format": "npy", "npy": { "axes": ["sample", "x"] }, "target": {},
    });
    let Parts { train, validation, .. } = parts(&folder, own).unwrap();
    assert_eq!((train.samples.clone(), validation.samples), (0..3, 3..5));
    assert_eq!((extents(&*train.data), extents(&**train.targets())), (vec![2], vec![4]));
}

/// The windows of a rank, streamed as in memory; nothing else is read.
#[rstest]
fn streamed_pairs_are_those_in_memory(#[values(0, 2)] workers: usize, #[values(false, true)] keep: bool) {
    let folder = written(&COARSE, &FINE);
    let part = parts(&folder, json!({})).unwrap().train;
    let (from, to) = ([1..2, 0..3], [2..4, 0..6]);
    let all: Vec<usize> = part.samples.clone().collect();
    let inputs = part.data.read(&Window::still(&from), &all, &["coarse"]).unwrap().select(1, 0);
    let targets = part.targets().read(&Window::still(&to), &all, &["fine"]).unwrap().select(1, 0);
    let memory = InMemory::pairs(inputs, targets).unwrap();
    let host_memory = HostMemory::new(1 << 20);
    let reader = Arc::new(Reader::new(ReaderOptions { host_memory, workers, keep }).unwrap());
    let targets_from = Some(TargetWindow { data: part.targets().clone(), points: to.to_vec() });
    let options = StreamOptions { targets_from, ..StreamOptions::new(&from, &["coarse"], &["fine"]) };
    let streamed = Streamed::new(&reader, (part.data.clone(), part.samples.clone()), &options).unwrap();
    let requests = [vec![5, 1, 3], vec![0], vec![], vec![2, 4]];
    let requests = requests.map(|samples| Request { samples, steps: 1 });
    streamed.announce(requests.to_vec());
    for request in &requests {
        let (got, want) = (streamed.take(request).unwrap(), memory.take(request).unwrap());
        assert_eq!((got.input, &got.targets), (want.input, &want.targets));
    }
    assert_eq!(reader.account().read, 6 * (3 + 12) * 4);
    assert!(streamed.mean_target().unwrap().allclose(&memory.mean_target().unwrap(), 1e-6, 0.0, false));
    let error = Streamed::new(
        &reader,
        (part.targets().clone(), 0..2),
        &StreamOptions {
            targets_from: Some(TargetWindow {
                data: config(folder.path(), json!({})).unwrap().open().unwrap().into(),
                points: from.to_vec(),
            }),
            ..StreamOptions::new(&to, &["fine"], &["coarse"])
        },
    );
    assert!(error.unwrap_err().to_string().contains("need samples without time, as many as the inputs"));
}

#[rstest]
#[case::samples(Series { samples: 3, ..FINE }, "the inputs of", "coarse.nc have 2, and the targets of")]
#[case::times(Series { times: &[0.0, 6.0, 12.0], ..FINE }, "different times", "have 4 times, and the targets of")]
#[case::other_times(Series { times: &[0.0, 6.0, 12.0, 19.0], ..FINE }, "2000-01-01 18:00", "at index 3")]
#[case::none(Series { times: &[], ..FINE }, "have 4 times", "fine.nc none")]
#[case::dims(Series { extents: &[4, 6, 2], ..FINE }, "have 2 (x, y)", "fine.nc 3 (x, y, z)")]
fn targets_of_other_samples_are_refused(
    #[case] fine: Series<'_>,
    #[case] words: &str,
    #[case] further: &str,
) {
    let folder = written(&COARSE, &fine);
    let error = parts(&folder, json!({})).unwrap_err().to_string();
    assert!(error.contains(words) && error.contains(further), "{error}");
    assert!(error.contains("data.target.path"), "{error}");
}

#[test]
fn a_single_time_is_compared() {
    let folder = written(&Series { times: &[0.0], ..COARSE }, &Series { times: &[0.5], ..FINE });
    let error = parts(&folder, json!({})).unwrap_err().to_string();
    assert!(error.contains("different times") && error.contains("at index 0"), "{error}");
}

#[rstest]
#[case(json!({ "fields": ["coarse"] }), "--set 'data.fields=[]'")]
#[case(json!({ "history": 2 }), "--set data.history=1")]
#[case(json!({ "predict": "change" }), "--set data.predict=frame")]
#[case(json!({ "train_steps": 2 }), "--set data.train_steps=1")]
#[case(json!({ "validation_steps": 2 }), "--set data.validation_steps=1")]
#[case(json!({ "forcings": ["time_of_day"] }), "--set 'data.forcings=[]'")]
#[case(json!({ "diagnostics": ["fine"] }), "--set 'data.diagnostics=[]'")]
#[case(json!({ "targets": ["coarse"] }), "coarse")]
#[case(json!({ "validation_path": "coarse.nc" }), "--set data.target.validation_path=FILE")]
#[case(json!({ "target": { "paht": "fine.nc" } }), "`paht` is neither a key of [data] nor a data format")]
fn keys_that_do_not_fit_are_refused(#[case] mut own: Value, #[case] words: &str) {
    let folder = written(&COARSE, &FINE);
    if let Some(path) = own.get_mut("validation_path") {
        *path = json!(folder.path().join("coarse.nc"));
    }
    let error = parts(&folder, own).unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
}
