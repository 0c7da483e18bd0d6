//! `isobar data coarsen`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use isobar_data::{
    Content, DataVariable, Dataset, Dim, PredictionMeta, Storage, TextAttributes, Window, block_means,
    choose, coarse_fields, writer,
};

use super::open::DataArgs;
use super::{bar, mended};
use isobar_command::exit::{Because, Exit};
use isobar_command::{outputs, terminal};

/// Arguments of `isobar data coarsen`.
#[derive(Debug, Args)]
pub(crate) struct CoarsenArgs {
    /// A file or folder of data with two spatial dims, or the TOML file or folder of a run, whose [data] section is used
    #[arg(value_name = "SOURCE")]
    source: PathBuf,
    /// The file or folder to write: HDF5, NetCDF or Zarr, by its extension. A file of that name is replaced; missing
    /// folders are created
    #[arg(value_name = "TARGET")]
    target: PathBuf,
    /// Format of the source; by default determined by the extension, or by the layout for HDF5 files
    #[arg(long, value_name = "FORMAT")]
    from: Option<String>,
    /// Variables to take; by default all
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    variables: Vec<String>,
    /// Coarsening factor: number of points along each dim that are averaged into one point of the coarse grid; the mean is missing if
    /// any of its points is missing
    #[arg(long, value_name = "POINTS", default_value_t = 4)]
    factor: usize,
    /// Write only the means, on the coarse grid and with the times of the source, as inputs of a run whose [data.target] is the source
    #[arg(long)]
    means: bool,
    /// Set a key of the configuration, such as data.npy.axes='["sample","x"]'; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Runs the command.
pub(super) fn run(args: &CoarsenArgs) -> Result<Exit> {
    let source = DataArgs { path: args.source.clone(), format: args.from.clone(), set: args.set.clone() };
    let source = source.with_variables(&args.variables)?;
    let (data, config, _) = source.open()?;
    let missing = config.data.allows_missing();
    outputs::check("TARGET", &[&args.target], &source.inputs(&*data))?;
    outputs::make_parent(&args.target)?;
    let samples = coarsen(&*data, args, missing)?;
    terminal::line(&format!(
        "{} with {samples} samples from {}",
        args.target.display(),
        args.source.display()
    ));
    Ok(Exit::Good)
}

/// Writes the pairs, and returns their number.
fn coarsen(data: &dyn Dataset, args: &CoarsenArgs, missing: bool) -> Result<usize> {
    let [first, second] = data.dims() else {
        return Err(Exit::Usage
            .because(format!(
                "{} has {} spatial dims; fields of two dims can be coarsened",
                data.path().display(),
                data.dims().len()
            ))
            .into());
    };
    let periodic = [first.periodic, second.periodic];
    let known: Vec<&str> = data.variables().iter().map(|variable| variable.name.as_str()).collect();
    let names: Vec<&str> = args.variables.iter().map(String::as_str).collect();
    let variables = choose(data, if names.is_empty() { &known } else { &names })?;
    let variables: Vec<DataVariable> = variables.into_iter().map(DataVariable::varying).collect();
    if args.means {
        return means(data, &variables, args, missing);
    }
    let frames = data.times().map_or(1, <[f64]>::len);
    let samples = data.samples() * frames;
    let content = content(data, &variables, samples, args);
    let content = Content { meta: PredictionMeta { missing, ..content.meta }, ..content };
    let mut target = writer(None, &args.target)?.create(&args.target, &content).map_err(mended)?;
    let points: Vec<_> = data.dims().iter().map(|dim| 0..dim.coordinates.len()).collect();
    let bar = bar(samples as u64, "frames")?;
    for sample in 0..samples {
        let frame = sample % frames;
        let window = Window { frames: frame..frame + 1, points: points.clone() };
        for variable in &variables {
            let fine = data.read(&window, &[sample / frames], &[&variable.name])?.f_select(0, 0)?;
            let coarse = coarse_fields(&fine, args.factor, periodic).map_err(mended)?;
            let detail = fine.f_sub(&coarse)?;
            for (name, values) in names_of(variable).iter().zip([&fine, &coarse, &detail]) {
                target.write(name, sample, 0, values)?;
            }
        }
        bar.inc(1);
    }
    target.finish()?;
    bar.finish_and_clear();
    Ok(samples)
}

/// Writes the means over blocks, on the coarse grid, and returns the number of samples.
fn means(data: &dyn Dataset, variables: &[DataVariable], args: &CoarsenArgs, missing: bool) -> Result<usize> {
    let frames = data.times().map_or(1, <[f64]>::len);
    let center = |block: &[f64]| block.iter().sum::<f64>() / block.len() as f64;
    let coarse = |dim: &Dim| Dim {
        coordinates: dim.coordinates.chunks(args.factor.max(1)).map(center).collect(),
        ..dim.clone()
    };
    let meta = meta(data, variables, (data.samples(), data.times().unwrap_or_default()), args);
    let sample_times = data.sample_times().unwrap_or_default();
    let content = Content {
        meta: PredictionMeta { missing, sample_times, ..meta },
        time_unit: data.time_unit().cloned(),
        dims: data.dims().iter().map(coarse).collect(),
        variables: variables.to_vec(),
        parameters: data.parameters(),
        storage: Storage::default(),
    };
    let mut target = writer(None, &args.target)?.create(&args.target, &content).map_err(mended)?;
    let points: Vec<_> = data.dims().iter().map(|dim| 0..dim.coordinates.len()).collect();
    let bar = bar((data.samples() * frames) as u64, "frames")?;
    for (sample, frame) in
        (0..data.samples()).flat_map(|sample| (0..frames).map(move |frame| (sample, frame)))
    {
        let window = Window { frames: frame..frame + 1, points: points.clone() };
        for variable in variables {
            let fine = data.read(&window, &[sample], &[&variable.name])?.f_select(0, 0)?;
            let coarse = block_means(&fine, args.factor).map_err(mended)?;
            target.write(&variable.name, sample, frame, &coarse)?;
        }
        bar.inc(1);
    }
    target.finish()?;
    bar.finish_and_clear();
    Ok(data.samples())
}

/// Names of a variable, of its coarse field on the fine grid, and of the difference.
fn names_of(variable: &DataVariable) -> [String; 3] {
    ["", "_coarse", "_detail"].map(|ending| format!("{}{ending}", variable.name))
}

/// Content of the target: samples without time, three variables for each of the source.
fn content(data: &dyn Dataset, variables: &[DataVariable], samples: usize, args: &CoarsenArgs) -> Content {
    let three = |variable: &DataVariable| {
        let channels = variable.channels.clone();
        let is_scalar = channels.len() == 1;
        names_of(variable).map(|name| DataVariable {
            channels: if is_scalar { vec![name.clone()] } else { channels.clone() },
            title: None,
            // A derived field has another standard name.
            attributes: match name == variable.name {
                true => variable.attributes.clone(),
                false => TextAttributes::default(),
            },
            name,
            ..variable.clone()
        })
    };
    let variables: Vec<DataVariable> = variables.iter().flat_map(three).collect();
    let meta = meta(data, &variables, (samples, &[]), args);
    Content {
        meta,
        time_unit: None,
        dims: data.dims().to_vec(),
        variables,
        parameters: data.parameters(),
        storage: Storage::default(),
    }
}

fn meta(
    data: &dyn Dataset,
    variables: &[DataVariable],
    (samples, times): (usize, &[f64]),
    args: &CoarsenArgs,
) -> PredictionMeta {
    PredictionMeta {
        name: data.name(),
        variables: variables.iter().map(|variable| variable.name.clone()).collect(),
        samples,
        times: times.to_vec(),
        sample_times: Vec::new(),
        sample_numbers: Vec::new(),
        attributes: vec![
            ("isobar_source".to_owned(), data.path().display().to_string()),
            ("isobar_factor".to_owned(), args.factor.to_string()),
        ],
        missing: false,
        left_out: Vec::new(),
    }
}
