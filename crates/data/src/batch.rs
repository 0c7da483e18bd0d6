//! Samples as tensors.

use tch::{Device, Kind, Tensor};

use crate::steps::{TrainSteps, check_steps};
use crate::{Error, Result};

/// Some samples: what a network starts from, and what should come of it.
#[derive(Debug)]
pub struct Batch {
    /// `[sample, channel, x, y]`.
    pub input: Tensor,
    /// The field after each step of a rollout, each `[sample, channel, x, y]`; a single one where the network maps one field
    /// to another.
    pub targets: Vec<Tensor>,
    /// For each step the times of the fields that it starts from, one for each sample; empty for data without times.
    pub times: Vec<Vec<f64>>,
}

/// A part of a data set that fits in memory, or a rank's window of it, loaded once.
///
/// ```
/// use isobar_data::{DarcyFile, InMemory, Sampler, part};
///
/// let file = DarcyFile::open("../../tests/data/darcy_excerpt.h5")?;
/// let train = InMemory::load(&file, 0..6)?;
/// let sampler = Sampler::new(train.len(), 4, 0, true)?;
/// let (rank, size) = (0, 1);
/// for batch in sampler.epoch(0) {
///     let local = train.batch(part(&batch, rank, size))?;
///     assert_eq!(local.targets[0].size(), [batch.len() as i64, 1, 64, 64]);
/// }
/// # Ok::<(), isobar_data::Error>(())
/// ```
#[derive(Debug)]
pub struct InMemory {
    inputs: Tensor,
    targets: Tensor,
    /// For each sample its row of the inputs, and the first of its rows of the targets.
    rows: Vec<(i64, i64)>,
    /// Steps of a sample, which may depend on the epoch.
    steps: TrainSteps,
    of_trajectories: bool,
    /// Times of the frames of a trajectory; empty for data without times.
    times: Vec<f64>,
}

impl InMemory {
    /// Holds pairs of input and target fields, `[sample, channel, x, …]`, which may be on different grids of as many dims.
    ///
    /// # Errors
    /// Tensors that differ in their number of dims or samples.
    pub fn pairs(inputs: Tensor, targets: Tensor) -> Result<Self> {
        let (from, to) = (inputs.size(), targets.size());
        if from.len() < 3 || from.len() != to.len() || from[0] != to[0] {
            return Err(Error::Invalid(format!(
                "pairs need two fields [sample, channel, x, y] of as many samples and spatial dims, not {from:?} and {to:?}"
            )));
        }
        let rows = (0..from[0]).map(|row| (row, row)).collect();
        Ok(Self {
            inputs,
            targets,
            rows,
            steps: TrainSteps::default(),
            of_trajectories: false,
            times: Vec::new(),
        })
    }

    /// Pieces of trajectories `[trajectory, frame, channel, x, y]`: a frame and the `steps` that follow it, one beginning at
    /// every `stride`-th frame of each trajectory. The frames are held once, however many pieces they are in.
    ///
    /// # Errors
    /// If there are no such pieces: `steps` or `stride` is 0, or a trajectory has not more than `steps` frames.
    pub fn rollouts(trajectories: &Tensor, steps: usize, stride: usize) -> Result<Self> {
        let shape = trajectories.size();
        let frames = shape.get(1).copied().unwrap_or(0) as usize;
        if shape.len() < 4 || steps == 0 || stride == 0 || frames <= steps {
            return Err(Error::Invalid(format!(
                "{steps} steps from every {stride}th frame can't be taken of [trajectory, frame, channel, x, y] {shape:?}: \
                 expected 1 to {} steps and a stride of 1 or more",
                frames.saturating_sub(1)
            )));
        }
        let first = |trajectory: i64| {
            (0..frames - steps).step_by(stride).map(move |frame| trajectory * frames as i64 + frame as i64)
        };
        let rows = (0..shape[0]).flat_map(first).map(|row| (row, row + 1)).collect();
        let all = trajectories.f_flatten(0, 1)?;
        let (times, steps) = (Vec::new(), TrainSteps::Constant(steps));
        Ok(Self { inputs: all.shallow_clone(), targets: all, rows, steps, of_trajectories: true, times })
    }

    /// Adds the times of the frames, one for each frame of a trajectory.
    ///
    /// # Errors
    /// If the samples are no trajectories of so many frames.
    pub fn with_times(self, times: &[f64]) -> Result<Self> {
        let frames = self.inputs.size().first().copied().unwrap_or(0) as usize;
        if !self.of_trajectories || times.is_empty() || !frames.is_multiple_of(times.len()) {
            return Err(Error::Invalid(format!(
                "{} times do not fit {frames} frames: expected one for each frame of a trajectory",
                times.len()
            )));
        }
        Ok(Self { times: times.to_vec(), ..self })
    }

    /// Sets the steps of a sample in each epoch, of which the most are those that the samples were made with.
    ///
    /// # Errors
    /// Other most steps, and those of [`TrainSteps::check`].
    pub fn with_steps(self, steps: TrainSteps) -> Result<Self> {
        steps.check()?;
        if steps.most() != self.steps() {
            return Err(Error::Invalid(format!(
                "a schedule of at most {} steps does not fit samples of {}",
                steps.most(),
                self.steps()
            )));
        }
        Ok(Self { steps, ..self })
    }

    /// Copies the data to a device, in a dtype.
    ///
    /// # Errors
    /// If the device is missing or out of memory.
    pub fn to(&self, device: Device, kind: Kind) -> Result<Self> {
        let inputs = self.inputs.f_to_device(device)?.f_to_kind(kind)?;
        let targets = match self.of_trajectories {
            true => inputs.shallow_clone(),
            false => self.targets.f_to_device(device)?.f_to_kind(kind)?,
        };
        Ok(Self {
            inputs,
            targets,
            rows: self.rows.clone(),
            steps: self.steps.clone(),
            of_trajectories: self.of_trajectories,
            times: self.times.clone(),
        })
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the most steps after the input of a sample.
    pub fn steps(&self) -> usize {
        self.steps.most()
    }

    /// Returns the steps after the input of a sample in an epoch, counted from 0.
    pub fn steps_in(&self, epoch: u64) -> usize {
        self.steps.at(epoch)
    }

    /// Returns whether inputs and targets are frames of the same trajectories.
    pub fn of_trajectories(&self) -> bool {
        self.of_trajectories
    }

    /// All inputs, `[row, channel, x, y]`; of trajectories all frames.
    pub fn inputs(&self) -> &Tensor {
        &self.inputs
    }

    /// All targets, `[row, channel, x, y]`; of trajectories all frames.
    pub fn targets(&self) -> &Tensor {
        &self.targets
    }

    /// The samples of these numbers, counted from the start of what was loaded, in the order asked for. An empty list
    /// gives tensors of no samples.
    ///
    /// # Errors
    /// If a number is out of range.
    pub fn batch(&self, samples: &[usize]) -> Result<Batch> {
        self.batch_of(samples, self.steps())
    }

    /// Does the same as [`InMemory::batch`] with the first steps of each sample.
    ///
    /// # Errors
    /// If a number is out of range, or the samples do not have so many steps.
    pub fn batch_of(&self, samples: &[usize], steps: usize) -> Result<Batch> {
        check_steps(steps, self.steps())?;
        let row = |&sample: &usize| {
            self.rows.get(sample).copied().ok_or_else(|| Error::OutOfRange {
                what: "sample".to_owned(),
                asked: sample.to_string(),
                available: self.len(),
            })
        };
        let rows = samples.iter().map(row).collect::<Result<Vec<_>>>()?;
        let select = |field: &Tensor, rows: Vec<i64>| {
            let index = Tensor::f_from_slice(&rows)?.f_to_device(field.device())?;
            field.f_index_select(0, &index)
        };
        let input = select(&self.inputs, rows.iter().map(|(input, _)| *input).collect())?;
        let targets = (0..steps as i64)
            .map(|step| select(&self.targets, rows.iter().map(|(_, first)| first + step).collect()))
            .collect::<Result<_, _>>()?;
        let at = |row: i64| self.times[row as usize % self.times.len()];
        let times = match self.times.is_empty() {
            true => Vec::new(),
            false => (0..steps as i64)
                .map(|step| rows.iter().map(|(input, _)| at(input + step)).collect())
                .collect(),
        };
        Ok(Batch { input, targets, times })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeros(size: [i64; 4]) -> Tensor {
        Tensor::zeros(size, (Kind::Float, Device::Cpu))
    }

    fn values(field: &Tensor) -> Vec<f32> {
        Vec::try_from(field.flatten(0, -1)).unwrap()
    }

    #[test]
    fn samples_come_in_the_order_asked_for() {
        let inputs = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([3, 1, 1, 2]);
        let data = InMemory::pairs(inputs.shallow_clone(), &inputs + 100.0).unwrap();
        let batch = data.batch(&[2, 0, 2]).unwrap();
        assert_eq!(values(&batch.input), [4.0, 5.0, 0.0, 1.0, 4.0, 5.0]);
        assert_eq!(values(&batch.targets[0]), [104.0, 105.0, 100.0, 101.0, 104.0, 105.0]);
        assert_eq!(data.batch(&[]).unwrap().input.size(), [0, 1, 1, 2]);
        assert_eq!(data.batch(&[0, 3]).unwrap_err().to_string(), "sample 3 is out of range: there are 3");
    }

    #[test]
    fn pieces_of_trajectories_do_not_cross_from_one_to_the_next() {
        let frames = Tensor::arange(10, (Kind::Float, Device::Cpu)).view([2, 5, 1, 1, 1]);
        let of = |steps, stride| {
            let data = InMemory::rollouts(&frames, steps, stride).unwrap();
            let batch = data.batch(&(0..data.len()).collect::<Vec<_>>()).unwrap();
            let targets: Vec<Vec<f32>> = batch.targets.iter().map(values).collect();
            (values(&batch.input), targets)
        };
        let (inputs, targets) = of(1, 1);
        assert_eq!(inputs, [0.0, 1.0, 2.0, 3.0, 5.0, 6.0, 7.0, 8.0]);
        assert_eq!(targets, [[1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0]]);
        let (inputs, targets) = of(2, 2);
        assert_eq!(inputs, [0.0, 2.0, 5.0, 7.0]);
        assert_eq!(targets, [[1.0, 3.0, 6.0, 8.0], [2.0, 4.0, 7.0, 9.0]]);
        let error = InMemory::rollouts(&frames, 5, 1).unwrap_err().to_string();
        assert!(error.contains("expected 1 to 4 steps"), "{error}");
    }

    #[test]
    fn each_step_has_the_time_of_its_frame() {
        let frames = Tensor::arange(10, (Kind::Float, Device::Cpu)).view([2, 5, 1, 1, 1]);
        let data = InMemory::rollouts(&frames, 2, 2).unwrap();
        assert!(data.batch(&[0]).unwrap().times.is_empty());
        let data = data.with_times(&[0.0, 0.5, 1.0, 1.5, 2.0]).unwrap();
        let batch = data.batch(&[1, 2]).unwrap();
        assert_eq!(values(&batch.input), [2.0, 5.0]);
        assert_eq!(batch.times, [[1.0, 0.0], [1.5, 0.5]]);
        let error = InMemory::rollouts(&frames, 2, 2).unwrap().with_times(&[0.0, 1.0, 2.0]).unwrap_err();
        assert!(error.to_string().contains("3 times do not fit 10 frames"), "{error}");
    }

    #[test]
    fn fields_that_do_not_belong_together_are_refused() {
        let error = InMemory::pairs(zeros([2, 1, 4, 4]), zeros([3, 1, 4, 4])).unwrap_err();
        assert!(error.to_string().contains("[2, 1, 4, 4] and [3, 1, 4, 4]"), "{error}");
    }

    #[test]
    fn samples_change_kind_and_stay_one_tensor_where_they_were() {
        let frames = zeros([1, 3, 4, 4]).unsqueeze(2);
        let wide = InMemory::rollouts(&frames, 1, 1).unwrap().to(Device::Cpu, Kind::Double).unwrap();
        assert_eq!(wide.batch(&[1]).unwrap().input.kind(), Kind::Double);
        assert_eq!(wide.inputs().data_ptr(), wide.targets().data_ptr());
    }
}
