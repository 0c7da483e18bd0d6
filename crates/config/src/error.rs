//! Errors in a configuration, and their display.

use std::fmt;
use std::path::PathBuf;

use crate::place::Place;
use crate::shorten::shorten;

/// Number of characters of a line that are shown, and how many of these precede the error.
const WIDEST: usize = 160;
const BEFORE: usize = 80;

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A configuration file that is not there.
    #[error("configuration file {} does not exist{}", path.display(), included(from))]
    NotFound {
        /// The file.
        path: PathBuf,
        /// The file that includes it.
        from: Option<PathBuf>,
    },
    /// A configuration file that cannot be read.
    #[error("cannot read configuration file {}{}: {source}", path.display(), included(from))]
    Read {
        /// The file.
        path: PathBuf,
        /// The file that includes it.
        from: Option<PathBuf>,
        /// Error of the system.
        source: std::io::Error,
    },
    /// A file that includes itself, by way of others or at once.
    #[error("configuration files include each other in a circle: {}", chain(files))]
    IncludeCycle {
        /// The files, from the first to its repetition.
        files: Vec<PathBuf>,
    },
    /// A file that is too long to be a configuration.
    #[error("configuration file {} is longer than {most} bytes{}", path.display(), included(from))]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The file that includes it.
        from: Option<PathBuf>,
        /// Limit on the bytes read.
        most: u64,
    },
    /// Files that include ever more files.
    #[error("more than {most} configuration files are included, the last by {}; include each once", path.display())]
    TooManyFiles {
        /// The file that includes one more.
        path: PathBuf,
        /// Limit on the number of files read.
        most: usize,
    },
    /// Everything that was found wrong in the layers.
    #[error("{problems}")]
    Invalid {
        /// The problems, in the order of their places.
        problems: Problems,
    },
    /// A type that is no table of values.
    #[error("the configuration type cannot be written as TOML: {message}")]
    Serialize {
        /// Message of the serialiser.
        message: String,
    },
}

/// A list of [`Problem`]s, shown one below the other.
#[derive(Clone, Debug)]
pub struct Problems(Vec<Problem>);

impl Problems {
    pub(crate) fn sorted(mut problems: Vec<Problem>) -> Self {
        problems.sort_by(|a, b| a.place.order().cmp(&b.place.order()));
        Self(problems)
    }

    /// The problems in order.
    pub fn iter(&self) -> impl Iterator<Item = &Problem> {
        self.0.iter()
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("\n\n")?;
            }
            write!(f, "{problem}")?;
        }
        Ok(())
    }
}

/// One thing that is wrong, and where.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The problem and the expected value.
    pub message: String,
    /// Remedy.
    pub help: Option<String>,
    pub(crate) place: Place,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.place {
            Place::Default => {}
            Place::File { file, span } => {
                let (line, column) = file.position(span.start);
                let text = file.line(line);
                let width = file
                    .text
                    .get(span.clone())
                    .map_or(1, |spanned| spanned.lines().next().unwrap_or_default().chars().count());
                let width = width.clamp(1, (text.chars().count() + 1).saturating_sub(column - 1).max(1));
                let gutter = " ".repeat(line.to_string().len());
                // Only the surroundings of the error in a long line.
                let skipped = column.saturating_sub(BEFORE);
                let shown: String = text.chars().skip(skipped).take(WIDEST).collect();
                let cut = if text.chars().count() > skipped + WIDEST { "…" } else { "" };
                let text = format!("{}{shown}{cut}", if skipped > 0 { "…" } else { "" });
                let column_shown = column - skipped + usize::from(skipped > 0);
                let width = width.min((WIDEST + 1).saturating_sub(column_shown).max(1));
                let indent: String =
                    text.chars().take(column_shown - 1).map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
                write!(f, "\n{gutter}--> {}:{line}:{column}", file.path.display())?;
                write!(f, "\n{gutter} |\n{line} | {text}\n{gutter} | {indent}{}", "^".repeat(width))?;
            }
            Place::Variable { name, raw } => {
                write!(f, "\n--> environment variable {}={}", shorten(name), shorten(raw))?;
            }
            Place::Flag { raw } => write!(f, "\n--> command line --set {}", shorten(raw))?,
        }
        match &self.help {
            Some(help) => write!(f, "\nhelp: {help}"),
            None => Ok(()),
        }
    }
}

fn included(from: &Option<PathBuf>) -> String {
    from.as_ref().map_or_else(String::new, |from| format!(" (included from {})", from.display()))
}

fn chain(files: &[PathBuf]) -> String {
    files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(" -> ")
}
