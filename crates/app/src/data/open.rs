//! The data set that a command is given: by its path, or by the configuration of a run.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use isobar_data::{DataPath, Dataset, Entry};
use isobar_manager::config::Origin;

use crate::config::{self, Config};
use isobar_command::exit::{Because, Exit};
use isobar_command::terminal;

/// A data set on the command line.
#[derive(Debug, Args)]
pub(super) struct DataArgs {
    /// A file, a folder or a pattern of data, or a TOML file or the folder of a run, whose `[data]` is used
    #[arg(value_name = "PATH")]
    pub(super) path: PathBuf,
    /// Format of the data; by default that of the file's extension, of HDF5 files that of their layout
    #[arg(long, value_name = "FORMAT")]
    pub(super) format: Option<String>,
    /// Set a key of the configuration, such as data.fields='["u"]'; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    pub(super) set: Vec<String>,
}

impl DataArgs {
    /// Reads these variables, if some are named; otherwise those of the configuration, or all.
    pub(super) fn with_variables(mut self, names: &[String]) -> Result<Self> {
        if !names.is_empty() {
            self.set.push(format!("data.fields={}", serde_json::to_string(names)?));
        }
        Ok(self)
    }

    /// Opens the data set, and returns it with the configuration, and whether that is of a run. Names arrays that are left out.
    pub(super) fn open(&self) -> Result<(Box<dyn Dataset>, Config, bool)> {
        let opened = self.open_quietly()?;
        let (data, config, _) = &opened;
        if let [first, ..] = data.left_out() {
            let name = first.split(' ').next().unwrap_or_default();
            terminal::line(&format!(
                "left out, because their dims differ from those of the other variables: {}; name variables to include them (--set \
                 'data.fields=[{name:?}]'), or name the axis of levels (--set data.{}.channel=AXIS)",
                data.left_out().join(", "),
                config.data.format_name()
            ));
        }
        Ok(opened)
    }

    /// Returns whether the configuration is of a run with a folder of its own: one that is given, or one that the file names.
    pub(super) fn has_folder(&self) -> Result<bool> {
        if config::is_run(&self.path) {
            return Ok(true);
        }
        let config = config::load(Some(&self.path), &self.set)?;
        Ok(["run.name", "run.output"].iter().any(|key| config.origin(key) != Origin::Default))
    }

    fn open_quietly(&self) -> Result<(Box<dyn Dataset>, Config, bool)> {
        let is_toml = self.path.extension().is_some_and(|extension| extension == "toml");
        let is_run = is_toml || config::is_run(&self.path);
        if is_run {
            let format = self.format.iter().map(|format| format!("data.format={format}"));
            let sets: Vec<String> = format.chain(self.set.iter().cloned()).collect();
            let config = config::load(Some(&self.path), &sets)?.value;
            return Ok((config.data.open_all()?, config, true));
        }
        let formats = match &self.format {
            Some(format) => vec![format.clone()],
            None => named_in(&self.set, formats(&self.path)?),
        };
        let several = formats.len() > 1;
        let path = format!("data.path={}", serde_json::Value::from(self.path.to_string_lossy()));
        let mut first = None;
        for format in formats {
            let own = [path.clone(), format!("data.format={format}")];
            let sets: Vec<String> = own.into_iter().chain(self.set.iter().cloned()).collect();
            let config = config::load(None, &sets)?.value;
            match config.data.open_all() {
                Ok(data) => return Ok((data, config, false)),
                Err(error) => {
                    let tried = format!("as format {format} (--format names another)");
                    let error = anyhow::Error::from(error);
                    first = first.or(Some(if several { error.context(tried) } else { error }));
                }
            }
        }
        Err(first.unwrap_or_else(|| Exit::Usage.because("name the format with --format").into()))
    }

    /// The files and folders that the command reads: the data set's, and the configuration.
    pub(super) fn inputs(&self, data: &dyn Dataset) -> Vec<PathBuf> {
        let config = self.path.is_file().then(|| self.path.clone());
        data.files().into_iter().chain(config).collect()
    }
}

/// Returns the formats whose options are set; all formats if none has options.
fn named_in(sets: &[String], formats: Vec<String>) -> Vec<String> {
    let is_set = |format: &&String| {
        let key = format!("data.{format}");
        sets.iter().any(|set| set.strip_prefix(&key).is_some_and(|rest| rest.starts_with(['.', '='])))
    };
    match formats.iter().filter(is_set).cloned().collect::<Vec<_>>() {
        named if named.is_empty() => formats,
        named => named,
    }
}

/// The formats of a path to try, by its extension: of HDF5, the layouts before the plain one.
fn formats(path: &Path) -> Result<Vec<String>> {
    let fitting = DataPath::from(path.to_owned()).formats();
    let names = |entries: &[Entry]| entries.iter().map(|entry| entry.name().to_owned()).collect::<Vec<_>>();
    if fitting.is_empty() {
        return Err(Exit::Usage
            .because(format!(
                "{}: its extension names no data format; name one of {} with --format",
                path.display(),
                names(&isobar_data::registered()).join(", ")
            ))
            .into());
    }
    Ok(names(&fitting))
}
