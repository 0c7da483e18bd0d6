//! `isobar data inspect`.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use isobar_data::{DataVariable, Dataset, Dim};

use super::open::DataArgs;
use crate::config::Config;
use isobar_command::exit::{Because, Exit};
use isobar_command::terminal;

/// Arguments of `isobar data inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    data: DataArgs,
    /// Ranks along each spatial dim, such as 4 or 2x2, to show the bytes that each reads; by default those of the configuration's mesh
    #[arg(long, value_name = "RANKS")]
    mesh: Option<String>,
}

/// Runs the command.
pub(super) fn run(args: &InspectArgs) -> Result<Exit> {
    let (data, config, is_run) = args.data.open()?;
    let ranks = match &args.mesh {
        Some(mesh) => parse(mesh, data.dims().len())?,
        None => along_dims(&config, data.dims().len()),
    };
    show(&*data);
    let targets = if is_run { config.data.open_all_targets()? } else { None };
    if let Some(targets) = &targets {
        terminal::line("targets");
        show(&**targets);
    }
    let (batch, steps) =
        if is_run { (config.train.batch_size, config.data.train_steps.most()) } else { (1, 1) };
    let frames = match (&targets, data.times()) {
        (None, Some(times)) => times.len().min(steps.saturating_add(config.data.history)),
        _ => 1,
    };
    let all = || [Some(&data), targets.as_ref()].into_iter().flatten();
    let frame =
        |statics| all().map(|data| bytes(&**data, &config, &ranks, statics)).fold(0, u64::saturating_add);
    let bytes = [batch as u64, frames as u64, frame(false)].into_iter().fold(1, u64::saturating_mul);
    let once = match frame(true) {
        0 => String::new(),
        bytes => format!("; static fields, {}, are read once", size(bytes)),
    };
    let mesh: Vec<String> = ranks.iter().map(usize::to_string).collect();
    terminal::line(&format!(
        "a step of {batch} samples of {frames} frames, on {} ranks along the spatial dims, reads up to {} a rank{once}",
        mesh.join("x"),
        size(bytes)
    ));
    Ok(Exit::Good)
}

/// Shows dims, times and variables of a data set.
fn show(data: &dyn Dataset) {
    terminal::line(&describe(data));
    data.dims().iter().for_each(|dim| terminal::line(&format!("  {}", dim_line(dim))));
    if let Some(times) = data.times() {
        let unit = data.time_unit().map(|unit| &*unit.unit);
        terminal::line(&format!("  {}", line("time", unit, times, false)));
    }
    if let Some(times) = data.sample_times() {
        let unit = data.time_unit().map(|unit| &*unit.unit);
        terminal::line(&format!("  {}", line("sample time", unit, &times, false)));
    }
    terminal::line("variables");
    data.variables()
        .iter()
        .for_each(|variable| terminal::line(&format!("  {}", variable_line(data, variable))));
}

/// One line on a file that was written.
pub(super) fn summary(path: &Path, format: &str) -> Result<String> {
    let args = DataArgs { path: PathBuf::from(path), format: Some(format.to_owned()), set: Vec::new() };
    Ok(describe(&*args.open()?.0))
}

/// One line on a data set.
pub(super) fn describe(data: &dyn Dataset) -> String {
    let extents: Vec<String> = data.dims().iter().map(|dim| dim.coordinates.len().to_string()).collect();
    let samples = match data.times() {
        Some(times) => format!("{} trajectories of {} frames", data.samples(), times.len()),
        None => format!("{} samples without time", data.samples()),
    };
    let variables: Vec<&str> = data.variables().iter().map(|variable| variable.name.as_str()).collect();
    let (path, points) = (data.path().display(), extents.join(" x "));
    format!("{path}: {samples} of {points} points; {}", variables.join(", "))
}

fn dim_line(dim: &Dim) -> String {
    line(&dim.name, dim.unit.as_deref(), &dim.coordinates, dim.periodic)
}

/// Name, extent, range and step of coordinates.
fn line(name: &str, unit: Option<&str>, values: &[f64], periodic: bool) -> String {
    let unit = unit.map(|unit| format!(" {unit}")).unwrap_or_default();
    let (first, last) = (values.first().copied().unwrap_or(0.0), values.last().copied().unwrap_or(0.0));
    let even = (last - first) / (values.len().max(2) - 1) as f64;
    let is_even = values.windows(2).all(|pair| (pair[1] - pair[0] - even).abs() <= 1e-4 * even.abs());
    let step = if values.len() < 2 {
        String::new()
    } else if is_even {
        format!(", step {even:.6}")
    } else {
        ", uneven".to_owned()
    };
    let period = match periodic {
        true => format!(", periodic with period {:.6}", (even * values.len() as f64).abs()),
        false => String::new(),
    };
    format!("{name:12} {:>6} from {first} to {last}{unit}{step}{period}", values.len())
}

fn variable_line(data: &dyn Dataset, variable: &DataVariable) -> String {
    let mut shape = Vec::new();
    if !variable.is_static {
        shape.push(format!("sample {}", data.samples()));
        shape.extend(data.times().map(|times| format!("time {}", times.len())));
    }
    if variable.has_channel_axis() {
        let axis = variable.levels.as_ref().map_or("channel", |levels| &levels.name);
        shape.push(format!("{axis} {}", variable.channels.len()));
    }
    let dims = data.dims().iter().filter(|_| !variable.uniform);
    shape.extend(dims.map(|dim| format!("{} {}", dim.name, dim.coordinates.len())));
    let unit = variable.unit.as_ref().map(|unit| format!(", in {unit}")).unwrap_or_default();
    let levels = match variable.levels.as_ref().and_then(|levels| levels.unit.as_ref()) {
        Some(unit) => format!(" ({unit})"),
        None => String::new(),
    };
    let channels = match variable.channels.len() {
        1 if levels.is_empty() => String::new(),
        count if count > 8 => {
            format!(", channels {} … {}", variable.channels[0], variable.channels[count - 1])
        }
        _ => format!(", channels {}", variable.channels.join(" ")),
    };
    let chunk = match data.chunk(&variable.name) {
        Some(chunk) => format!(", chunks {chunk:?}"),
        None => String::new(),
    };
    format!("{:12} [{}]{unit}{chunk}{channels}{levels}", variable.name, shape.join(", "))
}

/// Bytes in float32 of one frame of a sample, or of the static fields, in the largest window of a rank: chunks that reach beyond it are
/// not counted.
fn bytes(data: &dyn Dataset, config: &Config, ranks: &[usize], statics: bool) -> u64 {
    let named = &config.data.statics;
    let is_static = |variable: &DataVariable| {
        if named.is_empty() { variable.is_static } else { named.contains(&variable.name) }
    };
    let points = data.dims().iter().zip(ranks);
    let points = points.map(|(dim, &ranks)| dim.coordinates.len().div_ceil(ranks.max(1)) as u64);
    let points = points.fold(1, u64::saturating_mul);
    let values = |variable: &DataVariable| {
        let points = if variable.uniform { 1 } else { points };
        points.saturating_mul(variable.channels.len() as u64)
    };
    let chosen = data.variables().iter().filter(|variable| is_static(variable) == statics);
    chosen.map(values).fold(0, u64::saturating_add).saturating_mul(size_of::<f32>() as u64)
}

/// Ranks along each spatial dim, of the axes of the configuration's mesh.
fn along_dims(config: &Config, dims: usize) -> Vec<usize> {
    let mesh = &config.distributed.mesh;
    let along = |axis: &str| {
        let at = mesh.names.iter().position(|name| name == axis);
        at.and_then(|at| mesh.shape.get(at))
            .and_then(|&ranks| usize::try_from(ranks).ok())
            .unwrap_or(1)
            .max(1)
    };
    isobar_train::DOMAIN_AXES[..dims.min(3)].iter().map(|axis| along(axis)).collect()
}

fn parse(mesh: &str, dims: usize) -> Result<Vec<usize>> {
    let ranks: Option<Vec<usize>> =
        mesh.split('x').map(|ranks| ranks.parse().ok().filter(|ranks| *ranks > 0)).collect();
    let Some(mut ranks) = ranks.filter(|ranks| ranks.len() <= dims) else {
        return Err(Exit::Usage
            .because(format!("--mesh is {mesh:?}, expected 1 to {dims} numbers above 0, such as 2x2 or 4"))
            .into());
    };
    ranks.resize(dims, 1);
    Ok(ranks)
}

fn size(bytes: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} bytes") } else { format!("{value:.1} {}", units[unit]) }
}
