//! Reads everything that readers may read of a file, except most of its values.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use hdf5_metno::types::TypeDescriptor;
use hdf5_metno::{Dataset, H5Type, MinorErrorCode};

use crate::hdf5::attribute::Attributes;
use crate::hdf5::layout::{Node, read_window};
use crate::hdf5::stored::Stored;
use crate::{Error, Result};

/// Largest dataset that is read in full; of larger datasets, the largest chunk that is read, in bytes.
const MOST_BYTES: usize = 4 << 20;

/// Largest chunk of a dataset that is read in full, in bytes.
const MOST_CHUNK_BYTES: usize = 64 << 20;

/// Names of attributes that readers look up. In a damaged file, a look-up may find an attribute that the list omits.
const NAMES: [&str; 41] = [
    "CLASS",
    "DIMENSION_LABELS",
    "NAME",
    "_FillValue",
    "_Netcdf4Coordinates",
    "_Netcdf4Dimid",
    "_Unsigned",
    "add_offset",
    "associated_dims",
    "associated_fields",
    "axes",
    "bc_type",
    "beta",
    "calendar",
    "cell_methods",
    "comment",
    "dataset_name",
    "dim_varying",
    "field_names",
    "grid_type",
    "history",
    "institution",
    "long_name",
    "missing_value",
    "n_spatial_dims",
    "n_trajectories",
    "nu",
    "periodic",
    "references",
    "sample_varying",
    "scale_factor",
    "simulation_parameters",
    "source",
    "spatial_dims",
    "standard_name",
    "time_varying",
    "title",
    "units",
    "valid_max",
    "valid_min",
    "valid_range",
];

/// Opens a file and reads its groups, attributes, chunk indices, small datasets, and the first and last value of larger ones.
/// Leaves errors other than those of [`Verdict`] to the reader.
pub(super) fn visit(path: &Path) -> Verdict {
    let mut visitor = Visitor::default();
    // Panics of the bindings are errors, too.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        let read = visitor.file(path);
        visitor.note(read);
    }));
    visitor.verdict
}

/// Verdict on a file that did not crash the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Verdict {
    #[default]
    Good,
    /// The library asked for more memory than it may take.
    OutOfMemory,
    /// The attributes of an object cannot be listed, so that a look-up of one might crash.
    Unlisted,
}

#[derive(Default)]
struct Visitor {
    verdict: Verdict,
}

impl Visitor {
    fn note<T>(&mut self, result: Result<T>) {
        if let Err(Error::Hdf5 { source, .. }) = result {
            let is_space = |code| code == MinorErrorCode::NoSpace;
            if source.stack().is_some_and(|stack| stack.minor_codes().any(is_space)) {
                self.verdict = Verdict::OutOfMemory;
            }
        }
    }

    fn file(&mut self, path: &Path) -> Result<()> {
        let root = Node::open_directly(path)?;
        self.group(&root);
        let (groups, datasets) = root.members_below()?;
        for name in groups {
            match root.group(&name) {
                Ok(group) => self.group(&group),
                failed => self.note(failed),
            }
        }
        for name in datasets {
            let _ = catch_unwind(AssertUnwindSafe(|| self.dataset(&root, &name)));
        }
        Ok(())
    }

    fn group(&mut self, group: &Node<'_>) {
        let attributes = Attributes::of_group(group);
        self.attributes(group, &attributes, group.group.attr_names());
    }

    fn dataset(&mut self, root: &Node<'_>, name: &str) {
        // Some readers read attributes of datasets whose values they skip.
        if let Ok(dataset) = root.group.dataset(name) {
            let attributes = Attributes::of_dataset(root, &dataset, name);
            self.attributes(root, &attributes, dataset.attr_names());
        }
        match root.dataset(name) {
            Ok(dataset) => {
                let _ = dataset.num_chunks();
                let read = self.values(root, dataset, name);
                self.note(read);
            }
            failed => self.note(failed),
        }
    }

    /// Reads attributes as every type that readers ask for.
    fn attributes(&mut self, node: &Node<'_>, of: &Attributes<'_>, names: hdf5_metno::Result<Vec<String>>) {
        let Ok(mut names) = names else {
            self.verdict = Verdict::Unlisted;
            return;
        };
        names.extend(NAMES.map(str::to_owned));
        let mut further = Vec::new();
        for name in &names {
            let numbers = of.numbers(name);
            if matches!(numbers, Err(Error::MissingAttribute { .. })) {
                continue;
            }
            self.note(numbers);
            self.note(of.flags(name));
            match of.texts(name) {
                // A list of names of attributes, such as The Well's `simulation_parameters`.
                Ok(texts) => further.extend(texts.into_iter().take(64)),
                failed => self.note(failed),
            }
        }
        self.note(of.dimension_scales(&node.group));
        for name in further {
            self.note(of.numbers(&name));
        }
    }

    fn values(&mut self, root: &Node<'_>, dataset: Dataset, name: &str) -> Result<()> {
        let kind = root.kind(&dataset, name)?;
        let (shape, chunk, width) = (dataset.shape(), dataset.chunk().unwrap_or_default(), kind.size());
        let stored = Stored::new(root.path, dataset, root.full(name));
        let bytes = |extents: &[usize]| extents.iter().fold(width, |bytes, &of| bytes.saturating_mul(of));
        // A dataset of few values may declare a chunk of any size, for which the helper may have no memory.
        let windows: Vec<Vec<Range<usize>>> = if bytes(&chunk) > MOST_CHUNK_BYTES {
            Vec::new()
        } else if bytes(&shape) <= MOST_BYTES {
            vec![shape.iter().map(|&extent| 0..extent).collect()]
        } else if bytes(&chunk) <= MOST_BYTES {
            let last = shape.iter().map(|&extent| extent.saturating_sub(1)..extent).collect();
            vec![shape.iter().map(|&extent| 0..extent.min(1)).collect(), last]
        } else {
            Vec::new()
        };
        for window in windows.iter().filter(|window| !window.iter().any(Range::is_empty)) {
            if stored.read(window)?.is_some() {
                continue;
            }
            match kind {
                TypeDescriptor::Float(_) => {
                    self.window::<f32>(root, &stored, window);
                    self.window::<f64>(root, &stored, window);
                }
                TypeDescriptor::Integer(_) | TypeDescriptor::Unsigned(_) | TypeDescriptor::Boolean => {
                    self.window::<i8>(root, &stored, window);
                    self.window::<i32>(root, &stored, window);
                    self.window::<i64>(root, &stored, window);
                    self.window::<u64>(root, &stored, window);
                }
                _ => (),
            }
        }
        Ok(())
    }

    fn window<T: H5Type>(&mut self, root: &Node<'_>, stored: &Stored, window: &[Range<usize>]) {
        self.note(read_window::<T>(root.path, stored, "values", window));
    }
}
