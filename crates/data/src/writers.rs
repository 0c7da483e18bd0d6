//! The formats that can be written, from this crate and from all others that are linked into the program.
//!
//! A format registers where it stands, with one line: `register_writer!(MyWriter)`.

use std::path::Path;

use isobar_registry::Named;

use crate::content::Content;
use crate::dataset_writer::DatasetWriter;
use crate::logged::LoggedWriter;
use crate::{Error, Result};

/// A format that data sets are written in, by `isobar data convert` and `isobar predict`.
///
/// ```
/// use std::path::Path;
///
/// use isobar_data::{Content, DatasetWriter, Result, WriterFormat};
/// use tch::Tensor;
///
/// /// Counts frames.
/// struct Count(usize);
///
/// impl WriterFormat for Count {
///     const NAME: &'static str = "count";
///     const SUMMARY: &'static str = "Nothing but a count.";
///     fn create(_path: &Path, _content: &Content) -> Result<Box<dyn DatasetWriter>> {
///         Ok(Box::new(Self(0)))
///     }
/// }
///
/// impl DatasetWriter for Count {
///     fn write(&mut self, _variable: &str, _sample: usize, _first: usize, values: &Tensor) -> Result<()> {
///         self.0 += values.size()[0] as usize;
///         Ok(())
///     }
///     fn finish(self: Box<Self>) -> Result<()> {
///         Ok(())
///     }
/// }
///
/// isobar_data::register_writer!(Count);
///
/// assert!(isobar_data::writers().iter().any(|writer| writer.name() == "count"));
/// ```
pub trait WriterFormat: 'static {
    /// Name on command lines.
    const NAME: &'static str;

    /// One sentence on what is written.
    const SUMMARY: &'static str;

    /// Extensions of its files, in lower case and without the dot, by which it is chosen.
    const EXTENSIONS: &'static [&'static str] = &[];

    /// True if ranks write their own parts: one creates the data set, and the others [`join`](WriterFormat::join) it.
    const BY_RANK: bool = false;

    /// Creates a file or folder, which takes its name once it is complete.
    ///
    /// # Errors
    /// Content that the format cannot hold, or a file that cannot be created.
    fn create(path: &Path, content: &Content) -> Result<Box<dyn DatasetWriter>>;

    /// Creates a file or folder that a later call with the same content and `plan` resumes if this process ends before it is
    /// complete; [`is_written`](DatasetWriter::is_written) tells what is there, and [`is_resumable`](DatasetWriter::is_resumable) is
    /// true. Returns `None` if the format cannot continue unfinished files; [`WriterEntry::create_or_resume`] then logs the values.
    ///
    /// # Errors
    /// Those of [`WriterFormat::create`], and a folder that another process is writing.
    fn resume(_path: &Path, _content: &Content, _plan: &str) -> Result<Option<Box<dyn DatasetWriter>>> {
        Ok(None)
    }

    /// Opens what another rank created with the same content, by the path that
    /// [`unfinished`](DatasetWriter::unfinished) gave there.
    ///
    /// # Errors
    /// A format that one rank writes alone, or a file that cannot be opened.
    fn join(_path: &Path, _content: &Content, _unfinished: &Path) -> Result<Box<dyn DatasetWriter>> {
        Err(Error::Invalid(format!("one rank alone writes the format {}", Self::NAME)))
    }
}

/// Registers a type as a format to write: see [`WriterFormat`].
#[macro_export]
macro_rules! register_writer {
    ($writer:ty) => {
        $crate::inventory::submit! { $crate::WriterEntry::of::<$writer>() }
    };
}

/// Creates a data set.
type Create = fn(&Path, &Content) -> Result<Box<dyn DatasetWriter>>;

/// Creates or resumes a data set.
type Resume = fn(&Path, &Content, &str) -> Result<Option<Box<dyn DatasetWriter>>>;

/// Opens a data set that another rank created.
type JoinOther = fn(&Path, &Content, &Path) -> Result<Box<dyn DatasetWriter>>;

/// Entry of the registry of formats to write.
#[derive(Clone, Copy, Debug)]
pub struct WriterEntry {
    name: &'static str,
    summary: &'static str,
    extensions: &'static [&'static str],
    type_name: fn() -> &'static str,
    create: Create,
    resume: Resume,
    by_rank: bool,
    join: JoinOther,
}

inventory::collect!(WriterEntry);

impl Named for WriterEntry {
    fn name(&self) -> &'static str {
        self.name
    }

    fn type_name(&self) -> &'static str {
        (self.type_name)()
    }
}

impl WriterEntry {
    /// Makes the entry of a format.
    pub const fn of<W: WriterFormat>() -> Self {
        Self {
            name: W::NAME,
            summary: W::SUMMARY,
            extensions: W::EXTENSIONS,
            type_name: std::any::type_name::<W>,
            create: W::create,
            resume: W::resume,
            by_rank: W::BY_RANK,
            join: W::join,
        }
    }

    /// Name on command lines.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// One sentence on what is written.
    pub fn summary(&self) -> &'static str {
        self.summary
    }

    /// Returns whether a path has one of its extensions.
    pub fn fits(&self, path: &Path) -> bool {
        let extension =
            path.extension().and_then(|extension| extension.to_str()).map(str::to_ascii_lowercase);
        extension.is_some_and(|extension| self.extensions.contains(&extension.as_str()))
    }

    /// Creates a file or folder.
    ///
    /// # Errors
    /// Those of [`WriterFormat::create`].
    pub fn create(&self, path: &Path, content: &Content) -> Result<Box<dyn DatasetWriter>> {
        (self.create)(path, content)
    }

    /// Creates a file or folder, or resumes the one that an interrupted process of the same plan left.
    ///
    /// If the format cannot resume, the values are also written to a log next to the target, and a resumed writer is given them again, in
    /// the same order. The log takes as much space as the values in float32 until the data set is complete. Of a writer with a log, only
    /// [`write`](DatasetWriter::write) is available: it takes no windows and has no tiles, and other ranks cannot join it. It rejects
    /// variables, samples, frames and shapes that `content` does not have, also if the format does not check them. If the log cannot be
    /// written, a warning says so, and the writer continues without it: see [`is_resumable`](DatasetWriter::is_resumable). So it does
    /// from the beginning if the disk has no room for both, where `free` tells the bytes that are free on the disk of a folder.
    ///
    /// # Errors
    /// Those of [`WriterFormat::create`] and [`WriterFormat::resume`], and a log that cannot be read.
    pub fn create_or_resume(
        &self,
        path: &Path,
        content: &Content,
        plan: &str,
        free: impl Fn(&Path) -> Option<u64>,
    ) -> Result<Box<dyn DatasetWriter>> {
        // Files of another format in the unfinished folder cannot be continued.
        let plan = format!("{}\n{plan}", self.name);
        match (self.resume)(path, content, &plan)? {
            Some(writer) => Ok(writer),
            None => {
                Ok(Box::new(LoggedWriter::create_or_resume((&self.create, &free), path, content, &plan)?))
            }
        }
    }

    /// Returns whether ranks write their own parts.
    pub fn by_rank(&self) -> bool {
        self.by_rank
    }

    /// Opens what another rank created.
    ///
    /// # Errors
    /// Those of [`WriterFormat::join`].
    pub fn join(&self, path: &Path, content: &Content, unfinished: &Path) -> Result<Box<dyn DatasetWriter>> {
        (self.join)(path, content, unfinished)
    }
}

/// Returns all registered formats to write, sorted by name.
pub fn writers() -> Vec<WriterEntry> {
    let mut all: Vec<WriterEntry> = inventory::iter::<WriterEntry>().copied().collect();
    all.sort_by_key(|writer| writer.name);
    all
}

/// Finds a format to write by its name, or without one by the extension of a path.
///
/// # Errors
/// A name or an extension that no format has; the error lists the formats.
pub fn writer(name: Option<&str>, path: &Path) -> Result<WriterEntry> {
    let all = writers();
    if let Some(name) = name {
        return isobar_registry::find("output format", name, &all).map_err(Error::Config);
    }
    all.iter().find(|writer| writer.fits(path)).copied().ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|writer| writer.name).collect();
        Error::Config(format!(
            "{}: its extension names no format that can be written; name one of {}",
            path.display(),
            names.join(", ")
        ))
    })
}
