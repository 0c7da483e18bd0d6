//! Reading of TOML files and of the files that they include.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use toml::de::DeTable;

use crate::error::{ConfigError, Problem, Problems};
use crate::layer::{Entry, Kind, Layer, entries};
use crate::place::{Place, SourceFile};

const INCLUDE: &str = "include";

/// Bytes of the longest file.
const LONGEST: u64 = 4 << 20;

/// Files, with all that they include: those that include others twice would be read ever more often.
const MOST_FILES: usize = 256;

/// A file as layers: what it includes first, in order, then itself.
pub(crate) fn read(path: &Path) -> Result<Vec<Layer>, ConfigError> {
    let mut reader = Reader { open: Vec::new(), layers: Vec::new() };
    reader.read(path, None)?;
    Ok(reader.layers)
}

struct Reader {
    /// The files being read, by their real path and as they were named, outermost first.
    open: Vec<(PathBuf, PathBuf)>,
    layers: Vec<Layer>,
}

impl Reader {
    fn read(&mut self, path: &Path, from: Option<&Path>) -> Result<(), ConfigError> {
        let from = from.map(Path::to_owned);
        if self.layers.len() + self.open.len() >= MOST_FILES {
            let path = from.unwrap_or_else(|| path.to_owned());
            return Err(ConfigError::TooManyFiles { path, most: MOST_FILES });
        }
        let text = isobar_files::read_to_string(path, LONGEST).map_err(|source| match source.kind() {
            ErrorKind::NotFound => ConfigError::NotFound { path: path.to_owned(), from: from.clone() },
            ErrorKind::FileTooLarge => {
                ConfigError::TooLong { path: path.to_owned(), from: from.clone(), most: LONGEST }
            }
            _ => ConfigError::Read { path: path.to_owned(), from: from.clone(), source },
        })?;
        let real = std::fs::canonicalize(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            from,
            source,
        })?;
        if let Some(start) = self.open.iter().position(|(open, _)| *open == real) {
            let mut files: Vec<PathBuf> = self.open[start..].iter().map(|(_, named)| named.clone()).collect();
            files.push(path.to_owned());
            return Err(ConfigError::IncludeCycle { files });
        }

        let file = Arc::new(SourceFile { path: path.to_owned(), text, index: self.layers.len() });
        let mut entries = parse(&file)?;
        let include =
            entries.iter().position(|entry| entry.key == INCLUDE).map(|index| entries.remove(index));
        self.open.push((real, path.to_owned()));
        for included in include.map_or(Ok(Vec::new()), include_list)? {
            let folder = path.parent().unwrap_or(Path::new(""));
            self.read(&folder.join(included), Some(path))?;
        }
        self.open.pop();
        self.layers.push(Layer::new(entries));
        Ok(())
    }
}

fn parse(file: &Arc<SourceFile>) -> Result<Vec<Entry>, ConfigError> {
    let within = |span| Place::File { file: Arc::clone(file), span };
    let parsed = DeTable::parse(&file.text).map_err(|error| Problem {
        message: format!("not TOML: {}", error.message()),
        place: within(error.span().unwrap_or(0..0)),
        help: None,
    });
    parsed.and_then(|table| entries(table.get_ref(), &within)).map_err(invalid)
}

fn include_list(entry: Entry) -> Result<Vec<String>, ConfigError> {
    let message = "`include` must be a list of file names".to_owned();
    let wrong = |place| {
        let help = Some("write include = [\"other.toml\"]".to_owned());
        invalid(Problem { message: message.clone(), place, help })
    };
    let Kind::List(items) = entry.value.kind else { return Err(wrong(entry.value.place)) };
    let names = items.into_iter().map(|item| match item.kind {
        Kind::Text(name) => Ok(name),
        _ => Err(wrong(item.place)),
    });
    names.collect()
}

fn invalid(problem: Problem) -> ConfigError {
    ConfigError::Invalid { problems: Problems::sorted(vec![problem]) }
}
