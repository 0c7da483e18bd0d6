//! `isobar data convert`.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher as _};
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use isobar_data::{
    Content, Dataset, DatasetWriter, Dim, PredictionMeta, Storage, Window, choose, digest, writer,
};
use isobar_manager::checks::free_space;
use isobar_manager::format_bytes;
use isobar_manager::logging::show_where_nobody_does;
use isobar_train::config::DataConfig;
use serde_json::json;

use super::open::DataArgs;
use super::{bytes_bar, inspect, mended};
use crate::run::stamps;
use isobar_command::exit::{Because, Exit};
use isobar_command::{outputs, terminal};

/// Arguments of `isobar data convert`.
#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// A file or folder of data, or a TOML file or the folder of a run, whose `[data]` is used
    #[arg(value_name = "SOURCE")]
    source: PathBuf,
    /// The file or folder to write. A file of that name is replaced; folders that are missing are made
    #[arg(value_name = "TARGET")]
    target: PathBuf,
    /// Format of the source; by default that of its extension, of HDF5 files that of their layout
    #[arg(long, value_name = "FORMAT")]
    from: Option<String>,
    /// Format of the target: darcy, hdf5, netcdf, npy, pdebench, safetensors, the_well or zarr; by default that of its extension
    #[arg(long, value_name = "FORMAT")]
    format: Option<String>,
    /// Variables to take; by default those that the configuration names, or all on the same spatial dims
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    variables: Vec<String>,
    /// Extents of the chunks along axes: sample, time, channel, and the spatial dims
    #[arg(long, value_name = "AXIS=EXTENT", value_delimiter = ',')]
    chunk: Vec<String>,
    /// Level of compression by deflate, 1 to 9
    #[arg(long, value_name = "LEVEL")]
    deflate: Option<u8>,
    /// Set a key of the configuration, such as data.npy.axes='["sample","x"]'; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Runs the command.
pub(super) fn run(args: &ConvertArgs) -> Result<Exit> {
    let _shown = show_where_nobody_does(0);
    let source = DataArgs { path: args.source.clone(), format: args.from.clone(), set: args.set.clone() };
    let source = source.with_variables(&args.variables)?;
    let (data, config, _) = source.open()?;
    let storage = Storage { chunks: chunks(&args.chunk)?, deflate: args.deflate };
    outputs::check("TARGET", &[&args.target], &source.inputs(&*data))?;
    outputs::make_parent(&args.target)?;
    let there = convert(&*data, &config.data, args, storage)?;
    if there > 0 {
        terminal::line(&format!("{} were there from a conversion that was interrupted", format_bytes(there)));
    }
    terminal::line(&format!("{} from {}", args.target.display(), inspect::describe(&*data)));
    Ok(Exit::Good)
}

/// Returns how many bytes of values an interrupted conversion had written.
fn convert(data: &dyn Dataset, config: &DataConfig, args: &ConvertArgs, storage: Storage) -> Result<u64> {
    let format = writer(args.format.as_deref(), &args.target)?;
    let known: Vec<String> = data.variables().iter().map(|variable| variable.name.clone()).collect();
    let names = if args.variables.is_empty() { known } else { args.variables.clone() };
    let meta = PredictionMeta {
        name: data.name(),
        variables: names,
        samples: data.samples(),
        times: data.times().map(<[f64]>::to_vec).unwrap_or_default(),
        sample_times: data.sample_times().unwrap_or_default(),
        sample_numbers: Vec::new(),
        attributes: vec![
            ("isobar_source".to_owned(), data.path().display().to_string()),
            ("history".to_owned(), format!("isobar {} data convert", env!("CARGO_PKG_VERSION"))),
        ],
        missing: config.allows_missing(),
        left_out: Vec::new(),
    };
    // Static and uniform variables stay such.
    let variables = choose(data, &meta.variables.iter().map(String::as_str).collect::<Vec<_>>())?;
    let content = Content { storage, variables, ..data.content(&meta)? };
    let axes =
        ["sample", "time", "channel"].into_iter().chain(data.dims().iter().map(|dim| dim.name.as_str()));
    let axes: Vec<&str> = axes.collect();
    if let Some(name) = content.storage.chunks.keys().find(|name| !axes.contains(&name.as_str())) {
        return Err(Exit::Usage
            .because(format!("--chunk names {name:?}, expected of {}", axes.join(", ")))
            .into());
    }
    let plan = plan(data, config, &content)?;
    let mut target = match &plan {
        Some(plan) => format.create_or_resume(&args.target, &content, plan, free_space),
        None => format.create(&args.target, &content),
    }
    .map_err(mended)?;
    if plan.is_none() {
        tracing::warn!(
            "this conversion cannot be resumed: {} has no dates of change, or too many files",
            data.path().display()
        );
    }
    let there = fill(&mut *target, data, &content).inspect_err(|_| hint(target.is_resumable()))?;
    let is_resumable = target.is_resumable();
    target.finish().inspect_err(|_| hint(is_resumable))?;
    Ok(there)
}

/// Says after an error how to go on.
fn hint(is_resumable: bool) {
    if is_resumable {
        tracing::warn!(
            "the converted part is kept; the same command resumes (on a full disk, free space for the target and the log first)"
        );
    }
}

/// Writes all values that are not there. Returns the bytes of those that are.
fn fill(target: &mut dyn DatasetWriter, data: &dyn Dataset, content: &Content) -> Result<u64> {
    let bar = bytes_bar()?;
    bar.set_length(content.bytes());
    let mut there = 0;
    for sample in 0..data.samples() {
        for variable in content.variables.iter().filter(|variable| sample == 0 || !variable.is_static) {
            let extent = |dim: &Dim| if variable.uniform { 1 } else { dim.coordinates.len() };
            let points: Vec<_> = data.dims().iter().map(|dim| 0..extent(dim)).collect();
            let frames = data.times().filter(|_| !variable.is_static).map_or(1, <[f64]>::len);
            let frame = points.iter().map(std::ops::Range::len).product::<usize>() * size_of::<f32>();
            // Whole chunks of the target, if they fit, so that each is compressed once.
            let chunk = content.storage.chunks.get("time").copied().unwrap_or(1).clamp(1, frames);
            let most = (PORTION / (frame * variable.channels.len()).max(1)).max(1);
            let step = if most > chunk { most / chunk * chunk } else { most };
            for first in (0..frames).step_by(step) {
                let end = (first + step).min(frames);
                // Chunks are written in the order of frames.
                let is_missing =
                    |frame: &usize| !target.is_written(&variable.name, sample, *frame..*frame + 1);
                let start = (first..end).find(is_missing).unwrap_or(end);
                let bytes = ((start - first) * variable.channels.len() * frame) as u64;
                bar.inc(bytes);
                there += bytes;
                if start == end {
                    continue;
                }
                let window = Window { frames: start..end, points: points.clone() };
                let values = data.read(&window, &[sample], &[&variable.name])?;
                target.write(&variable.name, sample, start, &values.f_select(0, 0)?)?;
                bar.inc(values.numel() as u64 * size_of::<f32>() as u64);
            }
        }
    }
    bar.finish_and_clear();
    Ok(there)
}

/// Returns a description of a conversion; an interrupted conversion resumes if its description is equal. `None` if changes of the
/// source cannot be detected.
fn plan(data: &dyn Dataset, config: &DataConfig, content: &Content) -> Result<Option<String>> {
    let Some((files, stores)) = stamps(data) else { return Ok(None) };
    let names: Vec<&str> = content.variables.iter().map(|variable| variable.name.as_str()).collect();
    let digest = digest(data, &names, 0..data.samples())?;
    let mut hasher = DefaultHasher::new();
    hasher.write(format!("{content:?}").as_bytes());
    let plan = json!({
        "files": files,
        "stores": stores,
        "digest": digest,
        "format": config.format_name(),
        "options": config.own,
        "content": hasher.finish(),
        "version": env!("CARGO_PKG_VERSION"),
    });
    Ok(Some(plan.to_string()))
}

/// Bytes of a variable to read at a time, unless one frame has more.
const PORTION: usize = 64 << 20;

/// The words of `--chunk`.
fn chunks(words: &[String]) -> Result<BTreeMap<String, usize>> {
    let one = |word: &String| {
        let pair = word.split_once('=').and_then(|(axis, extent)| Some((axis, extent.trim().parse().ok()?)));
        match pair {
            Some((axis, extent)) if extent > 0 => Ok((axis.trim().to_owned(), extent)),
            _ => Err(Exit::Usage
                .because(format!(
                    "--chunk is {word:?}, expected AXIS=EXTENT with an extent above 0, such as time=10"
                ))
                .into()),
        }
    };
    words.iter().map(one).collect()
}
