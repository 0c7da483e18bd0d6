//! Benchmark of reading windows of the files that `benches/data.py` writes.

use std::path::Path;

use anyhow::{Result, ensure};
use isobar_collectives::{Group, balanced};
use isobar_data::{DataConfig, Window};

use super::{Prepared, Timed};
use isobar_command::exit::{Because, Exit};

/// Folder of the files, below the workspace.
const FOLDER: &str = ".peers/data";
const SHAPE: [usize; 3] = [384, 240, 480];
const FRAMES: usize = 2;
/// Number of windows that a step reads.
const WINDOWS: usize = 16;

/// Reads windows of two frames of a file: each rank its own rows, and all columns. Each step reads different windows.
pub(super) fn windows(group: &Group, file: &str, format: &str) -> Result<Prepared> {
    let path = Path::new(FOLDER).join(file);
    if !path.exists() {
        let how = "run benches/data.py, which writes it, or `cargo xtask bench --data`";
        return Err(Exit::Data.because(format!("there is no {}: {how}", path.display())).into());
    }
    let config = DataConfig {
        path: path.into(),
        format: format.into(),
        fields: vec!["u".to_owned()],
        ..DataConfig::default()
    };
    let data = config.open_all()?;
    let extents: Vec<usize> = data.dims().iter().map(|dim| dim.coordinates.len()).collect();
    let frames = data.times().map_or(0, <[f64]>::len);
    let shape = [&[frames], &extents[..]].concat();
    ensure!(
        shape == SHAPE,
        "`u` of {} has shape {shape:?}, expected {SHAPE:?}; delete the file and run benches/data.py, which writes it",
        data.path().display()
    );
    let sizes = balanced(SHAPE[1] as i64, group.size());
    let start: i64 = sizes[..group.rank()].iter().sum();
    let rows = start as usize..(start + sizes[group.rank()]) as usize;
    let mut count = 0;
    let step = move || -> Result<()> {
        count += WINDOWS;
        for at in count - WINDOWS..count {
            let first = at * 37 % (SHAPE[0] - FRAMES);
            let window = Window { frames: first..first + FRAMES, points: vec![rows.clone(), 0..SHAPE[2]] };
            let read = data.read(&window, &[0], &["u"])?;
            let found = read.size()[1];
            ensure!(
                found == FRAMES as i64,
                "a window has {found} frames, expected {FRAMES}; the reader of the format is at fault"
            );
        }
        Ok(())
    };
    Ok(Prepared { timed: Timed::Step(Box::new(step)), output: None })
}
