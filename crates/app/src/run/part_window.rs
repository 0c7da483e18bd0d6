//! This rank's window of the samples of a part, read into memory.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use isobar_data::{DataPortion, Dataset, Part, Window, portions_of};
use isobar_manager::format_bytes;
use tch::{Device, Kind, Tensor};

use super::place::Place;
use super::reading::Reading;
use super::roles::{as_str, channels};
use super::source::Source;
use isobar_command::exit::{Because, Exit};

/// The windows of a part that a rank keeps in memory.
pub(super) struct PartWindows {
    /// Of trajectories the stored variables.
    inputs: PartWindow,
    /// Targets of samples without time.
    targets: Option<PartWindow>,
}

impl PartWindows {
    /// Describes the windows of a part. Reads metadata only.
    pub(super) fn new(source: &Source, place: &Place<'_>, part: &Part) -> Result<Self> {
        let of = |data: &Arc<dyn Dataset>, variables: Vec<String>, points: &[Range<usize>]| {
            PartWindow::new(data, part.samples.clone(), variables, points)
        };
        if source.has_steps() {
            return Ok(Self { inputs: of(&part.data, source.names.stored(), place.window)?, targets: None });
        }
        Ok(Self {
            inputs: of(&part.data, source.inputs.clone(), place.window)?,
            targets: Some(of(part.targets(), source.targets.clone(), place.target_window)?),
        })
    }

    /// Bytes of all values in a dtype.
    pub(super) fn bytes(&self, kind: Kind) -> u64 {
        self.all().map(|window| window.bytes(kind)).fold(0, u64::saturating_add)
    }

    /// Bytes of host memory that reading takes besides the values: a portion as it is read, counted twice, since a format may hold
    /// a copy meanwhile.
    pub(super) fn bytes_read_at_once(&self) -> u64 {
        self.all().map(|window| window.portion_bytes().saturating_mul(2)).max().unwrap_or_default()
    }

    /// Number of rounds in which they are read.
    pub(super) fn rounds(&self) -> usize {
        self.all().map(|window| window.portions.len()).sum()
    }

    /// Reads the inputs and the targets, `[sample, frame, channel, x, …]` each, a portion in each round: besides the values, memory
    /// holds one portion. An error of one rank is an error on all. All ranks call.
    pub(super) fn read(
        &self,
        options: (Kind, Device),
        reading: &mut Reading<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let inputs = self.inputs.read(options, reading)?;
        let targets = self.targets.as_ref().map(|window| window.read(options, reading)).transpose()?;
        Ok((inputs, targets))
    }

    fn all(&self) -> impl Iterator<Item = &PartWindow> {
        [&self.inputs].into_iter().chain(&self.targets)
    }
}

/// Portions in which a part is read, at most about: few, since chunks at their boundaries are unpacked twice, and enough that one of
/// them takes little memory beside all.
const PORTIONS: usize = 16;

/// This rank's window of some variables of all samples of a part.
struct PartWindow {
    data: Arc<dyn Dataset>,
    variables: Vec<String>,
    samples: Range<usize>,
    points: Vec<Range<usize>>,
    /// Extents of `[sample, frame, channel, x, …]`.
    shape: Vec<usize>,
    /// Samples and frames that are read at a time: the same on all ranks.
    portions: Vec<DataPortion>,
}

impl PartWindow {
    fn new(
        data: &Arc<dyn Dataset>,
        samples: Range<usize>,
        variables: Vec<String>,
        points: &[Range<usize>],
    ) -> Result<Self> {
        let frames = data.times().map_or(1, <[f64]>::len);
        let inner = [samples.len(), frames, channels(&**data, &variables)?];
        let shape = inner.into_iter().chain(points.iter().map(Range::len)).collect();
        let portions = portions_of(&**data, &as_str(&variables), samples.clone(), PORTIONS)?;
        Ok(Self { data: Arc::clone(data), variables, samples, points: points.to_vec(), shape, portions })
    }

    fn bytes(&self, kind: Kind) -> u64 {
        let element = kind.elt_size_in_bytes() as u64;
        self.shape.iter().fold(element, |bytes, &extent| bytes.saturating_mul(extent as u64))
    }

    /// Bytes of the largest portion, in the single precision of data sets.
    fn portion_bytes(&self) -> u64 {
        let outer = self.portions.iter().map(|own| own.samples.len().saturating_mul(own.frames.len())).max();
        let inner =
            self.shape.iter().skip(2).fold(size_of::<f32>(), |all, &extent| all.saturating_mul(extent));
        outer.unwrap_or_default().saturating_mul(inner) as u64
    }

    /// Reads the values, a portion in each round. All ranks call.
    fn read(&self, (kind, device): (Kind, Device), reading: &mut Reading<'_>) -> Result<Tensor> {
        let shape: Vec<i64> = self.shape.iter().map(|&extent| extent as i64).collect();
        let allocated = Tensor::f_empty(&shape[..], (kind, device)).map_err(|error| {
            let error = error.to_string();
            // The rest is libtorch's stack.
            let problem = error.lines().next().unwrap_or_default();
            Exit::Usage.because(format!(
                "cannot allocate {} for samples of {}: {problem}; --set data.cache=none reads samples while they are needed",
                format_bytes(self.bytes(kind)),
                self.data.path().display()
            ))
        });
        let values = reading.all_ok(allocated.map_err(anyhow::Error::from))?;
        for portion in &self.portions {
            reading.end(self.read_portion(portion, &values))?;
        }
        Ok(values)
    }

    /// Copies a portion to its place in `values`.
    fn read_portion(&self, DataPortion { samples, frames }: &DataPortion, values: &Tensor) -> Result<()> {
        let window = Window { frames: frames.clone(), points: self.points.clone() };
        let numbers: Vec<usize> = samples.clone().collect();
        let read = self.data.read(&window, &numbers, &as_str(&self.variables))?;
        let first = (samples.start - self.samples.start) as i64;
        let rows = values.f_narrow(0, first, samples.len() as i64)?;
        let mut place = rows.f_narrow(1, frames.start as i64, frames.len() as i64)?;
        Ok(place.f_copy_(&read)?)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use isobar_collectives::threads;
    use isobar_train::Signals;
    use rstest::rstest;
    use serde_json::json;

    use super::*;
    use crate::run::statics::tests::{config, folder};

    /// Values of this window at once.
    fn at_once(window: &PartWindow) -> Tensor {
        let all = Window { frames: 0..window.shape[1], points: window.points.clone() };
        let samples: Vec<usize> = window.samples.clone().collect();
        window.data.read(&all, &samples, &as_str(&window.variables)).unwrap().to_kind(Kind::Double)
    }

    /// Portions of several samples, of some frames of a sample, and of an empty window.
    #[rstest]
    #[case::samples(2, 6, 0..4)]
    #[case::sample(1, 6, 1..3)]
    #[case::frames(1, 4, 1..3)]
    #[case::empty(1, 4, 4..4)]
    fn portions_are_read_to_their_places(
        #[case] samples_at_once: usize,
        #[case] frames_at_once: usize,
        #[case] columns: Range<usize>,
    ) {
        let folder = folder();
        let config = config(&folder, json!({ "forcings": ["wind"], "validation_samples": 0 }));
        let source = Source::open(&config, None).unwrap();
        let part = &source.parts.train;
        let points = [0..5, columns];
        let mut window = PartWindow::new(&part.data, 0..2, source.names.stored(), &points).unwrap();
        let cut = |extent: usize, step: usize| {
            (0..extent).step_by(step).map(move |start| start..extent.min(start + step))
        };
        let portion = |(samples, frames)| DataPortion { samples, frames };
        let pairs = cut(2, samples_at_once)
            .flat_map(|samples| cut(6, frames_at_once).map(move |frames| (samples.clone(), frames)));
        window.portions = pairs.map(portion).collect();
        let values = threads::run(2, Duration::from_secs(60), |world| {
            let signals = Signals::default();
            let mut reading = Reading::new((&world, &signals), "reading", (1, window.portions.len()));
            window.read((Kind::Double, Device::Cpu), &mut reading).unwrap()
        });
        for own in values {
            assert_eq!((own.size(), own.kind()), (at_once(&window).size(), Kind::Double));
            assert_eq!(own, at_once(&window));
            assert_eq!(own.numel() as u64 * 8, window.bytes(Kind::Double));
            let points = 5 * window.points[1].len() * 3;
            assert_eq!(window.portion_bytes() as usize, samples_at_once * frames_at_once * points * 4);
        }
    }
}
