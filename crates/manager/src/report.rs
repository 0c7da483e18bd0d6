//! Printing of errors that several ranks share, once.

use std::error::Error;
use std::io::Write;

use isobar_launch::{Environment, Launch, detect, forced_method, reports};
use isobar_torch::error_text;

use crate::config::DistributedConfig;
use crate::{DistributedManager, address, printable};

/// Seconds within which ranks that fail early join the others to report their error.
const JOIN_S: f64 = 10.0;

/// Largest number of characters of an error that are printed.
const LONGEST: usize = 8 << 10;

/// Prints the error that ends this process to standard error, once for all ranks with the same error, and
/// sends it to the other ranks. Call it last, on every rank that fails.
///
/// Rank 0 prints at once. Each other rank sends its error to rank 0, and prints it with its rank unless rank
/// 0 has printed the same text or a report about it. Ranks that fail before they have joined each other, for
/// example because of a wrong command line, join within seconds to compare errors; ranks without an error
/// learn why the others failed. If ranks cannot reach each other, or `distributed.watchdog` is off, each
/// prints its own error. If the launcher's variables contradict each other, the process that they call rank 0
/// prints. Each message is a single write, so that lines of several ranks do not mix.
///
/// [`main`](crate::main) does all of this for a program's `main`.
pub fn report_error(error: &(dyn Error + 'static)) {
    let text = error_text(error);
    report_text(&format!("error: {}", printable(&text)), &text);
}

/// Does the work of [`report_error`] for text: prints `shown`, and sends `text` to the other ranks.
pub fn report_text(shown: &str, text: &str) {
    let (rank, joins, reports) = match DistributedManager::get() {
        Ok(manager) => (manager.rank(), false, true),
        Err(_) => match Launched::from_process() {
            Launched::Alone => (0, false, true),
            Launched::Several(launch) => (launch.rank, !DistributedManager::has_tried(), true),
            // Nobody can be asked; the environment alone says which process prints.
            Launched::Unclear { reports } => (0, false, reports),
        },
    };
    if rank == 0 && reports {
        print(shown);
    }
    if joins {
        let config = DistributedConfig { timeout_s: JOIN_S, ..DistributedConfig::default() };
        // Ranks that cannot reach each other each print their own error.
        let _ = DistributedManager::initialize_with(&config);
    }
    if !DistributedManager::leave(text) && rank > 0 {
        print(&format!("rank {rank} ({}): {shown}", address::host().trim()));
    }
}

/// Launcher's description of this process.
enum Launched {
    Alone,
    Several(Launch),
    /// The environment contradicts itself.
    Unclear {
        reports: bool,
    },
}

impl Launched {
    fn from_process() -> Self {
        let environment = Environment::from_process();
        match forced_method(&environment).and_then(|forced| detect(&environment, forced)) {
            Ok(launch) if launch.world_size == Some(1) => Self::Alone,
            Ok(launch) => Self::Several(launch),
            Err(error) => Self::Unclear { reports: reports(&environment, &error) },
        }
    }
}

/// Writes a message to standard error at once.
fn print(text: &str) {
    let mut message: String = text.chars().take(LONGEST).collect();
    if message.len() < text.len() {
        message.push('…');
    }
    message.push('\n');
    let _ = std::io::stderr().lock().write_all(message.as_bytes());
}
