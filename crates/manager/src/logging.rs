//! Messages: rank 0 to the terminal, every rank to its own file of JSON lines.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use isobar_launch::Environment;
use tracing_appender::non_blocking::WorkerGuard;
use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt};

use crate::config::LogConfig;
use crate::rank_thread::thread_is_rank;
use crate::{Error, Result};

/// Guard of the file's writer; dropping it flushes the file.
static WRITER: Mutex<Option<WorkerGuard>> = Mutex::new(None);

/// Sends messages of `tracing` to the terminal (standard error, rank 0 only) and to `rank-<rank>.jsonl` in a folder
/// (every rank; spans with their durations when they close). Call it once in a process, after the rank is known.
///
/// `RUST_LOG` ranks above `config.terminal`; `NO_COLOR` and a standard error that is no terminal turn colours off.
/// `folder` is used where `config.folder` is unset; without either no files are written.
///
/// Does nothing if the program has already installed a subscriber of its own.
///
/// # Errors
///
/// A filter that cannot be read, a folder that cannot be made or written to, a call from a rank that is a thread.
pub fn init(config: &LogConfig, rank: usize, folder: Option<&Path>) -> Result<()> {
    if thread_is_rank() {
        return Err(Error::ThreadRank("the setting-up of logging"));
    }
    let environment = Environment::from_process();
    // On all ranks: rank 0 would fail alone.
    let (name, text) = terminal_filter(config, &environment);
    filter(name, text)?;
    let terminal = match rank {
        0 => Some(terminal_layer(config, &environment)?),
        _ => None,
    };
    let file = match config.folder.as_deref().or(folder) {
        Some(folder) => Some(file_layer(config, rank, folder)?),
        None => None,
    };
    let (file, guard) = file.unzip();
    if tracing_subscriber::registry().with(terminal).with(file).try_init().is_ok() {
        *WRITER.lock().unwrap_or_else(PoisonError::into_inner) = guard;
    }
    say_early();
    Ok(())
}

/// Checks the log filters of the configuration.
pub(crate) fn check(config: &LogConfig) -> Result<()> {
    filter(TERMINAL, &config.terminal)?;
    filter(FILE, &config.file).map(drop)
}

/// Sends messages of the calling thread to the terminal (standard error, rank 0 only) while the guard lives,
/// if the program has not set up logging: for a long-running function in a program that may never call
/// [`init`]. `RUST_LOG` selects the messages, by default `info` and above; an invalid value gives a warning.
/// No global state changes, so that the program may call [`init`], or install its own subscriber, before and
/// after it.
///
/// Returns `None` on other ranks, on a rank that is a thread, and if a subscriber is already installed.
#[must_use = "messages are shown only while this lives"]
pub fn show_where_nobody_does(rank: usize) -> Option<Shown> {
    let goes_nowhere =
        tracing::dispatcher::get_default(|current| current.is::<tracing::subscriber::NoSubscriber>());
    if rank != 0 || thread_is_rank() || !goes_nowhere {
        return None;
    }
    let environment = Environment::from_process();
    let config = LogConfig::default();
    let (layer, refused) = match terminal_layer(&config, &environment) {
        Ok(layer) => (layer, None),
        // Only the environment variable can be wrong.
        Err(error) => (terminal_layer(&config, &Environment::default()).ok()?, Some(error)),
    };
    let shown = Shown { _guard: tracing_subscriber::registry().with(layer).set_default() };
    if let Some(error) = refused {
        tracing::warn!("{error}");
    }
    say_early();
    Some(shown)
}

/// Guard that shows messages while it lives: see [`show_where_nobody_does`].
#[derive(Debug)]
pub struct Shown {
    _guard: tracing::subscriber::DefaultGuard,
}

fn say_early() {
    let early = std::mem::take(&mut *EARLY.lock().unwrap_or_else(PoisonError::into_inner));
    early.into_iter().for_each(|text| tracing::warn!("{text}"));
}

/// Warnings issued before [`init`], which needs the rank; `init` prints them.
static EARLY: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// A warning of the time in which ranks find each other.
pub(crate) fn warn_early(text: String) {
    match tracing::dispatcher::has_been_set() {
        true => tracing::warn!("{text}"),
        false => EARLY.lock().unwrap_or_else(PoisonError::into_inner).push(text),
    }
}

/// Writes out what the file still lacks and closes it. `DistributedManager::cleanup` and the end of the main thread do so.
pub fn flush() {
    drop(WRITER.lock().unwrap_or_else(PoisonError::into_inner).take());
}

type BoxedLayer = Box<dyn Layer<Registry> + Send + Sync>;
type BoxedFileLayer<S> = Box<dyn Layer<S> + Send + Sync>;

fn terminal_layer(config: &LogConfig, environment: &Environment) -> Result<BoxedLayer> {
    let (name, text) = terminal_filter(config, environment);
    let filter = filter(name, text)?;
    let colour = !environment.has("NO_COLOR") && std::io::stderr().is_terminal();
    Ok(fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(colour)
        .with_target(false)
        .with_filter(filter)
        .boxed())
}

fn file_layer<S>(config: &LogConfig, rank: usize, folder: &Path) -> Result<(BoxedFileLayer<S>, WorkerGuard)>
where
    S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a> + Send + Sync,
{
    let failed = |problem: std::io::Error| Error::Log {
        folder: folder.display().to_string(),
        problem: problem.to_string(),
    };
    std::fs::create_dir_all(folder).map_err(failed)?;
    let path = folder.join(format!("rank-{rank}.jsonl"));
    let file = isobar_files::append(path).map_err(failed)?;
    let (writer, guard) = tracing_appender::non_blocking(file);
    let layer = fmt::layer()
        .json()
        .with_span_events(fmt::format::FmtSpan::CLOSE)
        .with_writer(writer)
        .with_filter(filter(FILE, &config.file)?)
        .boxed();
    Ok((layer, guard))
}

const TERMINAL: &str = "distributed.log.terminal";
const FILE: &str = "distributed.log.file";
const VARIABLE: &str = "RUST_LOG";

/// The filter of the terminal, and the name of the key or variable that has it.
fn terminal_filter<'a>(config: &'a LogConfig, environment: &'a Environment) -> (&'static str, &'a str) {
    match environment.get(VARIABLE) {
        Some(text) => (VARIABLE, text),
        None => (TERMINAL, &config.terminal),
    }
}

/// Reads a filter. A word that is not a level would name a target and turn all other messages off. It is an error, since it is
/// usually a misspelt level.
fn filter(name: &'static str, text: &str) -> Result<EnvFilter> {
    let refused = |problem: String| Error::LogFilter { name, filter: text.to_owned(), problem };
    let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
    let mut levels = words.map(|word| word.rsplit('=').next().unwrap_or(word));
    // Spans and their fields are in brackets. The variable is that of all programs in Rust, and targets alone are usual there.
    let is_checked = name != VARIABLE && !text.contains('[');
    if is_checked && let Some(word) = levels.find(|word| word.parse::<LevelFilter>().is_err()) {
        return Err(refused(format!("{word:?} is not a level")));
    }
    EnvFilter::builder().parse(text).map_err(|problem| refused(problem.to_string()))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::level("debug")]
    #[case::number("2")]
    #[case::capitals("WARN")]
    #[case::targets("info,isobar_collectives=debug,hyper=off")]
    #[case::span("info,isobar_train[step{step=3}]=trace,[epoch]")]
    #[case::empty("")]
    fn filters_are_read(#[case] text: &str) {
        filter(FILE, text).unwrap();
    }

    #[rstest]
    #[case::typing_error("debgu", "\"debgu\" is not a level")]
    #[case::target("info,isobar_collectives", "\"isobar_collectives\" is not a level")]
    #[case::level_of_a_target("isobar=loud", "\"loud\" is not a level")]
    fn filters_are_checked(#[case] text: &str, #[case] problem: &str) {
        let config = LogConfig { file: text.to_owned(), ..LogConfig::default() };
        let error = check(&config).unwrap_err().to_string();
        let expected = format!(
            "distributed.log.file is {text:?}: {problem}; expected a level (off, error, warn, info, debug, trace) or target=level, \
             several with commas between them, as in --set distributed.log.file=info,isobar_collectives=debug"
        );
        assert_eq!(error, expected);
    }

    #[test]
    fn the_variable_overrides_the_terminals_filter() {
        let environment: Environment = [("RUST_LOG", "isobar=loud")].into_iter().collect();
        let error = terminal_layer(&LogConfig::default(), &environment).err().unwrap().to_string();
        assert!(
            error.starts_with("RUST_LOG is \"isobar=loud\"")
                && error.ends_with("as in RUST_LOG=info,isobar_collectives=debug"),
            "{error}"
        );
        let other: Environment = [("RUST_LOG", "another_program")].into_iter().collect();
        assert!(terminal_layer(&LogConfig::default(), &other).is_ok());
    }

    #[test]
    fn messages_go_to_the_file_of_the_rank() {
        let folder = tempfile::tempdir().unwrap();
        let (layer, guard) = file_layer(&LogConfig::default(), 3, folder.path()).unwrap();
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            let _span = tracing::debug_span!("all_reduce", bytes = 8).entered();
            tracing::info!(loss = 0.5, "step");
            tracing::trace!("left out");
        });
        drop(guard);
        let text = std::fs::read_to_string(folder.path().join("rank-3.jsonl")).unwrap();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert_eq!(
            (&lines[0]["fields"]["message"], &lines[0]["fields"]["loss"]),
            (&"step".into(), &0.5.into())
        );
        assert_eq!(
            (&lines[1]["fields"]["message"], &lines[1]["span"]["bytes"]),
            (&"close".into(), &8.into())
        );
    }

    #[test]
    fn messages_are_shown_where_nobody_does() {
        let nowhere =
            || tracing::dispatcher::get_default(|now| now.is::<tracing::subscriber::NoSubscriber>());
        assert!(nowhere() && show_where_nobody_does(1).is_none());
        let shown = show_where_nobody_does(0);
        assert!(shown.is_some() && !nowhere(), "rank 0 has the terminal");
        assert!(show_where_nobody_does(0).is_none(), "it goes somewhere already");
        drop(shown);
        assert!(nowhere(), "and the program may still call `init`");
        tracing::subscriber::with_default(tracing_subscriber::registry(), || {
            assert!(show_where_nobody_does(0).is_none(), "the program's own subscriber stays");
        });
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), "").unwrap();
        let result = file_layer::<Registry>(&LogConfig::default(), 0, &folder.path().join("file/logs"));
        assert!(matches!(result, Err(Error::Log { .. })));
    }
}
