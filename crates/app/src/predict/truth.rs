//! The frames that a forecast is compared with, a portion at a time.

use std::ops::Range;

use anyhow::Result;
use isobar_data::{Dataset, Window, choose};
use tch::Tensor;

use crate::run::as_str;

/// Most values of frames that are read at a time.
const PORTION: usize = 4 << 20;

/// Reader of this rank's window of some samples' frames. Keeps one portion in memory: read frames in ascending order.
pub(super) struct Truth<'a> {
    data: &'a dyn Dataset,
    samples: &'a [usize],
    variables: Vec<&'a str>,
    points: &'a [Range<usize>],
    /// The frames that are known.
    frames: Range<usize>,
    /// Number of frames of a portion.
    at_once: usize,
    /// The first frame in memory, and the frames, `[sample, frame, channel, spatial…]`.
    portion: Option<(usize, Tensor)>,
}

impl<'a> Truth<'a> {
    /// Describes frames; reads none.
    ///
    /// # Errors
    ///
    /// A variable that the data do not have.
    pub(super) fn new(
        data: &'a dyn Dataset,
        samples: &'a [usize],
        variables: &'a [String],
        (frames, points): (Range<usize>, &'a [Range<usize>]),
    ) -> Result<Self> {
        let variables = as_str(variables);
        let channels: usize = choose(data, &variables)?.iter().map(|variable| variable.channels.len()).sum();
        let values = points.iter().map(Range::len).product::<usize>() * channels * samples.len();
        let at_once = (PORTION / values.max(1)).max(1);
        Ok(Self { data, samples, variables, points, frames, at_once, portion: None })
    }

    /// Returns a frame, `[sample, channel, spatial…]`, as it is stored; `None` if it is not known. Does not communicate.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub(super) fn frame(&mut self, at: usize) -> Result<Option<Tensor>> {
        if !self.frames.contains(&at) {
            return Ok(None);
        }
        let has =
            |(first, frames): &(usize, Tensor)| (*first..first + frames.size()[1] as usize).contains(&at);
        let portion = match self.portion.take().filter(has) {
            Some(portion) => portion,
            None => (at, self.read(at)?),
        };
        let (first, frames) = self.portion.insert(portion);
        Ok(Some(frames.f_select(1, (at - *first) as i64)?))
    }

    /// Reads a portion from the frame `first` on.
    fn read(&self, first: usize) -> Result<Tensor> {
        let frames = first..self.frames.end.min(first.saturating_add(self.at_once));
        let window = Window { frames, points: self.points.to_vec() };
        Ok(self.data.read(&window, self.samples, &self.variables)?)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Mutex;

    use isobar_data::{DataVariable, Dim};
    use tch::{Device, Kind};

    use super::*;

    /// Frames of one point, each of which holds its number, and the frames that were read.
    #[derive(Debug)]
    struct Counted(Vec<DataVariable>, Mutex<Vec<Range<usize>>>);

    impl Dataset for Counted {
        fn path(&self) -> &Path {
            Path::new("counted")
        }
        fn samples(&self) -> usize {
            1
        }
        fn dims(&self) -> &[Dim] {
            &[]
        }
        fn variables(&self) -> &[DataVariable] {
            &self.0
        }
        fn read(&self, window: &Window, _: &[usize], _: &[&str]) -> isobar_data::Result<Tensor> {
            let Range { start, end } = window.frames;
            self.1.lock().unwrap().push(start..end);
            let frames = Tensor::arange_start(start as i64, end as i64, (Kind::Float, Device::Cpu));
            Ok(frames.view([1, -1, 1, 1, 1]))
        }
    }

    #[test]
    fn a_portion_of_the_frames_is_read_at_a_time() {
        let data = Counted(vec![DataVariable::scalar("u")], Mutex::default());
        let (names, points) = (["u".to_owned()], [0..1, 0..1]);
        let truth = Truth::new(&data, &[0], &names, (2..7, &points[..])).unwrap();
        let mut truth = Truth { at_once: 2, ..truth };
        let found: Vec<Option<f64>> = (2..9)
            .map(|at| truth.frame(at).unwrap().map(|frame| frame.double_value(&[0, 0, 0, 0])))
            .collect();
        assert_eq!(found[..5], [2.0, 3.0, 4.0, 5.0, 6.0].map(Some));
        assert_eq!(found[5..], [None, None], "beyond the data");
        assert_eq!(*data.1.lock().unwrap(), [2..4, 4..6, 6..7]);
    }
}
