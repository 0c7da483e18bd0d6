//! A picture of what a model has learnt: coefficient, solution, prediction and error of some validation samples.

use std::path::{Path, PathBuf};

use anyhow::Result;
use isobar_collectives::Group;
use isobar_torch::memory::to_vec;
use isobar_train::{BoxError, FieldTask, Step, loss::relative_l2_errors};
use tch::{Kind, Tensor};

use super::raster::{Canvas, Field, Palette};
use crate::exit::Exit;

/// How many validation samples are shown, one a row.
const SAMPLES: usize = 3;

/// Draws the first validation samples into `folder`, on rank 0. All ranks call, since they may share the model. Nothing
/// where there are no such samples.
pub(crate) fn draw<F>(task: &FieldTask<F>, world: &Group, folder: &Path) -> Result<Option<PathBuf>>
where
    F: Fn(&Tensor, Option<Step<'_>>) -> Result<Tensor, BoxError>,
{
    let samples: Vec<usize> = (0..task.validation.len().min(SAMPLES)).collect();
    if samples.is_empty() {
        return Ok(None);
    }
    let prediction = task.predict(&samples).map_err(anyhow::Error::from_boxed)?;
    if world.rank() > 0 {
        return Ok(None);
    }
    let batch = task.validation.batch(&samples)?;
    let errors = relative_l2_errors(&prediction, &batch.u)?;
    let difference = prediction.f_sub(&batch.u)?.f_abs()?;
    let mut rows = Vec::new();
    for (sample, error) in samples.iter().zip(errors) {
        let of = |fields: &Tensor| field(fields, *sample);
        let (truth, predicted) = (of(&batch.u)?, of(&prediction)?);
        let range = truth.range_with(&predicted);
        rows.push([
            of(&batch.nu)?.panel("coefficient a", Palette::Greys),
            truth.panel("solution u, truth", Palette::Viridis).over(range),
            predicted.panel("prediction", Palette::Viridis).over(range),
            of(&difference)?.panel(&format!("error, {:.1} % in L2", error * 100.0), Palette::Magma),
        ]);
    }
    let path = folder.join("prediction.png");
    let saved = Canvas::of(&rows).save(&path);
    saved.map_err(|error| Exit::Data.because(format!("cannot write {}: {error}", path.display())))?;
    Ok(Some(path))
}

/// One sample of `[sample, 1, x, y]`, on the CPU.
fn field(fields: &Tensor, sample: usize) -> Result<Field> {
    let field = fields.f_select(0, sample as i64)?.f_select(0, 0)?;
    let field = field.f_to_device(tch::Device::Cpu)?.f_to_kind(Kind::Double)?.f_contiguous()?;
    let (rows, cols) = field.size2()?;
    Ok(Field { rows: rows as usize, cols: cols as usize, values: to_vec(&field)? })
}
