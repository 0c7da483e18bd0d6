//! Pictures of what a model has learnt. Of several channels the first is shown; of a volume the plane in the middle of its first
//! dim; of a line what it does over the steps.

use std::path::{Path, PathBuf};

use anyhow::Result;
use isobar_array::Array;
use isobar_collectives::Group;
use isobar_torch::memory::to_vec;
use isobar_train::loss::relative_l2_errors;
use isobar_train::{FieldLayout, FieldTask, Forward};
use tch::{Device, Kind, Tensor};

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

/// Planes of a prediction that a picture shows, on the CPU.
pub(crate) struct Shown {
    input: Tensor,
    /// The steps to show.
    steps: Vec<usize>,
    frames: Vec<Frame>,
}

/// A step of a rollout.
struct Frame {
    /// The first is 1.
    step: usize,
    prediction: Tensor,
    /// Truth, and the error of each sample; `None` beyond the data.
    truth: Option<(Tensor, Vec<f64>)>,
}

impl Shown {
    /// Shows samples `[sample, channel, spatial…]`, what truly came of them after each step, as far as it is known, and what a
    /// network made of them. All ranks that share the fields call; what they exchange are the planes that are shown.
    pub(crate) fn of<A: Array>(input: &A, truth: &[A], prediction: &[A]) -> Result<Self> {
        let mut shown = Self::begin(input, prediction.len())?;
        for (at, predicted) in prediction.iter().enumerate() {
            shown.add(at + 1, predicted, truth.get(at))?;
        }
        Ok(shown)
    }

    /// Begins the picture of a prediction of `steps` steps from samples `[sample, channel, spatial…]`; [`add`](Self::add) adds the
    /// steps. All ranks that share the fields call.
    pub(crate) fn begin<A: Array>(input: &A, steps: usize) -> Result<Self> {
        let most = if is_line(&input.shape()) { LINES } else { FRAMES };
        let shown = steps.min(most);
        let steps = (1..=shown).map(|count| (count * steps).div_ceil(shown)).collect();
        Ok(Self { input: plane(input)?, steps, frames: Vec::new() })
    }

    /// Adds the prediction after a step, from 1 on, and the truth if it is known; leaves steps out that are not shown. All ranks that
    /// share the fields call, step by step.
    pub(crate) fn add<A: Array>(&mut self, step: usize, predicted: &A, truth: Option<&A>) -> Result<()> {
        if !self.steps.contains(&step) {
            return Ok(());
        }
        let compare =
            |target: &A| -> Result<_> { Ok((plane(target)?, relative_l2_errors(predicted, target)?)) };
        let truth = truth.map(compare).transpose()?;
        self.frames.push(Frame { step, prediction: plane(predicted)?, truth });
        Ok(())
    }

    /// Draws the first sample: frames of a trajectory, or a pair's input, truth, prediction and error.
    /// `titles` are those of the input and the target of a pair.
    pub(crate) fn draw(&self, frames: bool, titles: &[String; 2], path: &Path) -> Result<()> {
        let rows = if frames { self.strip()? } else { vec![self.row(0, titles)?] };
        save(&rows, path)
    }

    /// A sample of a network that maps one field to another.
    fn row(&self, sample: usize, [from, to]: &[String; 2]) -> Result<Vec<Panel>> {
        let mut panels = vec![field(&self.input, sample)?.panel(from, Palette::Greys)];
        for Frame { prediction, truth, .. } in &self.frames {
            let predicted = field(prediction, sample)?;
            let Some((target, errors)) = truth else { continue };
            let solution = field(target, sample)?;
            let range = solution.range_with(&predicted);
            panels.push(solution.panel(&format!("{to}, truth"), Palette::Viridis).over(range));
            panels.push(predicted.panel("prediction", Palette::Viridis).over(range));
            let difference = field(&prediction.f_sub(target)?.f_abs()?, sample)?;
            panels.push(difference.panel(&percent(errors[sample]), Palette::Magma));
        }
        Ok(panels)
    }

    /// The first rollout: the truth, the prediction, and their difference.
    fn strip(&self) -> Result<Vec<Vec<Panel>>> {
        if self.input.dim() == 2 {
            return self.lines();
        }
        let mut rows = [const { Vec::new() }; 3];
        for Frame { step, prediction, truth } in &self.frames {
            let predicted = field(prediction, 0)?;
            let Some((target, errors)) = truth else {
                rows[1].push(predicted.panel(&format!("prediction, step {step}"), Palette::Viridis));
                continue;
            };
            let frame = field(target, 0)?;
            let range = frame.range_with(&predicted);
            let difference = field(&prediction.f_sub(target)?.f_abs()?, 0)?;
            rows[0].push(frame.panel(&format!("truth, step {step}"), Palette::Viridis).over(range));
            rows[1].push(predicted.panel("prediction", Palette::Viridis).over(range));
            rows[2].push(difference.panel(&percent(errors[0]), Palette::Magma));
        }
        Ok(rows.into_iter().filter(|row| !row.is_empty()).collect())
    }

    /// Builds the panels of 1-D fields, one row per step: first as far as the truth is known, then the prediction to its end.
    fn lines(&self) -> Result<Vec<Vec<Panel>>> {
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
                frames.panel(&format!("truth, down to step {step}"), Palette::Viridis).over(range),
                predicted.panel("prediction", Palette::Viridis).over(range),
                difference?.panel(&format!("{} at step {step}", percent(error)), Palette::Magma),
            ]);
        }
        if let Some(end) = self.frames.last().filter(|end| end.truth.is_none()) {
            let all: Vec<Tensor> = self.frames.iter().map(|frame| frame.prediction.shallow_clone()).collect();
            let title = format!("prediction, down to step {}", end.step);
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
    titles: &[String; 2],
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
    let shown = Shown::of(&input, &truth, &prediction)?;
    if world.rank() > 0 {
        return Ok(None);
    }
    let rows = match task.persists() {
        true => shown.strip()?,
        false => samples.iter().map(|&sample| shown.row(sample, titles)).collect::<Result<_>>()?,
    };
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

fn percent(error: f64) -> String {
    format!("error, {:.1} % in L2", error * 100.0)
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
    Ok(Field { rows: rows as usize, cols: cols as usize, values: to_vec(&field)? })
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
