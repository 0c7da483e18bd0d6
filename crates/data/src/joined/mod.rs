//! Several files as one data set: one after the other along times or samples, whatever their format.
//!
//! It opens files by the registry, and depends on no format.

mod formats;
mod handles;
mod order;
mod paths;

use std::ops::Range;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use self::handles::{File, Handles};
use self::order::Order;
use crate::adapt::meta_for;
use crate::attributes::TextAttributes;
use crate::calendar::{TimeAxis, TimeUnit};
use crate::content::Content;
use crate::dataset::{Dataset, Window, cat, check_window, choose};
use crate::dataset_writer::DatasetWriter;
use crate::gaps::missing_frames;
use crate::grid::{DataVariable, Dim, PredictionMeta};
use crate::{Error, Result};

pub(crate) use self::handles::Opener;
pub use self::paths::DataPath;

/// The axis along which files follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Join {
    /// Times: each file holds other frames of the same trajectories.
    Time,
    /// Samples: each file holds other samples or trajectories.
    Sample,
}

/// Files of one format as one data set.
///
/// All are opened once, to compare their metadata; afterwards a file is opened when it is read, and a bounded number stays open.
#[derive(Debug)]
pub(crate) struct Joined {
    /// For messages: a pattern, a folder, or the first of a list.
    path: PathBuf,
    name: String,
    handles: Handles,
    along: Join,
    /// The first sample or frame of each file, and the number of all.
    starts: Vec<usize>,
    samples: usize,
    times: Option<Vec<f64>>,
    sample_times: Option<Vec<f64>>,
    /// Times of the stored trajectories of a file, if they are cut: of one where frames are missing, or else of the first.
    uncut_times: Option<Vec<f64>>,
    time_unit: Option<TimeUnit>,
    dims: Vec<Dim>,
    variables: Vec<DataVariable>,
    default_pair: Option<[String; 2]>,
    /// Names of parameters that files have different numbers of, which no file of predictions repeats.
    differing: Vec<String>,
    /// Those that all files have with one value.
    parameters: Vec<(String, f64)>,
    attributes: TextAttributes,
    left_out: Vec<String>,
}

impl Joined {
    /// Opens all files once and puts them in order. `path` is what errors about all of them name.
    ///
    /// # Errors
    /// Those of the format; files of other dims, variables or units; gaps and overlaps of times, and trajectories of other times.
    pub(crate) fn open(
        path: PathBuf,
        files: Vec<PathBuf>,
        opener: Opener,
        (along, most): (Option<Join>, usize),
    ) -> Result<Self> {
        let mut order = Order::default();
        let mut first: Option<Box<dyn Dataset>> = None;
        let mut found = Vec::with_capacity(files.len());
        let mut parameters: Vec<Vec<(String, f64)>> = Vec::with_capacity(files.len());
        let mut with_gap: Option<Vec<f64>> = None;
        let mut sample_times = Some(Vec::<f64>::new());
        for file in files {
            let data = opener.open(&file)?;
            let known = first.as_deref().unwrap_or(&*data);
            crate::compatible::check(known, &*data, "data.path")?;
            order.add(known, &*data)?;
            found.push(File::of(file, &*data));
            parameters.push(data.parameters());
            // Files with such times have no frames, by which files would be sorted.
            sample_times = match (sample_times, sample_times_in(&*data, known.time_unit())) {
                (Some(mut all), Some(own)) => {
                    all.extend(own);
                    Some(all)
                }
                _ => None,
            };
            if with_gap.is_none() && data.uncut_times().is_some() && missing_frames(&*data).is_some() {
                with_gap = data.uncut_times().map(<[f64]>::to_vec);
            }
            first.get_or_insert(data);
        }
        let Some(first) = first else {
            return Err(Error::Invalid("there is no file to join".to_owned()));
        };
        let differing = differing(&parameters);
        let mut alike = parameters.swap_remove(0);
        alike.retain(|(name, _)| !differing.contains(name));
        let (along, places, times) = order.finish(along, &found)?;
        let mut starts = vec![0];
        let mut sorted: Vec<Option<File>> = found.into_iter().map(Some).collect();
        let sorted: Vec<File> = places.iter().filter_map(|&place| sorted.get_mut(place)?.take()).collect();
        for file in &sorted {
            let count = if along == Join::Time { file.frames.unwrap_or(1) } else { file.samples };
            starts.push(starts[starts.len() - 1] + count);
        }
        let mut variables = first.variables().to_vec();
        if along == Join::Sample && sorted.len() > 1 {
            // Fields without samples in a file are those of its samples.
            variables.iter_mut().for_each(|variable| variable.is_static = false);
        }
        let samples = if along == Join::Time { first.samples() } else { starts[starts.len() - 1] };
        Ok(Self {
            path,
            name: first.name(),
            handles: Handles::new(opener, sorted, most),
            along,
            starts,
            samples,
            times,
            sample_times,
            // Of files along time, `times` are those of all.
            uncut_times: match along {
                Join::Sample => with_gap.or_else(|| first.uncut_times().map(<[f64]>::to_vec)),
                Join::Time => None,
            },
            time_unit: first.time_unit().cloned(),
            dims: first.dims().to_vec(),
            variables,
            parameters: alike,
            differing,
            attributes: first.attributes(),
            left_out: first.left_out().to_vec(),
            default_pair: first.default_pair().map(|pair| pair.map(str::to_owned)),
        })
    }

    /// The file that has a sample or frame.
    fn file_of(&self, at: usize) -> usize {
        self.starts.partition_point(|start| *start <= at) - 1
    }

    /// Reads samples of several files: those of each file at once, in ascending order.
    fn read_samples(&self, window: &Window, samples: &[usize], variables: &[&str]) -> Result<Tensor> {
        let mut sorted: Vec<(usize, usize)> =
            samples.iter().enumerate().map(|(row, &sample)| (sample, row)).collect();
        sorted.sort_unstable();
        let mut parts = Vec::new();
        for of_file in sorted.chunk_by(|(one, _), (other, _)| self.file_of(*one) == self.file_of(*other)) {
            let file = self.file_of(of_file[0].0);
            let own: Vec<usize> = of_file.iter().map(|(sample, _)| sample - self.starts[file]).collect();
            parts.push(self.handles.get(file)?.read(window, &own, variables)?);
        }
        let all = cat(parts, 0)?;
        if sorted.iter().enumerate().all(|(at, (_, row))| at == *row) {
            return Ok(all);
        }
        let mut rows = vec![0_i64; samples.len()];
        sorted.iter().enumerate().for_each(|(at, (_, row))| rows[*row] = at as i64);
        Ok(all.f_index_select(0, &Tensor::f_from_slice(&rows)?)?)
    }

    /// Reads frames of several files.
    fn read_frames(&self, window: &Window, samples: &[usize], variables: &[&str]) -> Result<Tensor> {
        let Range { start, end } = window.frames;
        let mut parts = Vec::new();
        for file in self.file_of(start)..=self.file_of(end - 1) {
            let (first, last) = (self.starts[file], self.starts[file + 1]);
            let frames = start.max(first) - first..end.min(last) - first;
            let own = Window { frames, points: window.points.clone() };
            parts.push(self.handles.get(file)?.read(&own, samples, variables)?);
        }
        cat(parts, 1)
    }
}

impl Dataset for Joined {
    fn path(&self) -> &Path {
        &self.path
    }

    fn files(&self) -> Vec<PathBuf> {
        self.handles.paths().map(Path::to_owned).collect()
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    fn samples(&self) -> usize {
        self.samples
    }

    fn file_starts(&self) -> Vec<(usize, usize)> {
        let starts = self.starts[..self.starts.len() - 1].iter();
        starts.map(|&start| if self.along == Join::Time { (0, start) } else { (start, 0) }).collect()
    }

    fn dims(&self) -> &[Dim] {
        &self.dims
    }

    fn times(&self) -> Option<&[f64]> {
        self.times.as_deref()
    }

    fn uncut_times(&self) -> Option<&[f64]> {
        self.uncut_times.as_deref()
    }

    fn sample_times(&self) -> Option<Vec<f64>> {
        self.sample_times.clone()
    }

    fn time_unit(&self) -> Option<&TimeUnit> {
        self.time_unit.as_ref()
    }

    fn chunk(&self, variable: &str) -> Option<Vec<usize>> {
        self.handles.get(0).ok()?.chunk(variable)
    }

    fn attributes(&self) -> TextAttributes {
        self.attributes.clone()
    }

    /// Those that all files have alike.
    fn parameters(&self) -> Vec<(String, f64)> {
        self.parameters.clone()
    }

    fn variables(&self) -> &[DataVariable] {
        &self.variables
    }

    fn left_out(&self) -> &[String] {
        &self.left_out
    }

    fn default_pair(&self) -> Option<[&str; 2]> {
        self.default_pair.as_ref().map(|[from, to]| [from.as_str(), to.as_str()])
    }

    fn read(&self, window: &Window, samples: &[usize], variables: &[&str]) -> Result<Tensor> {
        let channels: usize = choose(self, variables)?.iter().map(|variable| variable.channels.len()).sum();
        check_window(self, window, samples)?;
        let shape: Vec<usize> = [samples.len(), window.frames.len(), channels]
            .into_iter()
            .chain(window.points.iter().map(Range::len))
            .collect();
        if shape.contains(&0) {
            let shape: Vec<i64> = shape.into_iter().map(|extent| extent as i64).collect();
            return Ok(Tensor::f_zeros(shape, (Kind::Float, Device::Cpu))?);
        }
        match self.along {
            Join::Sample => self.read_samples(window, samples, variables),
            Join::Time => self.read_frames(window, samples, variables),
        }
    }

    fn create(&self, path: &Path, meta: &PredictionMeta) -> Result<Box<dyn DatasetWriter>> {
        let first = self.handles.get(0)?;
        let mut meta = meta_for(&*first, self.time_unit.as_ref(), meta)?;
        meta.left_out.extend_from_slice(&self.differing);
        first.create(path, &meta)
    }

    fn content(&self, meta: &PredictionMeta) -> Result<Content> {
        let mut content = self.handles.get(0)?.content(meta)?;
        content.parameters.retain(|(name, _)| !self.differing.contains(name));
        Ok(Content { time_unit: self.time_unit.clone(), ..content })
    }
}

/// Returns the times of a file's samples in `unit`; `None` without times, or, with a warning, if they cannot be converted.
fn sample_times_in(data: &dyn Dataset, unit: Option<&TimeUnit>) -> Option<Vec<f64>> {
    let times = data.sample_times()?;
    let converted = || {
        if data.time_unit() == unit {
            return Some(times);
        }
        let (from, to) = (TimeAxis::new(data.time_unit()?).ok()?, TimeAxis::new(unit?).ok()?);
        times.into_iter().map(|time| from.convert(time, &to)).collect()
    };
    let converted = converted();
    if converted.is_none() {
        tracing::warn!(
            "the times of samples are not used: {} has them in another unit than the first file",
            data.path().display()
        );
    }
    converted
}

/// Names of parameters that not all files have, or not with one value.
fn differing(files: &[Vec<(String, f64)>]) -> Vec<String> {
    let mut names: Vec<&String> = files.iter().flatten().map(|(name, _)| name).collect();
    names.sort();
    names.dedup();
    let value = |file: &[(String, f64)], name: &String| {
        file.iter().find(|(own, _)| own == name).map(|(_, value)| *value)
    };
    let differs =
        |name: &&String| files.windows(2).any(|pair| value(&pair[0], name) != value(&pair[1], name));
    names.into_iter().filter(differs).cloned().collect()
}

/// The data set of some files: one, or several joined.
pub(crate) fn open(path: &DataPath, opener: Opener, how: (Option<Join>, usize)) -> Result<Box<dyn Dataset>> {
    let files = path.files(&opener.format)?;
    match &files[..] {
        [file] => opener.open(file),
        _ => Ok(Box::new(Joined::open(path.to_string().into(), files, opener, how)?)),
    }
}

#[cfg(test)]
mod tests {
    use tempfile::tempdir;

    use super::*;
    use crate::registry::find;

    /// Writes an array of NumPy of one axis of samples and one of points.
    fn array(path: &Path, samples: u8) {
        let header = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({samples}, 2), }}");
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.bytes());
        bytes.extend(0..2 * samples);
        std::fs::write(path, bytes).unwrap();
    }

    #[test]
    fn few_files_are_open_and_changed_ones_are_refused() {
        let folder = tempdir().unwrap();
        let files: Vec<PathBuf> = (0..5).map(|at| folder.path().join(format!("{at}.npy"))).collect();
        files.iter().for_each(|file| array(file, 2));
        let table = serde_json::json!({ "axes": ["sample", "x"], "variables": { "u": "0" } });
        let opener = |table: serde_json::Value| Opener {
            format: find("npy").unwrap(),
            table: Some(table),
            variables: vec!["u".to_owned()],
            levels: Vec::new(),
            needs_time: false,
            keeps_missing: false,
            takes_all: false,
        };
        // Each file names its array as itself.
        let error = Joined::open("all".into(), files.clone(), opener(table), (None, 2)).unwrap_err();
        assert!(error.to_string().contains("1.npy"), "{error}");
        let same: Vec<PathBuf> = (0..5)
            .map(|at| {
                let own = folder.path().join(at.to_string());
                std::fs::create_dir(&own).unwrap();
                array(&own.join("u.npy"), 2);
                own
            })
            .collect();
        let table = serde_json::json!({ "axes": ["sample", "x"] });
        let joined = Joined::open("all".into(), same.clone(), opener(table), (None, 2)).unwrap();
        assert_eq!((joined.samples(), joined.handles.open_files()), (10, 0));
        let window = Window::still(std::slice::from_ref(&(0..2)));
        let all: Vec<usize> = (0..10).rev().collect();
        let values = joined.read(&window, &all, &["u"]).unwrap().flatten(0, -1);
        assert_eq!(Vec::<f32>::try_from(values).unwrap(), [2.0, 3.0, 0.0, 1.0].repeat(5));
        assert_eq!(joined.handles.open_files(), 2);
        array(&same[0].join("u.npy"), 3);
        let error = joined.read(&window, &[0], &["u"]).unwrap_err().to_string();
        assert!(error.contains("of 3 samples") && error.contains("it was changed"), "{error}");
    }
}
