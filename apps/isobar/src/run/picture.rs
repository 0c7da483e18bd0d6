//! Pictures of what a model has learnt. Of several channels the first is shown; of a volume the plane in the middle of its first
//! dim; of a line what it does over the steps.

use std::path::{Path, PathBuf};

use anyhow::Result;
use isobar_collectives::Group;
use isobar_data::{Batch, InMemory};
use isobar_torch::memory::to_vec;
use isobar_train::loss::relative_l2_errors;
use isobar_train::{BoxError, FieldLayout, FieldTask, Step};
use tch::{Device, Kind, Tensor};

use super::raster::{Canvas, Field, Palette, Panel};
use crate::exit::Exit;

/// How many validation samples are shown, one a row.
const SAMPLES: usize = 3;
/// How many frames of a rollout are shown, one a column.
const FRAMES: usize = 5;
/// Dims of `[sample, channel, x]`.
const LINE: usize = 3;

/// Draws validation samples into `folder`, on rank 0: of Darcy flow coefficient, solution, prediction and error of the first
/// ones, of trajectories frames of the first rollout. All ranks call, since they may share the model or the fields. Nothing
/// where there are no such samples.
pub(crate) fn draw<L, F>(task: &FieldTask<L, F>, world: &Group, folder: &Path) -> Result<Option<PathBuf>>
where
    L: FieldLayout,
    F: Fn(&L::Array, Option<Step<'_>>) -> Result<L::Array, BoxError>,
{
    let data = task.rollouts.as_ref().unwrap_or(&task.validation);
    let most = if task.persists() { 1 } else { SAMPLES };
    let samples: Vec<usize> = (0..data.len().min(most)).collect();
    if samples.is_empty() {
        return Ok(None);
    }
    let (prediction, truth) = both(task, data, &samples).map_err(anyhow::Error::from_boxed)?;
    if world.rank() > 0 {
        return Ok(None);
    }
    let rows = match task.persists() {
        true => strip(&truth, &prediction)?,
        false => samples.iter().map(|&sample| row(&truth, &prediction, sample)).collect::<Result<_>>()?,
    };
    save(&rows, &folder.join("prediction.png")).map(Some)
}

/// Draws a first sample and what was made of it: frames of a trajectory, or a pair's input, truth, prediction and error.
pub(crate) fn of_prediction(truth: &Batch, steps: &[Tensor], frames: bool, path: &Path) -> Result<()> {
    let rows = if frames { strip(truth, steps)? } else { vec![row(truth, steps, 0)?] };
    save(&rows, path)?;
    Ok(())
}

fn both<L, F>(
    task: &FieldTask<L, F>,
    data: &InMemory,
    samples: &[usize],
) -> Result<(Vec<Tensor>, Batch), BoxError>
where
    L: FieldLayout,
    F: Fn(&L::Array, Option<Step<'_>>) -> Result<L::Array, BoxError>,
{
    Ok((task.predict(data, samples)?, task.truth(data, samples)?))
}

/// Writes rows of panels.
fn save(rows: &[Vec<Panel>], path: &Path) -> Result<PathBuf> {
    let saved = Canvas::of(rows).save(path);
    saved.map_err(|error| Exit::Data.because(format!("cannot write {}: {error}", path.display())))?;
    Ok(path.to_owned())
}

/// A sample of a network that maps one field to another.
fn row(truth: &Batch, prediction: &[Tensor], sample: usize) -> Result<Vec<Panel>> {
    let (target, prediction) = (&truth.targets[0], &prediction[0]);
    let of = |fields: &Tensor| field(fields, sample);
    let error = relative_l2_errors(prediction, target)?[sample];
    let (solution, predicted) = (of(target)?, of(prediction)?);
    let range = solution.range_with(&predicted);
    Ok(vec![
        of(&truth.input)?.panel("coefficient a", Palette::Greys),
        solution.panel("solution u, truth", Palette::Viridis).over(range),
        predicted.panel("prediction", Palette::Viridis).over(range),
        of(&prediction.f_sub(target)?.f_abs()?)?.panel(&percent(error), Palette::Magma),
    ])
}

/// Frames of the first rollout: the truth, the prediction, and their difference.
fn strip(truth: &Batch, prediction: &[Tensor]) -> Result<Vec<Vec<Panel>>> {
    if truth.input.dim() == LINE {
        return Ok(vec![over_steps(truth, prediction)?]);
    }
    let steps = prediction.len();
    let columns = steps.min(FRAMES);
    let mut rows = [const { Vec::new() }; 3];
    for column in 1..=columns {
        let step = (column * steps).div_ceil(columns) - 1;
        let predicted = field(&prediction[step], 0)?;
        let Some(target) = truth.targets.get(step) else {
            rows[1].push(predicted.panel(&format!("prediction, step {}", step + 1), Palette::Viridis));
            continue;
        };
        let frame = field(target, 0)?;
        let range = frame.range_with(&predicted);
        let error = relative_l2_errors(&prediction[step], target)?[0];
        let difference = field(&prediction[step].f_sub(target)?.f_abs()?, 0)?;
        rows[0].push(frame.panel(&format!("truth, step {}", step + 1), Palette::Viridis).over(range));
        rows[1].push(predicted.panel("prediction", Palette::Viridis).over(range));
        rows[2].push(difference.panel(&percent(error), Palette::Magma));
    }
    Ok(rows.into_iter().filter(|row| !row.is_empty()).collect())
}

/// Lines of the first rollout, one below the other: the truth, the prediction, and their difference.
fn over_steps(truth: &Batch, prediction: &[Tensor]) -> Result<Vec<Panel>> {
    let points = truth.input.size()[2];
    // About a square, of all steps.
    let thick = (points / prediction.len() as i64).max(1);
    let lines = |lines: &[Tensor]| -> Result<Field> {
        let plane = Tensor::f_cat(&lines.iter().map(|line| line.narrow(0, 0, 1)).collect::<Vec<_>>(), 2)?;
        let plane = plane.f_view([1, -1, lines.len() as i64, points]);
        field(&plane?.f_repeat_interleave_self_int(thick, 2, None)?, 0)
    };
    let known = truth.targets.len().min(prediction.len());
    if known == 0 {
        return Ok(vec![lines(prediction)?.panel("prediction", Palette::Viridis)]);
    }
    let (frames, predicted) = (lines(&truth.targets[..known])?, lines(prediction)?);
    let range = frames.range_with(&predicted);
    let last = known - 1;
    let error = relative_l2_errors(&prediction[last], &truth.targets[last])?[0];
    let pairs = prediction.iter().zip(&truth.targets);
    let differences: Vec<Tensor> =
        pairs.map(|(got, want)| Ok(got.f_sub(want)?.f_abs()?)).collect::<Result<_>>()?;
    Ok(vec![
        frames.panel(&format!("truth, steps 1 to {known} down"), Palette::Viridis).over(range),
        predicted.panel(&format!("prediction, to {}", prediction.len()), Palette::Viridis).over(range),
        lines(&differences)?.panel(&percent(error), Palette::Magma),
    ])
}

fn percent(error: f64) -> String {
    format!("error, {:.1} % in L2", error * 100.0)
}

/// The first channel of one sample of `[sample, channel, spatial…]`, on the CPU.
fn field(fields: &Tensor, sample: usize) -> Result<Field> {
    let mut field = fields.f_select(0, sample as i64)?.f_select(0, 0)?;
    while field.dim() > 2 {
        field = field.f_select(0, field.size()[0] / 2)?;
    }
    let field = field.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?.f_contiguous()?;
    let (rows, cols) = field.size2()?;
    Ok(Field { rows: rows as usize, cols: cols as usize, values: to_vec(&field)? })
}
