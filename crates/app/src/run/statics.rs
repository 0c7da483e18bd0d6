//! Fields that are the same at all times: input channels behind the others.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, bail};
use isobar_data::{Computed, Frames, Normalizer, Part, Window};
use tch::{Kind, Tensor};

use super::roles::as_str;
use super::source::Source;
use isobar_command::exit::{Because, Exit};

/// Static fields of a window.
#[derive(Debug, Default)]
pub(crate) struct Statics {
    /// Fields of the data in physical units, `[channel, spatial…]`.
    stored: Option<Tensor>,
    /// Computed ones, which need no normalisation.
    computed: Option<Tensor>,
    /// Number that replaces missing values after normalisation.
    fill: f64,
}

impl Statics {
    /// Reads this rank's window; missing values, if there may be some, become `fill` after normalisation.
    pub(crate) fn read(source: &Source, window: &[Range<usize>], fill: f64) -> Result<Self> {
        let (part, names) = (source.parts.stored(), &source.names);
        let stored = match names.statics.is_empty() {
            true => None,
            false => Some(constant(part, &names.statics, window)?),
        };
        let computed = match names.places.is_empty() {
            true => None,
            false => Some(Computed::new(&names.places, &*part.data, window)?.at(&[0.0])?.f_select(0, 0)?),
        };
        Ok(Self { stored, computed, fill })
    }

    /// Normalisation of the stored fields, over all points.
    pub(crate) fn normalizer(source: &Source) -> Result<Option<Normalizer>> {
        let names = &source.names.statics;
        if names.is_empty() {
            return Ok(None);
        }
        let stored = &source.parts.stored().data;
        let data = match source.has_steps() {
            true => Arc::new(Frames::range_of(Arc::clone(stored), 0..1)?),
            false => Arc::clone(stored),
        };
        let of = |name: &str| -> Result<_> {
            let path = || source.parts.train.data.path().display();
            let statistics = data.statistics(&[name], 0..1)?.into_iter().collect::<Option<Vec<_>>>();
            let Some(statistics) = statistics else {
                bail!(Exit::Data.because(format!(
                    "data.statics names {name:?}, which has no value at any point of {}; leave it out",
                    path()
                )));
            };
            if statistics.iter().any(|own| own.min == own.max) {
                bail!(Exit::Usage.because(format!(
                    "data.statics names {name:?}, which is the same at all points of {}: it tells a network nothing; leave it out",
                    path()
                )));
            }
            Ok(statistics)
        };
        let all = as_str(names).into_iter().map(of).collect::<Result<Vec<_>>>()?;
        Ok(Some(Normalizer::of_channels(&all.concat())?))
    }

    /// Appends the fields, normalised, to the positions: `[channel, spatial…]` in the dtype and on the device of `options`.
    pub(crate) fn behind(
        &self,
        positions: Option<Tensor>,
        normalizer: Option<&Normalizer>,
        (kind, device): (Kind, tch::Device),
    ) -> Result<Option<Tensor>> {
        let mut all: Vec<Tensor> = positions.into_iter().collect();
        if let (Some(stored), Some(normalizer)) = (&self.stored, normalizer) {
            let fields = normalizer.encode(&stored.f_unsqueeze(0)?)?.f_squeeze_dim(0)?;
            let fields = fields.f_masked_fill(&fields.f_isnan()?, self.fill)?;
            all.push(fields.f_to_device(device)?.f_to_kind(kind)?);
        }
        if let Some(computed) = &self.computed {
            all.push(computed.f_to_device(device)?.f_to_kind(kind)?);
        }
        Ok(match all.len() {
            0 => None,
            _ => Some(Tensor::f_cat(&all, 0)?),
        })
    }
}

/// Fields of a window in double precision, `[channel, spatial…]`; an error if the first frame of another file, or the last frame of the
/// last sample, has others than the first frame of the first sample.
fn constant(part: &Part, names: &[String], window: &[Range<usize>]) -> Result<Tensor> {
    let last = part.data.times().map_or(0, |times| times.len().saturating_sub(1));
    let read = |name: &str, sample: usize, frame: usize| -> Result<Tensor> {
        let window = Window { frames: frame..frame + 1, points: window.to_vec() };
        let values = part.data.read(&window, &[sample], &[name])?;
        Ok(values.f_flatten(0, 1)?.f_select(0, 0)?.f_to_kind(Kind::Double)?)
    };
    let mut all = Vec::new();
    for name in as_str(names) {
        let first = read(name, 0, 0)?;
        let ends = [(part.data.samples().saturating_sub(1), last)];
        let mut others = part.data.file_starts().into_iter().skip(1).chain(ends);
        let is_other = |(sample, frame): (usize, usize)| -> Result<bool> {
            Ok(!read(name, sample, frame)?.f_allclose(&first, 0.0, 0.0, true)?)
        };
        if others.try_fold(false, |found, place| anyhow::Ok(found || is_other(place)?))? {
            let other = if part.data.times().is_some() { "data.forcings" } else { "data.inputs" };
            bail!(Exit::Usage.because(format!(
                "data.statics names {name:?}, which is not the same in all samples and at all times of {}; name it in {other}",
                part.data.path().display()
            )));
        }
        all.push(first);
    }
    Ok(Tensor::f_cat(&all, 0)?)
}

#[cfg(test)]
pub(super) mod tests {
    use std::path::Path;
    use std::time::Duration;

    use isobar_collectives::{Group, threads};
    use isobar_data::{DataConfig, Request, area_weights};
    use isobar_manager::config::CheckChoice;
    use isobar_train::{FieldLayout, ShardedFields, Signals};
    use rstest::rstest;
    use serde_json::{Value, json};
    use tch::Device;
    use tempfile::{TempDir, tempdir};

    use super::*;
    use crate::run::{Fields, Place};

    /// Writes an array of NumPy, whose value at index `[i, j, …]` is `value` of its place in the array.
    fn array(folder: &Path, name: &str, shape: &[usize], value: impl Fn(usize) -> f32) {
        let extents: String = shape.iter().map(|extent| format!("{extent},")).collect();
        let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({extents}), }}");
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.bytes());
        let count = shape.iter().product();
        bytes.extend((0..count).flat_map(|at| value(at).to_le_bytes()));
        std::fs::write(folder.join(format!("{name}.npy")), bytes).unwrap();
    }

    /// Two trajectories of 6 frames, 5 by 4 points.
    pub(in crate::run) fn folder() -> TempDir {
        let folder = tempdir().unwrap();
        for (name, by) in [("u", 0.3_f32), ("v", 0.7), ("rain", 1.1), ("wind", 1.3)] {
            array(folder.path(), name, &[2, 6, 5, 4], |at| (by * at as f32).sin());
        }
        array(folder.path(), "mask", &[5, 4], |at| at as f32);
        array(folder.path(), "flat", &[5, 4], |_| 1.0);
        array(folder.path(), "rows", &[5], |at| 80.0 - 20.0 * at as f32);
        array(folder.path(), "columns", &[4], |at| 90.0 * at as f32);
        folder
    }

    pub(in crate::run) fn config(folder: &TempDir, own: Value) -> DataConfig {
        let still = |name: &str| json!({ "path": name, "axes": ["lat", "lon"] });
        let mut config = json!({
            "path": folder.path(), "format": "npy", "fields": ["u", "v"], "validation_samples": 1,
            "npy": {
                "axes": ["sample", "time", "lat", "lon"],
                "variables": { "mask": still("mask"), "flat": still("flat") },
                "coordinates": { "lat": "rows", "lon": "columns" },
            },
        });
        config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        serde_json::from_value(config).unwrap()
    }

    fn all_roles() -> Value {
        json!({
            "diagnostics": ["rain"], "forcings": ["wind", "latitude"], "statics": ["mask", "longitude"], "history": 3,
            "validation_steps": 2, "predict": "change",
        })
    }

    /// Missing values of static fields and forcings are the same number after normalisation. Forcings have it from the scales on
    /// which ranks agree, before any rank meets a gap.
    #[test]
    fn missing_values_are_the_same_number_after_normalisation() {
        let folder = folder();
        let missing = |at: usize, value: f32| if at % 7 == 3 { f32::NAN } else { value };
        array(folder.path(), "mask", &[5, 4], |at| missing(at, at as f32));
        array(folder.path(), "wind", &[2, 6, 5, 4], |at| missing(at, (1.3 * at as f32).sin()));
        let own = json!({ "forcings": ["wind"], "statics": ["mask"], "missing": "fill", "fill": -2.5 });
        let config = config(&folder, own);
        let source = Source::open(&config, None).unwrap();
        let window = [1..5, 0..4];
        let options = (Kind::Double, Device::Cpu);
        let place = Place::of_test(&window);
        let fields = Fields::read_alike(&source, &config, &place, &Group::single()).unwrap();
        // Missing values do not count in the statistics, whatever replaces them.
        let other = Source::open(&DataConfig { fill: 100.0, ..config.clone() }, None).unwrap();
        assert_eq!(Statics::normalizer(&other).unwrap(), fields.statics);
        let statics = Statics::read(&source, &window, config.fill).unwrap();
        let beside = statics.behind(None, fields.statics.as_ref(), options).unwrap().unwrap();
        let frame = isobar_data::Window { frames: 2..3, points: window.to_vec() };
        let wind = source.parts.train.data.read(&frame, &[0], &["wind"]).unwrap();
        let wind = fields.forcing.unwrap().encode(&wind.flatten(0, 2).to_kind(Kind::Double)).unwrap();
        for (values, first) in [(beside.flatten(0, -1), 4), (wind.flatten(0, -1), 2 * 20 + 4)] {
            let values: Vec<f64> = values.try_into().unwrap();
            for (at, value) in values.into_iter().enumerate() {
                assert_eq!((first + at) % 7 == 3, (value + 2.5).abs() < 1e-6, "{at}: {value}");
            }
        }
    }

    #[test]
    fn roles_make_channels() {
        let folder = folder();
        let config = config(&folder, all_roles());
        let source = Source::open(&config, None).unwrap();
        source.has_samples(&config).unwrap();
        let spec = source.spec(&config).unwrap();
        assert_eq!((spec.in_channels, spec.position_channels, spec.out_channels), (3 * 2 + 1 + 1, 1 + 2, 3));
        let names: Vec<String> =
            source.variables().unwrap().into_iter().map(|variable| variable.name).collect();
        assert_eq!(names, ["u", "v", "rain"]);
        let window = [0..5, 0..4];
        let options = (Kind::Double, Device::Cpu);
        let place = Place::of_test(&window);
        let fields = Fields::read_alike(&source, &config, &place, &Group::single()).unwrap();
        // A sample is three frames and a step, a rollout three and two.
        assert_eq!((fields.train.len(), fields.validation.len(), fields.rollouts.unwrap().len()), (3, 3, 1));
        assert_eq!((fields.input.mean().len(), fields.target.mean().len()), (2, 3));
        assert_eq!(fields.target.mean()[..2], *fields.input.mean());
        assert_eq!(fields.change.unwrap().std().len(), 2, "diagnostics are no changes");
        let statics = Statics::read(&source, &window, 0.0).unwrap();
        let behind = statics.behind(None, fields.statics.as_ref(), options).unwrap().unwrap();
        assert_eq!(behind.size(), [3, 5, 4]);
        let (mask, (_, areas)) = (behind.get(0), area_weights(source.data.dims()).unwrap());
        let areas = Tensor::from_slice(&areas).view([5, 1]);
        let mean = |field: Tensor| (field * &areas).mean(Kind::Double).double_value(&[]);
        assert!(mean(mask.shallow_clone()).abs() < 1e-12);
        assert!((mean(mask.square()) - 1.0).abs() < 1e-12);
        let roles = source.names.roles(&*source.data, &config, &window, fields.forcing).unwrap().unwrap();
        assert_eq!((roles.history, roles.prognostic, roles.diagnostic), (3, 2, 1));
        assert_eq!(roles.forcing.unwrap().mean().len(), 1);
    }

    /// Frames of the history, forcings and diagnostics are read while they are needed, too.
    #[test]
    fn streamed_samples_are_those_in_memory() {
        let folder = folder();
        let window = [1..5, 0..3];
        let place = Place::of_test(&window);
        let read = |cache: &str| {
            let mut keys = all_roles();
            keys["cache"] = cache.into();
            let config = config(&folder, keys);
            let source = Source::open(&config, None).unwrap();
            let fields = Fields::read_alike(&source, &config, &place, &Group::single()).unwrap();
            let of = |samples: &dyn isobar_data::Samples, numbers: &[usize]| {
                let request = Request { samples: numbers.to_vec(), steps: samples.steps() };
                let batch = samples.take(&request).unwrap();
                (batch.input, batch.targets, batch.times)
            };
            (of(&*fields.train, &[2, 0]), of(&*fields.validation, &[1]), of(&*fields.rollouts.unwrap(), &[0]))
        };
        assert_eq!(read("all"), read("none"));
    }

    /// The second start reads no statistics, and has the same; other data are read again.
    #[test]
    fn statistics_are_kept_beside_the_run() {
        let (folder, run) = (folder(), tempdir().unwrap());
        let config = config(&folder, all_roles());
        let window = [0..5, 0..4];
        let place = Place { keep: Some(run.path()), ..Place::of_test(&window) };
        let read = || {
            let source = Source::open(&config, None).unwrap();
            let fields = Fields::read_alike(&source, &config, &place, &Group::single()).unwrap();
            (fields.input, fields.target, fields.change, fields.forcing)
        };
        let first = read();
        let file = run.path().join("statistics.json");
        let kept = std::fs::read_to_string(&file).unwrap();
        assert_eq!(read(), first);
        // What is kept is what is used.
        let mut told: Value = serde_json::from_str(&kept).unwrap();
        for (key, number) in [("mean", 7.5), ("max", 9.0)] {
            told["statistics"]["inputs"][0][key] = number.into();
        }
        std::fs::write(&file, told.to_string()).unwrap();
        assert_eq!(read().0.mean()[0], 7.5);
        // Those of an earlier version, which had no weights.
        let mut earlier: Value = serde_json::from_str(&kept).unwrap();
        let _ = earlier["of"].as_object_mut().unwrap().remove("weights");
        earlier["statistics"]["inputs"][0]["mean"] = 7.5.into();
        std::fs::write(&file, earlier.to_string()).unwrap();
        assert_eq!(read(), first);
        // Other options of the format alone.
        let mut other = serde_json::to_value(&config).unwrap();
        other["npy"]["cut"] = 5.into();
        let other: DataConfig = serde_json::from_value(other).unwrap();
        let source = Source::open(&other, None).unwrap();
        let fields = Fields::read_alike(&source, &other, &place, &Group::single()).unwrap();
        assert_eq!(fields.input, first.0, "read again");
        // Numbers that are none count as none.
        for (key, number) in
            [("std", json!(-1)), ("count", json!(0)), ("mean", Value::Null), ("min", json!(1e9))]
        {
            let _ = read();
            let mut told: Value = serde_json::from_str(&kept).unwrap();
            told["statistics"]["inputs"][0][key] = number;
            std::fs::write(&file, told.to_string()).unwrap();
            assert_eq!(read(), first, "{key}");
        }
        array(folder.path(), "v", &[2, 6, 5, 4], |at| (0.71 * at as f32).sin());
        let changed = read();
        assert_eq!(changed.0.mean()[0], first.0.mean()[0], "read again");
        assert_ne!(changed.0.mean()[1], first.0.mean()[1]);
        std::fs::write(&file, "{").unwrap();
        assert_eq!(read(), changed, "a damaged file counts as none");
        let mut told: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let _ = told["statistics"]["inputs"].as_array_mut().unwrap().pop();
        std::fs::write(&file, told.to_string()).unwrap();
        assert_eq!(read(), changed, "statistics of too few channels count as none");
    }

    /// Three trajectories and pairs of 5 by 4 points, with a number for each sample, and one for each time.
    fn with_scalars(own: Value) -> (TempDir, DataConfig) {
        let folder = tempdir().unwrap();
        array(folder.path(), "u", &[3, 4, 5, 4], |at| (0.3 * at as f32).sin());
        array(folder.path(), "a", &[3, 5, 4], |at| (0.7 * at as f32).sin());
        array(folder.path(), "b", &[3, 5, 4], |at| (1.1 * at as f32).sin());
        array(folder.path(), "nu", &[3], |at| [0.1, 0.3, 0.7][at]);
        array(folder.path(), "wind", &[3, 4], |at| at as f32);
        array(folder.path(), "same", &[3], |_| 2.5);
        let named = |name: &str, axes: &[&str]| json!({ "path": name, "axes": axes });
        let pair = ["sample", "lat", "lon"];
        let mut config = json!({
            "path": folder.path(), "format": "npy", "validation_samples": 1,
            "npy": {
                "axes": ["sample", "time", "lat", "lon"],
                "variables": {
                    "a": named("a", &pair), "b": named("b", &pair), "nu": named("nu", &["sample"]),
                    "wind": named("wind", &["sample", "time"]), "same": named("same", &["sample"]),
                },
            },
        });
        config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        (folder, serde_json::from_value(config).unwrap())
    }

    /// A scalar is a channel with one value at all points of each rank's window, in memory or streamed.
    #[rstest]
    #[case::trajectories(json!({ "fields": ["u"], "scalars": ["nu", "wind"] }), [1, 2])]
    #[case::pairs(json!({ "inputs": ["a"], "targets": ["b"], "scalars": ["nu"] }), [1, 1])]
    fn scalars_are_constant_channels(
        #[case] own: Value,
        #[case] channels: [i64; 2],
        #[values("all", "none")] cache: &str,
    ) {
        let [fields, scalars] = channels;
        let (_folder, mut config) = with_scalars(own);
        config.cache = serde_json::from_value(cache.into()).unwrap();
        let source = Source::open(&config, None).unwrap();
        let spec = source.spec(&config).unwrap();
        assert_eq!((spec.in_channels as i64, spec.out_channels), (fields + scalars, 1));
        let read = |window: &[Range<usize>], world: &Group| {
            let source = Source::open(&config, None).unwrap();
            let place = Place {
                window,
                target_window: window,
                options: (Kind::Double, Device::Cpu),
                own: 3,
                at_once: 3,
                keep: None,
                checks: CheckChoice::On,
                signals: &Signals::default(),
            };
            let fields = Fields::read_alike(&source, &config, &place, world).unwrap();
            let all: Vec<usize> = (0..fields.train.len()).collect();
            let batch = fields.train.take(&Request { samples: all, steps: fields.train.steps() }).unwrap();
            (batch.input, if source.has_steps() { fields.forcing.unwrap() } else { fields.input })
        };
        let (whole, scales) = read(&[0..5, 0..4], &Group::single());
        let at = scales.mean().len() - scalars as usize;
        assert!(
            (scales.mean()[at] - 0.2).abs() < 1e-7 && (scales.std()[at] - 0.1).abs() < 1e-7,
            "{scales:?}"
        );
        let nu = whole.select(1, fields);
        let of_samples: Vec<f64> = if source.has_steps() { vec![0.1; 3] } else { vec![0.1] };
        for (at, nu_of_sample) in of_samples.into_iter().enumerate() {
            let own = nu.get(at as i64);
            assert!((own.min().double_value(&[]) - nu_of_sample).abs() < 1e-7 && own.min() == own.max());
        }
        if source.has_steps() {
            let wind = whole.select(1, fields + 1);
            for sample in 0..6 {
                let (trajectory, frame) = (sample / 3, sample % 3);
                let own = wind.get(sample);
                assert_eq!(
                    (own.min(), own.max()),
                    (Tensor::from((4 * trajectory + frame) as f64), own.min())
                );
            }
        }
        let ranks = threads::run(2, Duration::from_secs(60), |world| {
            let mesh = isobar_manager::DeviceMesh::new(&world, &[2], &["domain"]).unwrap();
            let window = ShardedFields::new(&mesh, &[5, 4]).unwrap().window(&[5, 4]).unwrap();
            read(&window, &world).0
        });
        assert_eq!(Tensor::cat(&ranks, 2), whole);
    }

    #[rstest]
    #[case::spatial(json!({ "fields": ["u"], "scalars": ["a"] }), "data.scalars names \"a\", which has spatial dims")]
    #[case::twice(json!({ "fields": ["u"], "scalars": ["nu", "nu"] }), "data.scalars names a variable twice")]
    #[case::two_roles(json!({ "fields": ["u"], "scalars": ["nu"], "statics": ["nu"] }), "data.statics and data.scalars both")]
    #[case::unknown(json!({ "fields": ["u"], "scalars": ["mu"] }), "mu")]
    #[case::same(json!({ "fields": ["u"], "scalars": ["same"] }), "\"same\", which is 2.5 in all training samples")]
    fn scalars_that_are_none_are_refused(#[case] own: Value, #[case] expected: &str) {
        let (_folder, config) = with_scalars(own);
        let place = Place {
            window: &[0..5, 0..4],
            target_window: &[0..5, 0..4],
            options: (Kind::Double, Device::Cpu),
            own: 3,
            at_once: 3,
            keep: None,
            checks: CheckChoice::On,
            signals: &Signals::default(),
        };
        let read = Source::open(&config, None)
            .and_then(|source| Fields::read_alike(&source, &config, &place, &Group::single()).map(drop));
        let error = read.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn without_further_keys_there_are_no_roles() {
        let folder = folder();
        let config = config(&folder, json!({}));
        let source = Source::open(&config, None).unwrap();
        let spec = source.spec(&config).unwrap();
        assert_eq!((spec.in_channels, spec.position_channels, spec.out_channels), (2, 0, 2));
        let window = [0..5, 0..4];
        assert!(source.names.roles(&*source.data, &config, &window, None).unwrap().is_none());
        let statics = Statics::read(&source, &window, 0.0).unwrap();
        assert!(statics.behind(None, None, (Kind::Double, Device::Cpu)).unwrap().is_none());
    }

    /// Ranks read the windows of what one rank reads, with the same normalisation.
    #[test]
    fn ranks_read_their_windows() {
        let folder = folder();
        let config = config(&folder, all_roles());
        let whole = Statics::read(&Source::open(&config, None).unwrap(), &[0..5, 0..4], 0.0).unwrap();
        let whole = [whole.stored.unwrap(), whole.computed.unwrap()];
        let ranks = threads::run(2, Duration::from_secs(60), |world| {
            let mesh = isobar_manager::DeviceMesh::new(&world, &[2], &["domain"]).unwrap();
            let source = Source::open(&config, None).unwrap();
            let window = ShardedFields::new(&mesh, &[5, 4]).unwrap().window(&[5, 4]).unwrap();
            let place = Place::of_test(&window);
            let fields = Fields::read_alike(&source, &config, &place, &world).unwrap();
            let own = Statics::read(&source, &window, 0.0).unwrap();
            // Rank 0's normalisation is that of every rank.
            let normalizers = (fields.input, fields.change, fields.statics, fields.forcing);
            let normalizers = serde_json::to_vec(&normalizers).unwrap();
            let all = world.all_gather_bytes(&normalizers).unwrap();
            assert_eq!(all[0], all[1]);
            [own.stored.unwrap(), own.computed.unwrap()]
        });
        for (at, whole) in whole.iter().enumerate() {
            let parts: Vec<&Tensor> = ranks.iter().map(|rank| &rank[at]).collect();
            assert_eq!(Tensor::cat(&parts, 1), *whole);
        }
    }

    #[rstest]
    #[case::twice(json!({ "diagnostics": ["u"] }), "data.fields and data.diagnostics both name \"u\"")]
    #[case::forcing(json!({ "forcings": ["u"] }), "data.fields or data.diagnostics and data.forcings both name")]
    #[case::both(json!({ "forcings": ["wind"], "statics": ["wind"] }), "data.forcings and data.statics both name \"wind\"")]
    #[case::in_time(json!({ "statics": ["time_of_day"] }), "which changes in time; name it in data.forcings")]
    #[case::no_calendar(json!({ "forcings": ["day_of_year"] }), "day_of_year needs dates, but the times of")]
    #[case::turned(json!({ "statics": ["mask"], "augment": "square" }), "--set data.augment=none")]
    #[case::history(json!({ "history": 6 }), "data.history is 6, expected 1 to 5: trajectories of")]
    #[case::steps(json!({ "history": 3, "train_steps": 4 }), "data.train_steps is 4, expected 1 to 3")]
    #[case::samples(json!({ "validation_samples": 2 }), "--set data.validation_samples=0")]
    fn what_does_not_fit_is_refused(#[case] own: Value, #[case] expected: &str) {
        let folder = folder();
        let config = config(&folder, own);
        let opened = Source::open(&config, None).and_then(|source| source.has_samples(&config));
        let error = opened.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn statics_of_a_file_between_others_are_compared() {
        let folders = [(); 3].map(|()| folder());
        array(folders[1].path(), "mask", &[5, 4], |at| 1.0 + at as f32);
        let read = |folders: &[&TempDir]| {
            let paths: Vec<&Path> = folders.iter().map(|folder| folder.path()).collect();
            let own = json!({ "path": paths, "statics": ["mask"] });
            let source = Source::open(&config(folders[0], own), None).unwrap();
            Statics::read(&source, &[0..5, 0..4], 0.0).map(|_| ())
        };
        let [first, other, last] = folders.each_ref();
        read(&[first, last]).unwrap();
        let error = read(&[first, other, last]).unwrap_err().to_string();
        assert!(error.contains("\"mask\", which is not the same in all samples"), "{error}");
    }

    #[rstest]
    #[case::in_time("wind", "is not the same in all samples and at all times")]
    #[case::flat("flat", "which is the same at all points")]
    fn statics_that_are_none_are_refused(#[case] name: &str, #[case] expected: &str) {
        let folder = folder();
        let source = Source::open(&config(&folder, json!({ "statics": [name] })), None).unwrap();
        let read = Statics::read(&source, &[0..5, 0..4], 0.0).and_then(|_| Statics::normalizer(&source));
        let error = read.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
