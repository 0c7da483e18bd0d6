//! Reads damaged copies of a data set: `reader CONFIG PATH SEED FROM TO` changes some bytes of the file or folder PATH for each number
//! from FROM to TO, the same for the same seed and number, and reads what came of it as `CONFIG`, the `[data]` of a run in JSON,
//! says. Prints each number before it reads, and at the end how many copies were read, how many of those with the values of
//! the original, how many the helper did not survive, and the most memory that it had, in KiB. An error that does not name the file is its own end.
//!
//! A process of its own: the test that starts this one sees where it crashes.
#![expect(clippy::print_stdout, reason = "its report is its standard output")]

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use isobar_data::{DataConfig, Error, Window};

fn main() -> Result<ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [config, path, numbers @ ..] = &args[..] else { bail!("usage: reader CONFIG PATH SEED FROM TO") };
    let numbers: Vec<u64> = numbers.iter().map(|number| number.parse()).collect::<Result<_, _>>()?;
    let [seed, from, to] = numbers[..] else { bail!("usage: reader CONFIG PATH SEED FROM TO") };
    let config: DataConfig = serde_json::from_str(config)?;
    let path = Path::new(path);
    let original = read(&config, path)?;
    let files = files(path)?;
    let folder = tempfile::tempdir()?;
    let [mut good, mut equal, mut rejected] = [0; 3];
    for number in from..to {
        println!("{number}");
        // A path of its own: two files of one length can have the same times.
        let own = folder.path().join(number.to_string());
        let copy = own.join(path.file_name().context("no name")?);
        write_damaged(&copy, &files, seed, number)?;
        match read(&config, &copy) {
            Ok(values) => {
                good += 1;
                equal += u64::from(values == original);
            }
            Err(error) if !error.to_string().contains(&*copy.to_string_lossy()) => {
                bail!("copy {number}: the error does not name the file: {error}");
            }
            Err(error) => rejected += u64::from(matches!(error, Error::Rejected { .. })),
        }
        fs::remove_dir_all(&own)?;
    }
    println!("read {good} equal {equal} rejected {rejected} memory {}", peak()?);
    Ok(ExitCode::SUCCESS)
}

/// All that a run would read, but no more than a few frames and points of it.
fn read(config: &DataConfig, path: &Path) -> isobar_data::Result<Vec<u32>> {
    let data = DataConfig { path: path.to_owned().into(), ..config.clone() }.open_all()?;
    let few = |count: usize| 0..count.min(9);
    let points: Vec<Range<usize>> = data.dims().iter().map(|dim| few(dim.coordinates.len())).collect();
    let window = Window { frames: few(data.times().map_or(1, <[f64]>::len)), points };
    let samples: Vec<usize> = few(data.samples()).collect();
    let mut all = Vec::new();
    for variable in data.variables() {
        let names = [variable.name.as_str()];
        let values = data.read(&window, &samples, &names)?.f_flatten(0, -1)?;
        all.extend(Vec::<f32>::try_from(values)?.into_iter().map(f32::to_bits));
        data.statistics(&names, 0..1)?;
    }
    Ok(all)
}

/// The files of a file or folder, by their paths below it.
fn files(path: &Path) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    if path.is_file() {
        return Ok(vec![(PathBuf::new(), fs::read(path)?)]);
    }
    let mut all = Vec::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let below = files(&entry.path())?.into_iter();
        all.extend(below.map(|(own, bytes)| (Path::new(&entry.file_name()).join(own), bytes)));
    }
    all.sort();
    Ok(all)
}

/// Writes a copy, one of whose files is damaged.
fn write_damaged(copy: &Path, files: &[(PathBuf, Vec<u8>)], seed: u64, number: u64) -> Result<()> {
    let chosen = Random::new(!seed, number).below(files.len());
    for (at, (own, bytes)) in files.iter().enumerate() {
        // A path with nothing appended: appending an empty one would end it with a slash.
        let target: PathBuf = copy.components().chain(own.components()).collect();
        fs::create_dir_all(target.parent().context("no folder")?)?;
        if at == chosen { fs::write(target, damage(bytes, seed, number))? } else { fs::write(target, bytes)? }
    }
    Ok(())
}

/// A copy with some bytes changed: bits, words that stand for lengths and places, zeroed blocks, or its end cut off.
fn damage(whole: &[u8], seed: u64, number: u64) -> Vec<u8> {
    let mut bytes = whole.to_vec();
    if bytes.is_empty() {
        return bytes;
    }
    let mut random = Random::new(seed, number);
    for _ in 0..=random.below(3) {
        let at = random.below(bytes.len());
        let end = bytes.len();
        match random.below(8) {
            0..4 => bytes[at] ^= 1 << random.below(8),
            4 => bytes[at] = random.next() as u8,
            5 | 6 => {
                let words = [0, 1, 255, u64::MAX, 1 << 31, 1 << 32, 1 << 62, end as u64, at as u64];
                let word = words[random.below(words.len())].to_le_bytes();
                let length = [1, 2, 4, 8][random.below(4)].min(end - at);
                bytes[at..at + length].copy_from_slice(&word[..length]);
            }
            _ => bytes[at..end.min(at + 32)].fill(0),
        }
    }
    if random.below(16) == 0 {
        bytes.truncate(1 + random.below(bytes.len()));
    }
    bytes
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn new(seed: u64, number: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ number)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// The most memory that this process had, in KiB.
fn peak() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
