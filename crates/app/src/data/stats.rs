//! `isobar data stats`.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use clap::Args;
use isobar_data::{Dataset, Part, Statistics, Summary, area_weights, summarize};
use serde_json::{Value, json};

use super::bytes_bar;
use super::open::DataArgs;
use isobar_command::exit::{Because, Exit};
use isobar_command::{outputs, terminal};

/// Arguments of `isobar data stats`.
#[derive(Debug, Args)]
pub(crate) struct StatsArgs {
    #[command(flatten)]
    data: DataArgs,
    /// The JSON file to write; by default stats.json in the folder of a run, if that exists, and none for data alone
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Take all samples; by default a configuration's training samples are taken
    #[arg(long)]
    all: bool,
}

/// Runs the command.
pub(super) fn run(args: &StatsArgs) -> Result<Exit> {
    let (data, config, is_run) = args.data.open()?;
    let is_part = is_run && !args.all;
    let Part { data, samples, target } = match is_part {
        true => config.data.train_part()?,
        false => Part {
            samples: 0..data.samples(),
            data: data.into(),
            target: config.data.open_all_targets()?.map(Arc::from),
        },
    };
    if samples.is_empty() {
        let text = format!("{} has no training samples; --all takes all", data.path().display());
        return Err(Exit::Usage.because(text).into());
    }
    let folder = config.run.folder();
    let beside = (is_run && folder.is_dir() && args.data.has_folder()?).then(|| folder.join("stats.json"));
    let output = args.output.clone().or(beside);
    let read = target.iter().flat_map(|target| target.files()).chain(args.data.inputs(&*data));
    outputs::check("--output", output.as_slice(), &read.collect::<Vec<_>>())?;
    let (named, targets) = (config.data.stored_variables(), &config.data.targets);
    let mut content = match &target {
        None => measure(&*data, &named, &samples)?,
        Some(target) => {
            terminal::line("inputs");
            let mut content = measure(&*data, &named, &samples)?;
            terminal::line("targets");
            // Training samples have the same numbers in both. Of all samples, each data set has its own number.
            let own = if is_part { samples.clone() } else { 0..target.samples() };
            content["targets"] = measure(&**target, targets, &own)?;
            content["targets"]["samples"] = json!([own.start, own.end]);
            content
        }
    };
    content["samples"] = json!([samples.start, samples.end]);
    if let Some(output) = output {
        outputs::make_parent(&output)?;
        isobar_files::write(&output, format!("{content:#}\n"))
            .map_err(|error| Exit::Data.because(format!("cannot write {}: {error}", output.display())))?;
        terminal::line(&format!("written to {}", output.display()));
    }
    Ok(Exit::Good)
}

/// Shows the statistics of the named variables of a data set, by default of all, and returns them.
fn measure(data: &dyn Dataset, named: &[String], samples: &Range<usize>) -> Result<Value> {
    let mut names: Vec<&str> = Vec::new();
    let known = data.variables().iter().map(|variable| variable.name.as_str());
    for name in
        if named.is_empty() { known.collect() } else { named.iter().map(String::as_str).collect::<Vec<_>>() }
    {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let bar = bytes_bar()?;
    let summaries = summarize(data, &names, samples.clone(), |read, all| {
        bar.set_length(all.max(read));
        bar.set_position(read);
    })?;
    bar.finish_and_clear();
    table(&summaries).iter().for_each(|line| terminal::line(line));
    let latitudes = area_weights(data.dims()).map(|(dim, _)| data.dims()[dim].name.clone());
    if let Some(dim) = &latitudes {
        terminal::line(&format!("means and deviations are weighted by cell area along `{dim}`"));
    }
    Ok(json!({
        "path": data.path(),
        "times": data.times().map(|times| [times.first(), times.last()]),
        "weights": latitudes.map(|dim| json!({ "area": dim })),
        "channels": summaries,
    }))
}

/// A line for each channel, with `-` where all values are missing, and one for its changes.
fn table(summaries: &[Summary]) -> Vec<String> {
    let label = |summary: &Summary| match &summary.unit {
        Some(unit) => format!("{} ({unit})", summary.channel),
        None => summary.channel.clone(),
    };
    let width = summaries.iter().map(|summary| label(summary).chars().count() + 7).max().unwrap_or(0).max(8);
    let row = |name: String, statistics: Option<&Statistics>| {
        let numbers = statistics.map(|Statistics { mean, std, min, max, .. }| [mean, std, min, max]);
        let cell = |at: usize| numbers.map_or_else(|| "-".to_owned(), |of| format!("{:.6e}", of[at]));
        let [mean, std, min, max] = [0, 1, 2, 3].map(cell);
        format!("{name:width$} {mean:>14} {std:>14} {min:>14} {max:>14}")
    };
    let head = format!("{:width$} {:>14} {:>14} {:>14} {:>14}", "", "mean", "std", "min", "max");
    let rows = summaries.iter().flat_map(|summary| {
        let changes =
            summary.changes.as_ref().map(|changes| row(format!("change {}", label(summary)), Some(changes)));
        [Some(row(label(summary), summary.values.as_ref())), changes].into_iter().flatten()
    });
    std::iter::once(head).chain(rows).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Writes a NumPy array of zeros.
    fn zeros(path: &Path, shape: [usize; 2]) {
        let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape:?}, }}");
        let header = header.replace('[', "(").replace(']', ")") + "\n";
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend(u16::try_from(header.len()).unwrap().to_le_bytes());
        bytes.extend(header.bytes());
        bytes.extend(vec![0; 4 * shape[0] * shape[1]]);
        std::fs::write(path, bytes).unwrap();
    }

    /// All samples of the inputs and all of the targets are measured, even if they do not pair.
    #[test]
    fn all_samples_of_the_targets_are_measured() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        zeros(&path("a.npy"), [3, 4]);
        zeros(&path("b.npy"), [5, 8]);
        let text = format!(
            "[data]\npath = {:?}\nformat = \"npy\"\ninputs = [\"a\"]\ntargets = [\"b\"]\nvalidation_samples = 1\n\
             [data.npy]\naxes = [\"sample\", \"x\"]\n[data.target]\npath = {:?}\n",
            path("a.npy"),
            path("b.npy")
        );
        std::fs::write(path("run.toml"), text).unwrap();
        let measure = |all| {
            let data = DataArgs { path: path("run.toml"), format: None, set: Vec::new() };
            run(&StatsArgs { data, output: Some(path("stats.json")), all })?;
            anyhow::Ok(serde_json::from_slice::<Value>(&std::fs::read(path("stats.json"))?)?)
        };
        let found = measure(true).unwrap();
        let of = |set: &Value| [set["samples"].clone(), set["channels"][0]["values"]["count"].clone()];
        assert_eq!(of(&found), [json!([0, 3]), json!(12)]);
        assert_eq!(of(&found["targets"]), [json!([0, 5]), json!(40)]);
        for input in ["a.npy", "b.npy", "run.toml"] {
            let before = std::fs::read(path(input)).unwrap();
            let data = DataArgs { path: path("run.toml"), format: None, set: Vec::new() };
            let error = run(&StatsArgs { data, output: Some(path(input)), all: true }).unwrap_err();
            assert!(error.to_string().contains(&format!("{input} is an input of this command")), "{error}");
            assert_eq!(std::fs::read(path(input)).unwrap(), before, "{input}");
        }
        assert!(measure(false).unwrap_err().to_string().contains("different numbers of samples"));
        zeros(&path("b.npy"), [3, 8]);
        let found = measure(false).unwrap();
        assert_eq!(of(&found), [json!([0, 2]), json!(8)]);
        assert_eq!(of(&found["targets"]), [json!([0, 2]), json!(16)]);
    }

    #[test]
    fn channels_without_a_value_have_no_numbers() {
        let summary = |channel: &str, values: Option<Statistics>| Summary {
            variable: channel.to_owned(),
            channel: channel.to_owned(),
            unit: None,
            values,
            changes: values,
        };
        let some = Statistics { count: 4, weight: 4.0, mean: 1.5, std: 0.5, min: 1.0, max: 2.0 };
        insta::assert_snapshot!(table(&[summary("u", Some(some)), summary("v", None)]).join("\n"), @r"
                           mean            std            min            max
        u            1.500000e0    5.000000e-1     1.000000e0     2.000000e0
        change u     1.500000e0    5.000000e-1     1.000000e0     2.000000e0
        v                     -              -              -              -
        ");
    }
}
