use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Errors of a data set: its file, its content, or the request.
///
/// Errors about a file name it first, then the dataset, then the cause.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is nothing at this path.
    #[error("{}: no such file", path.display())]
    Missing {
        /// The path as given.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("{}: could not {action}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Attempted action, such as `open it`.
        action: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The extension of the file is that of another format.
    #[error("{}: this is the name of a file of another format; --set data.format={format}", path.display())]
    OtherFormat {
        /// The file.
        path: PathBuf,
        /// Name of the format that reads such files.
        format: &'static str,
    },
    /// A setting of `[data]` that does not fit the data, or cannot be.
    #[error("{0}")]
    Config(String),
    /// The file lacks the magic bytes of NumPy's formats.
    #[error("{}: neither a .npy nor a .npz file (no magic bytes of NumPy or ZIP)", path.display())]
    NotNumpy {
        /// The file.
        path: PathBuf,
    },
    /// The file lacks HDF5's signature.
    #[error("{}: not an HDF5 file (no HDF5 signature)", path.display())]
    NotHdf5 {
        /// The file.
        path: PathBuf,
    },
    /// The file is shorter than its superblock says.
    #[error(
        "{}: not a whole HDF5 file: its superblock says {expected} bytes, but there are {found}; copy or download it again",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes that the superblock promises.
        expected: u64,
        /// Bytes in the file.
        found: u64,
    },
    /// The helper process that reads each HDF5 and NetCDF-4 file first crashed on it or exceeded a limit.
    #[error("{}: {problem}; the file seems damaged: copy or download it again", path.display())]
    Rejected {
        /// The file.
        path: PathBuf,
        /// Description of the crash or of the limit.
        problem: String,
    },
    /// The HDF5 library refused: a damaged file, a filter that it lacks, a full disk.
    #[error("{}: could not {action}: {source}", path.display())]
    Hdf5 {
        /// The file.
        path: PathBuf,
        /// Attempted action, such as ``read dataset `nu` ``.
        action: String,
        /// The library's reason.
        source: hdf5_metno::Error,
    },
    /// A dataset of the layout is not there.
    #[error("{}: the dataset `{dataset}` is missing; {} holds {}", path.display(), holder(dataset), list(found))]
    MissingDataset {
        /// The file.
        path: PathBuf,
        /// The dataset's path from the root.
        dataset: String,
        /// Members of its group, or of the file's root.
        found: Vec<String>,
    },
    /// A group of the layout is not there.
    #[error("{}: the group `{group}` is missing; {} holds {}", path.display(), holder(group), list(found))]
    MissingGroup {
        /// The file.
        path: PathBuf,
        /// The group's path from the root.
        group: String,
        /// Members of its group, or of the file's root.
        found: Vec<String>,
    },
    /// A file has no field of that name.
    #[error("{}: there is no field `{field}`; the file's fields are {}{}", path.display(), list(found), meant(field, found))]
    MissingField {
        /// The file.
        path: PathBuf,
        /// Requested name.
        field: String,
        /// The fields that there are.
        found: Vec<String>,
    },
    /// The file has another layout that this crate reads.
    #[error("{}: not a file of {expected}, but of {found}", path.display())]
    OtherLayout {
        /// The file.
        path: PathBuf,
        /// The layout that it has.
        found: &'static str,
        /// The layout that was asked for.
        expected: &'static str,
    },
    /// An attribute of the layout is not there.
    #[error("{}: the {}attribute `{attribute}` is missing", path.display(), if attribute.contains('@') { "" } else { "root " })]
    MissingAttribute {
        /// The file.
        path: PathBuf,
        /// The attribute's name: `owner@attribute` if it is not the root's.
        attribute: String,
    },
    /// A dataset or attribute has the wrong shape, dtype or order.
    #[error("{}: `{name}` is {found}, expected {expected}", path.display())]
    Layout {
        /// The file.
        path: PathBuf,
        /// The dataset, by its path from the root, or the attribute, as `owner@attribute`.
        name: String,
        /// Actual value.
        found: String,
        /// Expected value.
        expected: String,
    },
    /// A dataset holds NaN or an infinity.
    #[error("{}: `{dataset}` holds a value that is not finite: {value} at index {index:?}", path.display())]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The dataset, by its path from the root.
        dataset: String,
        /// Index of the first such value, one number a dim of the dataset.
        index: Vec<usize>,
        /// The value.
        value: f64,
    },
    /// A value is NaN, or the array marks it as missing.
    #[error(
        "{}: `{dataset}` has a missing value ({}) at index {index:?}; --set data.missing=fill (or mask) allows missing values",
        path.display(),
        if value.is_nan() { "NaN" } else { "its fill value" }
    )]
    MissingValue {
        /// The file.
        path: PathBuf,
        /// The array.
        dataset: String,
        /// The stored value.
        value: f64,
        /// Index of the first such value, one number for each axis.
        index: Vec<usize>,
    },
    /// An index or range reaches outside what there is.
    #[error("{what} {asked} is out of range: there are {available}")]
    OutOfRange {
        /// Name of the index, such as `sample`.
        what: String,
        /// Requested name.
        asked: String,
        /// Available number.
        available: usize,
    },
    /// An argument that makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// The linear system of a sample could not be solved.
    #[error("could not solve the Darcy problem: {0}")]
    Solver(String),
    /// libtorch refused an operation.
    #[error("tensor operation failed: {0}")]
    Tensor(#[from] tch::TchError),
    /// A tensor could not be made from what was read.
    #[error("could not make a tensor: {0}")]
    Memory(#[from] isobar_torch::Error),
    /// Random numbers could not be drawn.
    #[error("could not draw random numbers: {0}")]
    Random(#[from] isobar_array::Error),
}

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn hdf5(path: &Path, action: impl Into<String>, source: hdf5_metno::Error) -> Self {
        let source = os_error(&source.to_string()).map_or(source, |error| error.to_string().into());
        Self::Hdf5 { path: path.to_owned(), action: action.into(), source }
    }

    pub(crate) fn io(path: &Path, action: &'static str, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), action, source }
    }
}

/// The error of a write in a message of the HDF5 library, where it stands as `errno = 28` among addresses and counts.
fn os_error(message: &str) -> Option<std::io::Error> {
    let (_, rest) = message.split_once("errno = ")?;
    let digits = rest.split(|letter: char| !letter.is_ascii_digit()).next()?;
    let is_of_writes = |kind: ErrorKind| {
        matches!(kind, ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge)
    };
    digits.parse().ok().map(std::io::Error::from_raw_os_error).filter(|error| is_of_writes(error.kind()))
}

/// Describes the expected holder of a dataset or group.
fn holder(name: &str) -> String {
    name.rsplit_once('/').map_or_else(|| "the file".to_owned(), |(group, _)| format!("`{group}`"))
}

/// Asks for the name that is nearest in spelling.
fn meant(field: &str, found: &[String]) -> String {
    let near = (field.len() > 2).then(|| isobar_registry::nearest(field, found.iter().map(String::as_str)));
    near.flatten().map(|near| format!("; did you mean `{near}`?")).unwrap_or_default()
}

fn list(names: &[String]) -> String {
    if names.is_empty() {
        return "nothing".to_owned();
    }
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
