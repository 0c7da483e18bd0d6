//! Resumes formats whose unfinished files cannot be continued: values are logged, and a later writer replays the log.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher as _};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};

use isobar_torch::memory;
use tch::{Device, Kind, Tensor};

use crate::content::Content;
use crate::dataset::DatasetWriter;
use crate::unfinished::Unfinished;
use crate::{Error, Result};

/// Name of the log.
const LOG: &str = "values";

/// Name of the folder of the file that is written.
const MADE: &str = "result";

/// Creates a data set.
type Create<'a> = &'a dyn Fn(&Path, &Content) -> Result<Box<dyn DatasetWriter>>;

/// Writer of any format that also logs the values. If a process is interrupted, the next one with the same plan
/// recreates the file and replays the log in order; the result is byte-identical to an uninterrupted write.
pub(crate) struct LoggedWriter {
    writer: Box<dyn DatasetWriter>,
    /// File or folder that `writer` makes, in the unfinished folder.
    made: PathBuf,
    folder: Unfinished,
    log: Log,
    /// Frames that were written, by variable, sample and frame.
    written: Vec<Vec<bool>>,
}

impl LoggedWriter {
    pub(crate) fn create_or_resume(
        create: Create<'_>,
        target: &Path,
        content: &Content,
        plan: &str,
    ) -> Result<Self> {
        // Rejects unsupported content and an existing target before anything is written to the unfinished folder.
        drop(create(target, content)?);
        let (folder, _) = Unfinished::of_plan(target, plan)?;
        let results = folder.path().join(MADE);
        let failed = |error| Error::io(&results, "make the folder", error);
        match fs::remove_dir_all(&results) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => fs::create_dir(&results).map_err(failed)?,
        }
        let made = results.join(target.file_name().unwrap_or_default());
        let writer = create(&made, content)?;
        let log = Log::open(&folder.path().join(LOG), content, plan)?;
        let frames = content.meta.samples.saturating_mul(content.meta.times.len().max(1));
        let written = vec![vec![false; frames]; content.variables.len()];
        let mut logged = Self { writer, made, folder, log, written };
        while let Some((block, values)) = logged.log.next()? {
            let name = &content.variables[block.variable].name;
            logged.writer.write(name, block.sample, block.first, &values)?;
            logged.mark(&block);
        }
        logged.log.cut()?;
        Ok(logged)
    }

    fn mark(&mut self, block: &Block) {
        let first = block.sample * self.log.frames + block.first;
        self.written[block.variable][first..first + block.frames].fill(true);
    }
}

impl DatasetWriter for LoggedWriter {
    fn write(&mut self, variable: &str, sample: usize, first: usize, values: &Tensor) -> Result<()> {
        // The writer checks the values before they are logged.
        self.writer.write(variable, sample, first, values)?;
        let frames = values.size().first().map_or(0, |&frames| frames as usize);
        if let Some(variable) = self.log.position(variable) {
            let block = Block { variable, sample, first, frames };
            self.log.append(&block, values)?;
            self.mark(&block);
        }
        Ok(())
    }

    fn unfinished(&self) -> Option<&Path> {
        Some(self.folder.path())
    }

    fn is_written(&self, variable: &str, sample: usize, frames: Range<usize>) -> bool {
        let first = sample.saturating_mul(self.log.frames);
        let range = first.saturating_add(frames.start)..first.saturating_add(frames.end);
        let written = self.log.position(variable).and_then(|at| self.written[at].get(range));
        written.is_some_and(|frames| frames.iter().all(|&is_written| is_written))
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let Self { writer, made, folder, .. } = *self;
        writer.finish()?;
        folder.finish_with(&made)
    }
}

/// Consecutive frames of a variable and sample.
#[derive(Debug)]
struct Block {
    variable: usize,
    sample: usize,
    first: usize,
    frames: usize,
}

/// Log of blocks with their values in float32. Each block has a digest of its contents and of the plan; reading stops at the first
/// block that is incomplete, damaged or of another plan.
struct Log {
    /// `None` after the log could not be written.
    file: Option<File>,
    path: PathBuf,
    /// Bytes of complete blocks.
    length: u64,
    plan: String,
    samples: usize,
    frames: usize,
    grid: Vec<usize>,
    /// Name and channels of each variable.
    variables: Vec<(String, usize)>,
}

impl Log {
    fn open(path: &Path, content: &Content, plan: &str) -> Result<Self> {
        let mut options = File::options();
        let _ = options.read(true).write(true).create(true).truncate(false);
        let file = options.open(path).map_err(|error| Error::io(path, "open it", error))?;
        let variables = content.variables.iter();
        Ok(Self {
            file: Some(file),
            path: path.to_owned(),
            length: 0,
            plan: plan.to_owned(),
            samples: content.meta.samples,
            frames: content.meta.times.len().max(1),
            grid: content.dims.iter().map(|dim| dim.coordinates.len()).collect(),
            variables: variables.map(|variable| (variable.name.clone(), variable.channels.len())).collect(),
        })
    }

    fn position(&self, variable: &str) -> Option<usize> {
        self.variables.iter().position(|(name, _)| name == variable)
    }

    /// Returns the next block and its values; `None` after the last complete one.
    fn next(&mut self) -> Result<Option<(Block, Tensor)>> {
        let read = self.read().map_err(|error| Error::io(&self.path, "read it", error))?;
        let Some((block, bytes)) = read else { return Ok(None) };
        let values: Vec<f32> = bytes.as_chunks().0.iter().map(|&number| f32::from_le_bytes(number)).collect();
        let shape = [block.frames, self.variables[block.variable].1];
        let shape: Vec<i64> = shape.iter().chain(&self.grid).map(|&extent| extent as i64).collect();
        Ok(Some((block, Tensor::f_from_slice(&values)?.f_view(&shape[..])?)))
    }

    fn read(&mut self) -> io::Result<Option<(Block, Vec<u8>)>> {
        let Some(file) = &mut self.file else { return Ok(None) };
        let left = file.metadata()?.len().saturating_sub(self.length);
        if left < HEADER {
            return Ok(None);
        }
        let mut header = [[0; 8]; 5];
        file.read_exact(header.as_flattened_mut())?;
        let [variable, sample, first, frames, digest] = header.map(u64::from_le_bytes);
        let fits = variable < self.variables.len() as u64
            && sample < self.samples as u64
            && first.checked_add(frames).is_some_and(|end| end <= self.frames as u64);
        if !fits {
            return Ok(None);
        }
        let [variable, sample, first, frames] =
            [variable, sample, first, frames].map(|number| number as usize);
        let extents = [frames, self.variables[variable].1, size_of::<f32>()];
        let bytes =
            extents.iter().chain(&self.grid).try_fold(1_usize, |all, &extent| all.checked_mul(extent));
        let Some(bytes) = bytes.filter(|&bytes| bytes as u64 <= left - HEADER) else { return Ok(None) };
        let mut values = vec![0; bytes];
        file.read_exact(&mut values)?;
        let block = Block { variable, sample, first, frames };
        if self.digest(&block, &values) != digest {
            return Ok(None);
        }
        self.length += HEADER + bytes as u64;
        Ok(Some((block, values)))
    }

    /// Removes an incomplete block at the end; blocks are appended from here on.
    fn cut(&mut self) -> Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let cut = file.set_len(self.length).and_then(|()| file.seek(SeekFrom::Start(self.length)));
        cut.map(drop).map_err(|error| Error::io(&self.path, "remove an incomplete block", error))
    }

    /// Appends a block. If the file cannot be written, for example on a full disk, the log is given up with a warning.
    fn append(&mut self, block: &Block, values: &Tensor) -> Result<()> {
        if self.file.is_none() {
            return Ok(());
        }
        let stored = values.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?.f_contiguous()?;
        let stored: Vec<f32> = memory::to_vec(&stored)?;
        let values: Vec<u8> = stored.iter().flat_map(|value| value.to_le_bytes()).collect();
        let digest = self.digest(block, &values);
        let header = [block.variable, block.sample, block.first, block.frames].map(|number| number as u64);
        let header: Vec<u8> =
            header.iter().chain([&digest]).flat_map(|number| number.to_le_bytes()).collect();
        let Some(file) = &mut self.file else { return Ok(()) };
        if let Err(error) = file.write_all(&header).and_then(|()| file.write_all(&values)) {
            tracing::warn!(
                "this conversion cannot be resumed: {} cannot be written ({error})",
                self.path.display()
            );
            // Frees the space. What cannot be removed ends at its last complete block.
            let _ = file.set_len(0);
            self.file = None;
        }
        Ok(())
    }

    fn digest(&self, block: &Block, values: &[u8]) -> u64 {
        let mut hasher = DefaultHasher::new();
        hasher.write(self.plan.as_bytes());
        for number in [block.variable, block.sample, block.first, block.frames] {
            hasher.write_usize(number);
        }
        hasher.write(values);
        hasher.finish()
    }
}

/// Bytes before the values of a block.
const HEADER: u64 = 40;
