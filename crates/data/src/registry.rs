//! The data formats that a configuration can name, from this crate and from all others that are linked into the program.
//!
//! A format registers in its own folder, with one line: `register!(MyFormat)`. The entries are collected at link time
//! (`inventory`), so that there is no list to keep, and a format of a user's crate is on the same footing as a built-in one.

use std::path::Path;

use isobar_registry::{Entries, Named};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::dataset::Dataset;
use crate::{Error, Result};

/// A data format that a TOML file can name: `[data] format = "NAME"`.
///
/// [`register!`](macro@crate::register) makes it known to every program that is linked with the crate it stands in. The keys of its
/// table `[data.NAME]` and their meanings in `reference.toml` come from the schema and doc comments of its options.
///
/// ```
/// use std::path::{Path, PathBuf};
///
/// use isobar_data::{DataConfig, DataSource, DataVariable, Dataset, Dim, Format, NoOptions, Result, Window};
/// use isobar_data::{check_window, choose};
/// use tch::{Device, Kind, Tensor};
///
/// /// Two samples of a still tank.
/// #[derive(Debug)]
/// struct Tank {
///     path: PathBuf,
///     dims: Vec<Dim>,
///     variables: Vec<DataVariable>,
/// }
///
/// impl Format for Tank {
///     const NAME: &'static str = "tank";
///     const SUMMARY: &'static str = "A still tank.";
///     type Options = NoOptions;
///
///     fn open(source: &DataSource<'_>, _options: NoOptions) -> Result<Box<dyn Dataset>> {
///         let dims = vec![Dim { name: "x".into(), unit: None, coordinates: vec![0.0, 1.0], periodic: false }];
///         Ok(Box::new(Self { path: source.path().into(), dims, variables: vec![DataVariable::scalar("level")] }))
///     }
/// }
///
/// isobar_data::register!(Tank);
///
/// impl Dataset for Tank {
///     fn path(&self) -> &Path {
///         &self.path
///     }
///     fn samples(&self) -> usize {
///         2
///     }
///     fn dims(&self) -> &[Dim] {
///         &self.dims
///     }
///     fn variables(&self) -> &[DataVariable] {
///         &self.variables
///     }
///     fn read(&self, window: &Window, samples: &[usize], variables: &[&str]) -> Result<Tensor> {
///         let channels = choose(self, variables)?.len();
///         check_window(self, window, samples)?;
///         let shape = [samples.len(), window.frames.len(), channels, window.points[0].len()];
///         Ok(Tensor::f_zeros(shape.map(|extent| extent as i64), (Kind::Float, Device::Cpu))?)
///     }
/// }
///
/// let config = DataConfig { format: "tank".into(), path: "anywhere".into(), ..DataConfig::default() };
/// let data = config.open()?;
/// assert_eq!(data.read(&Window::still(&[0..2]), &[1, 0], &["level"])?.size(), [2, 1, 1, 2]);
/// # Ok::<(), isobar_data::Error>(())
/// ```
pub trait Format: 'static {
    /// Value of `data.format`.
    const NAME: &'static str;

    /// One sentence on the format in `reference.toml`.
    const SUMMARY: &'static str;

    /// Extensions of its files, in lower case and without the dot, for errors about files of another format.
    const EXTENSIONS: &'static [&'static str] = &[];

    /// True if a folder of such files is one data set; otherwise each file of it is one, and they are joined.
    const TAKES_FOLDERS: bool = false;

    /// Keys of the table `[data.NAME]`; [`NoOptions`] for none.
    type Options: DeserializeOwned + JsonSchema + Default;

    /// Opens a data set. Each rank calls it by itself; nothing here communicates.
    ///
    /// # Errors
    ///
    /// Data that are missing or damaged, or options that do not fit them.
    fn open(source: &DataSource<'_>, options: Self::Options) -> Result<Box<dyn Dataset>>;
}

/// Options of a format that has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NoOptions {}

/// Registers a type as a data format: see [`Format`].
#[macro_export]
macro_rules! register {
    ($format:ty) => {
        $crate::inventory::submit! { $crate::Entry::of::<$format>() }
    };
}

/// Opens a data set with the table of its format.
type Open = fn(&DataSource<'_>, Option<&Value>) -> Result<Box<dyn Dataset>>;

/// Entry of the registry.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    name: &'static str,
    summary: &'static str,
    type_name: fn() -> &'static str,
    extensions: &'static [&'static str],
    takes_folders: bool,
    schema: fn(&mut SchemaGenerator) -> Schema,
    check: fn(&Value) -> Result<()>,
    open: Open,
}

inventory::collect!(Entry);

/// Formats that were registered while the program runs.
static ADDED: Entries<Entry> = Entries::new();

impl Named for Entry {
    fn name(&self) -> &'static str {
        self.name
    }

    fn type_name(&self) -> &'static str {
        (self.type_name)()
    }
}

impl Entry {
    /// Makes the entry of a format.
    pub const fn of<F: Format>() -> Self {
        Self {
            name: F::NAME,
            summary: F::SUMMARY,
            type_name: std::any::type_name::<F>,
            extensions: F::EXTENSIONS,
            takes_folders: F::TAKES_FOLDERS,
            schema: F::Options::json_schema,
            check: |table| options::<F>(Some(table)).map(drop),
            open: |source, table| F::open(source, options::<F>(table)?),
        }
    }

    /// Value of `data.format`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// One sentence on the format.
    pub fn summary(&self) -> &'static str {
        self.summary
    }

    /// Extensions of its files.
    pub fn extensions(&self) -> &'static [&'static str] {
        self.extensions
    }

    /// Returns whether a folder of its files is one data set.
    pub fn takes_folders(&self) -> bool {
        self.takes_folders
    }

    /// Opens a data set with the keys of `[data.NAME]`, if there is such a table.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for keys that the format does not have, and the errors of [`Format::open`].
    pub fn open(&self, source: &DataSource<'_>, table: Option<&Value>) -> Result<Box<dyn Dataset>> {
        (self.open)(&DataSource { format: self.name, ..*source }, table)
    }

    /// Rejects a table with keys that the format does not have, or values of another type.
    pub(crate) fn check(&self, table: &Value) -> Result<()> {
        (self.check)(table)
    }

    /// Schema of the table, if the format has options.
    pub(crate) fn schema(&self, generator: &mut SchemaGenerator) -> Option<Schema> {
        let schema = (self.schema)(generator);
        let properties = schema.get("properties").and_then(Value::as_object);
        properties.is_some_and(|keys| !keys.is_empty()).then_some(schema)
    }
}

fn options<F: Format>(table: Option<&Value>) -> Result<F::Options> {
    let Some(table) = table else { return Ok(F::Options::default()) };
    F::Options::deserialize(table).map_err(|error| Error::Config(format!("[data.{}]: {error}", F::NAME)))
}

/// Location and options of a data set, for its format to open.
#[derive(Clone, Copy, Debug)]
pub struct DataSource<'a> {
    path: &'a Path,
    format: &'static str,
    needs_time: bool,
    takes_all: bool,
    variables: &'a [String],
    levels: &'a [f64],
    keeps_missing: bool,
}

impl<'a> DataSource<'a> {
    /// A file or folder, for a run of single steps that names no variables.
    pub fn new(path: &'a Path) -> Self {
        Self {
            path,
            format: "",
            needs_time: false,
            takes_all: false,
            variables: &[],
            levels: &[],
            keeps_missing: false,
        }
    }

    /// Says that a run is about several time steps or changes between them.
    #[must_use]
    pub fn with_time(self, needs_time: bool) -> Self {
        Self { needs_time, ..self }
    }

    /// Names the variables that a run maps from and to.
    #[must_use]
    pub fn with_variables(self, variables: &'a [String]) -> Self {
        Self { variables, ..self }
    }

    /// Names the levels of variables that have several; all where empty.
    #[must_use]
    pub fn with_levels(self, levels: &'a [f64]) -> Self {
        Self { levels, ..self }
    }

    /// Says whether missing values are read as NaN instead of being errors.
    #[must_use]
    pub fn with_missing(self, keeps_missing: bool) -> Self {
        Self { keeps_missing, ..self }
    }

    /// Says that without names all variables are meant, for commands that look at a data set.
    #[must_use]
    pub fn with_all_variables(self) -> Self {
        Self { takes_all: true, ..self }
    }

    /// Returns whether all variables are meant if none is named.
    pub fn takes_all(&self) -> bool {
        self.takes_all
    }

    /// The path in `data.path`.
    pub fn path(&self) -> &'a Path {
        self.path
    }

    /// Value of `data.format`, the name of the format's table.
    pub fn format(&self) -> &'static str {
        self.format
    }

    /// Returns whether the table `[data.NAME]` of the format has the key.
    pub(crate) fn has_option(&self, key: &str) -> bool {
        let known = registered();
        let Some(entry) = known.iter().find(|entry| entry.name == self.format) else { return false };
        let schema = entry.schema(&mut SchemaGenerator::default());
        schema.as_ref().and_then(|schema| schema.get("properties")?.get(key)).is_some()
    }

    /// Names of the variables in `data.fields`, `data.inputs` and `data.targets`.
    pub fn variables(&self) -> &'a [String] {
        self.variables
    }

    /// Levels in `data.levels`; all where empty.
    pub fn levels(&self) -> &'a [f64] {
        self.levels
    }

    /// Returns whether missing values are read as NaN; otherwise they are errors.
    pub fn keeps_missing(&self) -> bool {
        self.keeps_missing
    }

    /// Rejects settings about time steps, for data that have none. `what` are the data, such as `Darcy flow`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if a run is about several time steps.
    pub fn without_time(&self, what: &str) -> Result<()> {
        if !self.needs_time {
            return Ok(());
        }
        Err(Error::Config(format!(
            "{what} has no steps; --set data.train_steps=1 --set data.validation_steps=1 --set data.predict=frame"
        )))
    }

    /// Rejects a file whose extension is that of another registered format only. One that does not exist is left to the
    /// reader.
    ///
    /// # Errors
    ///
    /// [`Error::OtherFormat`].
    pub(crate) fn check_extension(&self) -> Result<()> {
        check_extension(self.path, self.format)
    }
}

/// Registers a format at run time, before a configuration is read: for programs that name their formats in `main` instead of
/// with [`register!`](macro@crate::register). The same type may be registered twice.
pub fn register<F: Format>() {
    ADDED.add(inventory::iter::<Entry>().copied(), Entry::of::<F>());
}

/// Returns all registered formats, sorted by name.
///
/// ```
/// let names: Vec<&str> = isobar_data::registered().iter().map(|entry| entry.name()).collect();
/// assert!(names.contains(&"darcy") && names.contains(&"the_well"));
/// ```
pub fn registered() -> Vec<Entry> {
    ADDED.all(inventory::iter::<Entry>().copied())
}

/// Finds a format by its name.
///
/// # Errors
///
/// [`Error::Config`] if none is registered by that name, or several are; the error lists the formats.
pub(crate) fn find(name: &str) -> Result<Entry> {
    isobar_registry::find("data format", name, &registered())
        .map_err(|problem| Error::Config(format!("data.format: {problem}")))
}

/// Returns whether a folder has the metadata of a store of Zarr.
pub(crate) fn is_zarr_store(path: &Path) -> bool {
    const METADATA: [&str; 5] = ["zarr.json", ".zmetadata", ".zgroup", ".zarray", ".zattrs"];
    METADATA.iter().any(|file| path.join(file).is_file())
}

/// Rejects a file whose extension is that of another registered format only, and a store of Zarr of any name.
pub(crate) fn check_extension(path: &Path, own: &str) -> Result<()> {
    if own != "zarr" && is_zarr_store(path) {
        return Err(Error::OtherFormat { path: path.to_owned(), format: "zarr" });
    }
    let extension = path.extension().and_then(|extension| extension.to_str()).map(str::to_ascii_lowercase);
    let Some(extension) = extension else { return Ok(()) };
    let has = |entry: &Entry| entry.extensions.contains(&extension.as_str());
    let known = registered();
    if known.iter().any(|entry| entry.name == own && has(entry)) {
        return Ok(());
    }
    match known.iter().find(|entry| has(entry)) {
        Some(other) if path.exists() => Err(Error::OtherFormat { path: path.to_owned(), format: other.name }),
        _ => Ok(()),
    }
}
