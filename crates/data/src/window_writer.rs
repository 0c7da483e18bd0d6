//! The writer of formats that store each window as it comes.

use std::ops::Range;
use std::path::{Path, PathBuf};

use tch::Tensor;

use crate::content::{Checked, Content, StoredAxes};
use crate::dataset_writer::DatasetWriter;
use crate::grid::DataVariable;
use crate::{Error, Result};

/// Storage of a [`WindowWriter`]: a format's file.
pub(crate) trait WindowStore {
    /// Handle of the storage of one variable, such as a dataset.
    type Handle;

    /// Writes a window that is not empty. Its axes are the [`StoredAxes`] of the variable, and `values` are in their order.
    fn write(
        &self,
        handle: &Self::Handle,
        variable: &str,
        window: &[Range<usize>],
        values: &[f32],
    ) -> Result<()>;

    /// Renames the file into place, once all values are written.
    fn finish(self, handles: Vec<Self::Handle>) -> Result<()>;
}

/// Writes windows of frames to a store. Checks each of them, and at the end that all frames are complete.
pub(crate) struct WindowWriter<S: WindowStore> {
    store: S,
    target: PathBuf,
    /// True if NaN marks missing values.
    missing: bool,
    variables: Vec<Variable<S::Handle>>,
}

struct Variable<P> {
    name: String,
    axes: StoredAxes,
    handle: P,
    /// Points of each channel that were written, by sample and frame.
    written: Vec<usize>,
}

impl<S: WindowStore> WindowWriter<S> {
    /// Creates a writer of the file `target`, with a handle for each variable of the content.
    pub(crate) fn new(store: S, target: &Path, content: &Content, handles: Vec<S::Handle>) -> Self {
        let variable = |(variable, handle): (&DataVariable, S::Handle)| {
            let axes = StoredAxes::new(content, variable);
            let written = vec![0; axes.all_frames()];
            Variable { name: variable.name.clone(), axes, handle, written }
        };
        let variables = content.variables.iter().zip(handles).map(variable).collect();
        Self { store, target: target.to_owned(), missing: content.meta.missing, variables }
    }
}

impl<S: WindowStore> DatasetWriter for WindowWriter<S> {
    fn write(&mut self, variable: &str, sample: usize, first: usize, values: &Tensor) -> Result<()> {
        let of = self.variables.iter().find(|known| known.name == variable);
        let all = of.map(|of| of.axes.all_points()).unwrap_or_default();
        self.write_window(variable, sample, first, &all, values)
    }

    fn takes_windows(&self) -> bool {
        true
    }

    fn write_window(
        &mut self,
        variable: &str,
        sample: usize,
        first: usize,
        points: &[Range<usize>],
        values: &Tensor,
    ) -> Result<()> {
        let Some(at) = self.variables.iter().position(|known| known.name == variable) else {
            return Err(Error::MissingField {
                path: self.target.clone(),
                field: variable.to_owned(),
                found: self.variables.iter().map(|variable| variable.name.clone()).collect(),
            });
        };
        let of = &mut self.variables[at];
        let file = (self.target.as_path(), self.missing);
        let checked = of.axes.checked(file, variable, (sample, first), points, values)?;
        let Some(Checked { frames, window, values }) = checked else { return Ok(()) };
        self.store.write(&of.handle, variable, &window, &values)?;
        let points: usize = points.iter().map(Range::len).product();
        let before = sample * of.axes.frame_count();
        let written = &mut of.written[before + frames.start..before + frames.end];
        written.iter_mut().for_each(|written| *written = written.saturating_add(points));
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        for variable in &self.variables {
            let (frames, points) = (variable.axes.frame_count(), variable.axes.grid().iter().product());
            if let Some(at) = variable.written.iter().position(|&written| written < points) {
                return Err(Error::Invalid(format!(
                    "frame {} of sample {} of `{}` was not written; add it first",
                    at % frames,
                    at / frames,
                    variable.name
                )));
            }
        }
        let Self { store, variables, .. } = *self;
        store.finish(variables.into_iter().map(|variable| variable.handle).collect())
    }
}
