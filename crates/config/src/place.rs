//! Place and origin of a key or value of the configuration.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// Origin of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// No layer set it.
    Default,
    /// A line of a file.
    File {
        /// The file, as it was named.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
    },
    /// An environment variable, by name.
    Environment(String),
    /// A `--set` option, by its key.
    CommandLine(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Environment(name) => f.write_str(name),
            Self::CommandLine(key) => write!(f, "--set {key}"),
        }
    }
}

/// The text of a configuration file.
#[derive(Debug)]
pub(crate) struct SourceFile {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
    /// Rank among all files read, for the order of problems.
    pub(crate) index: usize,
}

impl SourceFile {
    /// Line and column, both from 1, of a byte.
    pub(crate) fn position(&self, byte: usize) -> (usize, usize) {
        let before = &self.text[..self.text.floor_char_boundary(byte)];
        let start = before.rfind('\n').map_or(0, |newline| newline + 1);
        (before.matches('\n').count() + 1, before[start..].chars().count() + 1)
    }

    pub(crate) fn line(&self, line: usize) -> &str {
        self.text.lines().nth(line - 1).unwrap_or_default()
    }
}

/// Place of a key or value.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Default,
    File { file: Arc<SourceFile>, span: Range<usize> },
    Variable { name: String, raw: String },
    Flag { raw: String },
}

impl Place {
    pub(crate) fn origin(&self) -> Origin {
        match self {
            Self::Default => Origin::Default,
            Self::File { file, span } => {
                Origin::File { path: file.path.clone(), line: file.position(span.start).0 }
            }
            Self::Variable { name, .. } => Origin::Environment(name.clone()),
            Self::Flag { raw } => Origin::CommandLine(
                raw.split_once('=').map_or(raw.as_str(), |(key, _)| key).trim().to_owned(),
            ),
        }
    }

    /// The text of the value where it was given as text and not as TOML; none where that is a list or a table, whose items
    /// have this place too.
    pub(crate) fn raw_value(&self) -> Option<&str> {
        let raw = match self {
            Self::Default | Self::File { .. } => return None,
            Self::Variable { raw, .. } => raw,
            Self::Flag { raw } => raw.split_once('=')?.1,
        };
        Some(raw.trim()).filter(|raw| !raw.starts_with(['[', '{']))
    }

    pub(crate) fn order(&self) -> (usize, usize, &str) {
        match self {
            Self::Default => (0, 0, ""),
            Self::File { file, span } => (1 + file.index, span.start, ""),
            Self::Variable { name, .. } => (usize::MAX - 1, 0, name),
            Self::Flag { raw } => (usize::MAX, 0, raw),
        }
    }
}
