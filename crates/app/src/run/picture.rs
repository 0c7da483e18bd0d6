//! Pictures of what a model has learnt. Of several channels the first is shown; of a volume the plane in the middle of its first
//! dim; of a line what it does over the steps; of a point cloud the points where they are.

use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::Result;
use isobar_array::Array;
use isobar_collectives::Group;
use isobar_data::DataVariable;
use isobar_torch::memory::to_vec;
use isobar_train::{FieldLayout, FieldTask, Forward, VariableError};
use tch::{Device, Kind, Tensor};

use super::cloud::Cloud;
use super::raster::{Canvas, Field, Palette, Panel};
use isobar_command::exit::{Because, Exit};

/// Number of validation samples shown, one per row.
pub(crate) const SAMPLES: usize = 3;
/// Number of frames of a rollout shown, one per column.
const FRAMES: usize = 5;
/// Number of steps of a line shown, one below the other.
const LINES: usize = 256;
/// Most points of a line that is shown alone.
const POINTS: usize = 512;

/// Titles of a picture, and the place of its points.
pub(crate) struct Legend {
    /// Titles of the channels that are shown of the input and of the target.
    pub(crate) titles: [String; 2],
    /// Channels of the input that are the coordinates of points.
    pub(crate) points: Option<Range<i64>>,
}

/// Planes of a prediction that a picture shows, on the CPU.
pub(crate) struct Shown {
    input: Tensor,
    /// Clouds of the samples, if they are point clouds.
    clouds: Vec<Cloud>,
    /// The steps to show.
    steps: Vec<usize>,
    frames: Vec<Frame>,
}

/// A step of a rollout.
struct Frame {
    /// The first is 1.
    step: usize,
    prediction: Tensor,
    /// Truth, and the error of each sample in the channel that is shown; `None` beyond the data.
    truth: Option<(Tensor, Vec<VariableError>)>,
}

impl Shown {
    /// Begins the picture of a prediction of `steps` steps from samples `[sample, channel, spatial…]`; [`add`](Self::add) adds the
    /// steps. All ranks that share the fields call.
    pub(crate) fn begin<A: Array>(input: &A, steps: usize, points: Option<Range<i64>>) -> Result<Self> {
        let most = if is_line(&input.shape()) { LINES } else { FRAMES };
        let shown = steps.min(most);
        let steps = (1..=shown).map(|count| (count * steps).div_ceil(shown)).collect();
        let clouds = points.map(|points| Cloud::of_samples(input, points)).transpose()?;
        Ok(Self { input: plane(input)?, clouds: clouds.unwrap_or_default(), steps, frames: Vec::new() })
    }

    /// Adds the prediction after a step, from 1 on, and the truth with the errors of each sample and channel if it is known; leaves
    /// steps out that are not shown. All ranks that share the fields call, step by step.
    pub(crate) fn add<A: Array>(
        &mut self,
        step: usize,
        predicted: &A,
        truth: Option<(&A, &[Vec<VariableError>])>,
    ) -> Result<()> {
        if !self.steps.contains(&step) {
            return Ok(());
        }
        let known = |(target, errors): (&A, &[Vec<VariableError>])| -> Result<_> {
            let shown = |channels: &Vec<VariableError>| channels.first().copied();
            let shown = errors.iter().map(|channels| shown(channels).unwrap_or(VariableError::MISSING));
            Ok((plane(target)?, shown.collect()))
        };
        let truth = truth.map(known).transpose()?;
        self.frames.push(Frame { step, prediction: plane(predicted)?, truth });
        Ok(())
    }

    /// Draws the first sample: frames of a trajectory, or a pair's input, truth, prediction and error. `titles` are those of the
    /// channels that are shown of the input and of the target.
    pub(crate) fn draw(&self, frames: bool, titles: &[String; 2], path: &Path) -> Result<()> {
        save(&self.rows(frames, 1, titles)?, path)
    }

    /// Builds the panels of a trajectory, or of the first samples, one per row.
    fn rows(&self, frames: bool, samples: usize, titles: &[String; 2]) -> Result<Vec<Vec<Panel>>> {
        match frames {
            true => self.strip(&titles[1]),
            false => (0..samples).map(|sample| self.row(sample, titles)).collect(),
        }
    }

    /// Returns the titles of the panels of the first sample.
    #[cfg(test)]
    pub(crate) fn panel_titles(&self, frames: bool, titles: &[String; 2]) -> Vec<String> {
        let rows = self.rows(frames, 1, titles).unwrap();
        rows.iter().flatten().map(|panel| panel.title().to_owned()).collect()
    }

    /// A sample of a network that maps one field to another.
    fn row(&self, sample: usize, [from, to]: &[String; 2]) -> Result<Vec<Panel>> {
        let field = |planes: &Tensor| self.field(planes, sample);
        let mut panels = vec![field(&self.input)?.panel(from, Palette::Greys)];
        for Frame { prediction, truth, .. } in &self.frames {
            let predicted = field(prediction)?;
            let Some((target, errors)) = truth else { continue };
            let solution = field(target)?;
            let range = solution.range_with(&predicted);
            panels.push(solution.panel(&format!("{to}, truth"), Palette::Viridis).over(range));
            panels.push(predicted.panel("prediction", Palette::Viridis).over(range));
            let difference = field(&prediction.f_sub(target)?.f_abs()?)?;
            panels.push(difference.panel(&error_title(to, &errors[sample]), Palette::Magma));
        }
        Ok(panels)
    }

    /// One sample of planes.
    fn field(&self, planes: &Tensor, sample: usize) -> Result<Field> {
        match self.clouds.get(sample) {
            Some(cloud) => Ok(cloud.field(&to_vec(&planes.f_get(sample as i64)?.f_contiguous()?)?)),
            None => field(planes, sample),
        }
    }

    /// The first rollout: the truth of the variable `name`, the prediction, and their difference.
    fn strip(&self, name: &str) -> Result<Vec<Vec<Panel>>> {
        if self.input.dim() == 2 {
            return self.lines(name);
        }
        let mut rows = [const { Vec::new() }; 3];
        for Frame { step, prediction, truth } in &self.frames {
            let predicted = field(prediction, 0)?;
            let Some((target, errors)) = truth else {
                let title = format!("{name}, prediction, step {step}");
                rows[1].push(predicted.panel(&title, Palette::Viridis));
                continue;
            };
            let frame = field(target, 0)?;
            let range = frame.range_with(&predicted);
            let difference = field(&prediction.f_sub(target)?.f_abs()?, 0)?;
            rows[0].push(frame.panel(&format!("{name}, truth, step {step}"), Palette::Viridis).over(range));
            rows[1].push(predicted.panel("prediction", Palette::Viridis).over(range));
            rows[2].push(difference.panel(&error_title(name, &errors[0]), Palette::Magma));
        }
        Ok(rows.into_iter().filter(|row| !row.is_empty()).collect())
    }

    /// Builds the panels of 1-D fields, one row per step: first as far as the truth is known, then the prediction to its end.
    fn lines(&self, name: &str) -> Result<Vec<Vec<Panel>>> {
        let (mut rows, mut known, mut last) = (Vec::new(), [const { Vec::new() }; 3], None);
        for Frame { step, prediction, truth } in &self.frames {
            if let Some((target, errors)) = truth {
                let difference = prediction.f_sub(target)?.f_abs()?;
                let line = [target.shallow_clone(), prediction.shallow_clone(), difference];
                known.iter_mut().zip(line).for_each(|(lines, line)| lines.push(line));
                last = Some((step, errors[0]));
            }
        }
        if let Some((step, error)) = last {
            let [frames, predicted, difference] = known.each_ref().map(|lines| over_steps(lines));
            let (frames, predicted) = (frames?, predicted?);
            let range = frames.range_with(&predicted);
            rows.push(vec![
                frames.panel(&format!("{name}, truth, down to step {step}"), Palette::Viridis).over(range),
                predicted.panel("prediction", Palette::Viridis).over(range),
                difference?.panel(&format!("{} at step {step}", error_title(name, &error)), Palette::Magma),
            ]);
        }
        if let Some(end) = self.frames.last().filter(|end| end.truth.is_none()) {
            let all: Vec<Tensor> = self.frames.iter().map(|frame| frame.prediction.shallow_clone()).collect();
            let title = format!("{name}, prediction, down to step {}", end.step);
            rows.push(vec![over_steps(&all)?.panel(&title, Palette::Viridis)]);
        }
        Ok(rows)
    }
}

/// Draws validation samples into `folder`, on rank 0: of pairs input, target, prediction and error of the first
/// ones, of trajectories frames of the first rollout. All ranks call, since they may share the model or the fields. Nothing
/// where there are no such samples.
pub(crate) fn draw<L, F>(
    task: &FieldTask<L, F>,
    world: &Group,
    folder: &Path,
    legend: &Legend,
) -> Result<Option<PathBuf>>
where
    L: FieldLayout,
    F: Forward<L::Array>,
{
    let data = &**task.rollouts.as_ref().unwrap_or(&task.validation);
    let most = if task.persists() { 1 } else { SAMPLES };
    let samples: Vec<usize> = (0..data.len().min(most)).collect();
    if samples.is_empty() {
        return Ok(None);
    }
    let prediction = task.predict(data, &samples).map_err(anyhow::Error::from_boxed)?;
    let (input, truth) = task.truth(data, &samples).map_err(anyhow::Error::from_boxed)?;
    let mut shown = Shown::begin(&input, prediction.len(), legend.points.clone())?;
    for (at, predicted) in prediction.iter().enumerate() {
        let errors_of = |target| task.model.errors_of(predicted, target).map_err(anyhow::Error::from_boxed);
        let known = truth.get(at).map(|target| Ok::<_, anyhow::Error>((target, errors_of(target)?)));
        let known = known.transpose()?;
        shown.add(at + 1, predicted, known.as_ref().map(|(target, errors)| (*target, &errors[..])))?;
    }
    if world.rank() > 0 {
        return Ok(None);
    }
    let rows = shown.rows(task.persists(), samples.len(), &legend.titles)?;
    let path = folder.join("validation.png");
    if path.is_symlink() {
        // Not through it: what it points to is not the run's.
        std::fs::remove_file(&path)
            .map_err(|error| Exit::Data.because(format!("cannot replace {}: {error}", path.display())))?;
    }
    save(&rows, &path)?;
    Ok(Some(path))
}

/// Writes rows of panels.
fn save(rows: &[Vec<Panel>], path: &Path) -> Result<()> {
    let saved = Canvas::of(rows).save(path);
    saved.map_err(|error| Exit::Data.because(format!("cannot write {}: {error}", path.display())).into())
}

/// Returns the title of the first channel of a variable: the channel's name if the variable has levels or components.
pub(super) fn title(variable: &DataVariable) -> &str {
    let channel = variable.channels.first().filter(|_| variable.has_channel_axis());
    channel.map_or_else(|| variable.title(), String::as_str)
}

/// Title of the difference of a variable from its truth.
fn error_title(name: &str, error: &VariableError) -> String {
    match error.missing {
        true => format!("error of {name}, no values"),
        false => format!("error of {name}, {:.1} % in L2", error.relative * 100.0),
    }
}

/// Returns whether fields `[sample, channel, spatial…]` have one spatial dim.
fn is_line(shape: &[i64]) -> bool {
    shape.len() == 3
}

/// Of fields `[sample, channel, spatial…]` what is shown, whole: `[sample, rows, cols]`, or `[sample, points]`.
fn plane<A: Array>(fields: &A) -> Result<Tensor> {
    let mut plane = fields.narrow(1, 0, 1)?;
    let shape = fields.shape();
    let shown = if is_line(&shape) { 1 } else { 2 };
    let (before, shown) = shape.split_at(shape.len() - shown);
    for (dim, extent) in before.iter().enumerate().skip(2) {
        plane = plane.narrow(dim as i64, extent / 2, 1)?;
    }
    let whole = plane.full_tensor()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?;
    Ok(whole.f_reshape([&shape[..1], shown].concat())?)
}

/// One sample of planes.
fn field(planes: &Tensor, sample: usize) -> Result<Field> {
    let field = planes.f_select(0, sample as i64)?;
    let field = if field.dim() == 1 { band(&field)? } else { field }.f_contiguous()?;
    let (rows, cols) = field.size2()?;
    let values = to_vec(&field)?.into_iter().map(Some).collect();
    Ok(Field { rows: rows as usize, cols: cols as usize, values })
}

/// A line as a band four times as long as high; of many points every second, third, ….
fn band(line: &Tensor) -> Result<Tensor> {
    let stride = line.numel().div_ceil(POINTS).max(1) as i64;
    let shown = line.f_slice(0, None, None, stride)?.f_unsqueeze(0)?;
    let height = (shown.numel() as i64 / 4).max(1);
    Ok(shown.f_repeat([height, 1])?)
}

/// The first sample of lines, one below the other, so thick that they are about a square.
fn over_steps(lines: &[Tensor]) -> Result<Field> {
    let lines = Tensor::f_stack(lines, 1)?;
    let (_, steps, points) = lines.size3()?;
    field(&lines.f_repeat_interleave_self_int((points / steps).max(1), 1, None)?, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_title_names_the_level() {
        let scalar = DataVariable { title: Some("depth".to_owned()), ..DataVariable::scalar("h") };
        let levels = DataVariable { channels: vec!["z_500".into(), "z_850".into()], ..scalar.clone() };
        assert_eq!(
            [title(&DataVariable::scalar("h")), title(&scalar), title(&levels)],
            ["h", "depth", "z_500"]
        );
    }

    /// Each sample has the error of the channel that is shown, and none where the truth is missing.
    #[test]
    fn pairs_have_the_error_of_the_first_channel() {
        let fields = Tensor::ones([2, 2, 4, 4], (Kind::Double, Device::Cpu));
        let (small, large) = (VariableError::new(0.01, 1.0), VariableError::new(0.426, 1.0));
        let mut shown = Shown::begin(&fields, 1, None).unwrap();
        let errors = [vec![large, small], vec![VariableError::MISSING, small]];
        shown.add(1, &fields, Some((&fields, &errors))).unwrap();
        let titles = ["from".to_owned(), "to".to_owned()];
        let expected = ["from", "to, truth", "prediction", "error of to, 42.6 % in L2"];
        assert_eq!(shown.panel_titles(false, &titles), expected);
        assert_eq!(shown.row(1, &titles).unwrap()[3].title(), "error of to, no values");
    }
}
