//! Resumes formats whose unfinished files cannot be continued: values are logged, and a later writer replays the log.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};

use isobar_torch::memory;
use tch::{Device, Kind, Tensor};

use crate::boxes::check_range;
use crate::content::{Content, StoredAxes};
use crate::dataset_writer::DatasetWriter;
use crate::unfinished::Unfinished;
use crate::{Error, Result};

/// Name of the log.
const LOG: &str = "values";

/// Name of the folder of the file that is written.
const MADE: &str = "result";

/// Creates a data set.
type Create<'a> = &'a dyn Fn(&Path, &Content) -> Result<Box<dyn DatasetWriter>>;

/// Returns the bytes that are free on the disk of a folder, if they are known.
type Free<'a> = &'a dyn Fn(&Path) -> Option<u64>;

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
        (create, free): (Create<'_>, Free<'_>),
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
        let mut log = Log::open(&folder.path().join(LOG), content, plan)?;
        log.keep_if_it_fits(content.bytes(), free(folder.path()))?;
        let frames = content.meta.samples.saturating_mul(content.meta.times.len().max(1));
        let written = vec![vec![false; frames]; content.variables.len()];
        let mut logged = Self { writer, made, folder, log, written };
        logged.log.announce()?;
        while let Some((block, values)) = logged.log.next()? {
            let name = &content.variables[block.variable].name;
            logged.writer.write(name, block.sample, block.first, &values)?;
            logged.mark(&block);
        }
        logged.log.cut()?;
        Ok(logged)
    }

    /// Checks the place and the shape of values, since the writer of a program's own format may not do so.
    fn block(&self, name: &str, sample: usize, first: usize, values: &Tensor) -> Result<Block> {
        let Some(variable) = self.log.position(name) else {
            return Err(Error::MissingField {
                path: self.folder.target().to_owned(),
                field: name.to_owned(),
                found: self.log.variables.iter().map(|(name, _)| name.clone()).collect(),
            });
        };
        let given = values.size();
        let frames = given.first().map_or(0, |&frames| frames as usize);
        let expected = self.log.shape(variable, frames);
        if given != expected {
            return Err(Error::Invalid(format!(
                "values of shape {given:?} were given for `{name}`: expected {expected:?}"
            )));
        }
        check_range("sample range", &(sample..sample.saturating_add(1)), self.log.samples)?;
        check_range("frame range", &(first..first.saturating_add(frames)), self.log.frames)?;
        Ok(Block { variable, sample, first, frames })
    }

    fn mark(&mut self, block: &Block) {
        let first = block.sample * self.log.frames + block.first;
        self.written[block.variable][first..first + block.frames].fill(true);
    }
}

impl DatasetWriter for LoggedWriter {
    fn write(&mut self, variable: &str, sample: usize, first: usize, values: &Tensor) -> Result<()> {
        let block = self.block(variable, sample, first, values)?;
        // The writer checks the values before they are logged.
        self.writer.write(variable, sample, first, values)?;
        self.log.append(&block, values);
        self.mark(&block);
        Ok(())
    }

    fn unfinished(&self) -> Option<&Path> {
        Some(self.folder.path())
    }

    fn is_resumable(&self) -> bool {
        self.log.file.is_some()
    }

    fn is_written(&self, variable: &str, sample: usize, frames: Range<usize>) -> bool {
        if frames.end > self.log.frames {
            return false;
        }
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

/// Log of blocks with their values in float32. Each block ends with a digest of its contents and of the plan; reading stops at the first
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
    /// Name and axes of each variable.
    variables: Vec<(String, StoredAxes)>,
}

/// Returns whether there is no room for more on the disk, or for this user.
fn is_of_full_disk(error: &Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error, Error::Io { source, .. } if matches!(source.kind(), StorageFull | QuotaExceeded))
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
            variables: variables
                .map(|variable| (variable.name.clone(), StoredAxes::new(content, variable)))
                .collect(),
        })
    }

    /// Empties the log, and logs nothing, if `free` bytes have no room for the target and all values, `bytes` each.
    fn keep_if_it_fits(&mut self, bytes: u64, free: Option<u64>) -> Result<()> {
        let (Some(file), Some(free)) = (&self.file, free) else { return Ok(()) };
        let failed = |error| Error::io(&self.path, "look at it", error);
        let there = file.metadata().map_err(failed)?.len();
        if free.saturating_add(there) >= bytes.saturating_mul(2) {
            return Ok(());
        }
        tracing::warn!(
            "{free} bytes are free, expected twice the {bytes} bytes of the values: they are not logged, and a process that is \
             interrupted cannot be resumed"
        );
        file.set_len(0).map_err(|error| Error::io(&self.path, "empty it", error))?;
        self.file = None;
        Ok(())
    }

    fn position(&self, variable: &str) -> Option<usize> {
        self.variables.iter().position(|(name, _)| name == variable)
    }

    /// Shape of frames of a variable.
    fn shape(&self, variable: usize, frames: usize) -> Vec<i64> {
        let axes = &self.variables[variable].1;
        [frames, axes.channels()].iter().chain(axes.grid()).map(|&extent| extent as i64).collect()
    }

    /// Reports that the log of an interrupted writer is replayed, which takes long for a long log.
    fn announce(&self) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let bytes = file.metadata().map_err(|error| Error::io(&self.path, "look at it", error))?.len();
        if bytes > 0 {
            let path = self.path.display();
            tracing::info!(
                "replaying the values that an interrupted process logged: {bytes} bytes of {path}"
            );
        }
        Ok(())
    }

    /// Returns the next block and its values; `None` after the last complete one.
    fn next(&mut self) -> Result<Option<(Block, Tensor)>> {
        let read = self.read().map_err(|error| Error::io(&self.path, "read it", error))?;
        let Some((block, values)) = read else { return Ok(None) };
        let shape = self.shape(block.variable, block.frames);
        Ok(Some((block, memory::from_vec(values, &shape)?)))
    }

    fn read(&mut self) -> io::Result<Option<(Block, Vec<f32>)>> {
        let Some(file) = &self.file else { return Ok(None) };
        let (mut file, left) = (file, file.metadata()?.len().saturating_sub(self.length));
        if left < OVERHEAD {
            return Ok(None);
        }
        let mut header = [[0; 8]; 4];
        file.read_exact(header.as_flattened_mut())?;
        let [variable, sample, first, frames] = header.map(u64::from_le_bytes);
        let fits = variable < self.variables.len() as u64
            && sample < self.samples as u64
            && first.checked_add(frames).is_some_and(|end| end <= self.frames as u64);
        if !fits {
            return Ok(None);
        }
        let [variable, sample, first, frames] =
            [variable, sample, first, frames].map(|number| number as usize);
        let axes = &self.variables[variable].1;
        let extents = [frames, axes.channels(), size_of::<f32>()];
        let bytes =
            extents.iter().chain(axes.grid()).try_fold(1_usize, |all, &extent| all.checked_mul(extent));
        let Some(bytes) = bytes.filter(|&bytes| bytes as u64 <= left - OVERHEAD) else { return Ok(None) };
        let block = Block { variable, sample, first, frames };
        let (mut hasher, mut values) = (self.hasher(&block), Vec::with_capacity(bytes / size_of::<f32>()));
        let mut piece = vec![0; bytes.min(PIECE)];
        for start in (0..bytes).step_by(PIECE) {
            let piece = &mut piece[..PIECE.min(bytes - start)];
            file.read_exact(piece)?;
            hasher.write(piece);
            values.extend(piece.as_chunks().0.iter().map(|&number| f32::from_le_bytes(number)));
        }
        let mut digest = [0; 8];
        file.read_exact(&mut digest)?;
        if hasher.finish() != u64::from_le_bytes(digest) {
            return Ok(None);
        }
        self.length += OVERHEAD + bytes as u64;
        Ok(Some((block, values)))
    }

    /// Removes an incomplete block at the end; blocks are appended from here on.
    fn cut(&mut self) -> Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let cut = file.set_len(self.length).and_then(|()| file.seek(SeekFrom::Start(self.length)));
        cut.map(drop).map_err(|error| Error::io(&self.path, "remove an incomplete block", error))
    }

    /// Appends a block. If that fails, for example on a full disk, a warning says so, and the log ends at its last complete block.
    fn append(&mut self, block: &Block, values: &Tensor) {
        let Some(mut file) = self.file.take() else { return };
        match self.put(&mut file, block, values) {
            Ok(bytes) => {
                self.length += bytes;
                self.file = Some(file);
            }
            Err(error) => {
                let next = if is_of_full_disk(&error) {
                    // The target may fit in the space of the log.
                    self.length = 0;
                    "starts again"
                } else {
                    "resumes at the last value in the log"
                };
                tracing::warn!(
                    "no more values are logged: {error}; if this process is interrupted, the next one {next}"
                );
                // Reading stops at an incomplete block that cannot be removed.
                let _ = file.set_len(self.length);
            }
        }
    }

    /// Writes a block and returns its length in bytes.
    fn put(&self, file: &mut File, block: &Block, values: &Tensor) -> Result<u64> {
        let mut length = 0;
        let mut put = |bytes: &[u8]| {
            length += bytes.len() as u64;
            file.write_all(bytes).map_err(|error| Error::io(&self.path, "write it", error))
        };
        let header = [block.variable, block.sample, block.first, block.frames].map(|number| number as u64);
        put(header.map(u64::to_le_bytes).as_flattened())?;
        let stored = values.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?.f_contiguous()?;
        let mut hasher = self.hasher(block);
        // In pieces, so that the bytes of a large block are not in memory twice.
        for piece in stored.f_view(-1)?.f_split((PIECE / size_of::<f32>()) as i64, 0)? {
            let piece: Vec<f32> = memory::to_vec(&piece)?;
            let piece: Vec<u8> = piece.into_iter().flat_map(f32::to_le_bytes).collect();
            hasher.write(&piece);
            put(&piece)?;
        }
        put(&hasher.finish().to_le_bytes())?;
        Ok(length)
    }

    /// Hasher of a block, before its values.
    fn hasher(&self, block: &Block) -> DefaultHasher {
        let mut hasher = DefaultHasher::new();
        hasher.write(self.plan.as_bytes());
        for number in [block.variable, block.sample, block.first, block.frames] {
            hasher.write_usize(number);
        }
        hasher
    }
}

/// Bytes of a block besides its values: four numbers before them, and the digest after them.
const OVERHEAD: u64 = 40;

/// Bytes of the values that are read, written and hashed at a time.
const PIECE: usize = 1 << 20;
