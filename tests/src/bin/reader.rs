//! Reads damaged copies of a data set: `reader darcy|well FILE SEED FROM TO` changes some bytes of FILE for each number from FROM
//! to TO, the same for the same seed and number, and reads what came of it. Prints each number before it reads, and at the end
//! how many were read as if they were whole and the most memory that it had, in KiB.
//!
//! A process of its own, since what reads is a library in C: the test that starts this one sees where it crashes.
#![expect(clippy::print_stdout, reason = "its report is its standard output")]

use std::path::Path;

use anyhow::{Context, Result, bail};
use isobar_data::{DarcyFile, WellFile};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [kind, file, numbers @ ..] = &args[..] else { bail!("usage: reader KIND FILE SEED FROM TO") };
    let numbers: Vec<u64> = numbers.iter().map(|number| number.parse()).collect::<Result<_, _>>()?;
    let [seed, from, to] = numbers[..] else { bail!("usage: reader KIND FILE SEED FROM TO") };
    let whole = std::fs::read(file)?;
    let folder = tempfile::tempdir()?;
    let damaged = folder.path().join("damaged.h5");
    let mut read = 0;
    for number in from..to {
        println!("{number}");
        std::fs::write(&damaged, damage(&whole, seed, number))?;
        let result = if kind == "darcy" { darcy(&damaged) } else { well(&damaged) };
        read += u64::from(result.is_ok());
    }
    println!("read {read} memory {}", peak()?);
    Ok(())
}

/// All that a run would read, and no more than a few samples of it.
fn darcy(path: &Path) -> Result<()> {
    let file = DarcyFile::open(path)?;
    let (samples, rows, cols) = (file.len().min(3), file.rows().min(9), file.cols().min(9));
    for sample in 0..samples {
        let _ = file.read(&[sample], 0..rows, 0..cols)?;
    }
    file.statistics(0..samples)?;
    Ok(())
}

fn well(path: &Path) -> Result<()> {
    let file = WellFile::open(path)?;
    let fields: Vec<&str> = file.fields().iter().map(|field| field.name()).collect();
    let window: Vec<_> = file.grid().iter().map(|&points| 0..points.min(9)).collect();
    let _ = file.read(&fields, 0, 0..file.frames().min(3), &window)?;
    file.statistics(&fields, 0..1)?;
    Ok(())
}

/// A copy with some bytes changed: bits, words that stand for lengths and places, zeroed blocks, or its end cut off.
fn damage(whole: &[u8], seed: u64, number: u64) -> Vec<u8> {
    let mut bytes = whole.to_vec();
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ number);
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
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
