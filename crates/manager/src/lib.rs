//! [`DistributedManager`]: puts launch, configuration, process groups and device mesh together, between a program's start and its
//! first collective, and watches over its ranks from there on.
//!
//! | part | is |
//! |---|---|
//! | [`DistributedManager`] | this process's rank, device, groups and mesh: set up once, reached from anywhere |
//! | [`DeviceMesh`] | ranks arranged along named axes |
//! | [`ProcessGroupConfig`] | trees of process groups |
//! | [`checks`] | what is wrong with the environment of a job, before it trains |
//! | [`launch`] | who started this process, and what that says of rank and transport |
//! | [`config`] | layered configuration files, with places in errors and origins of values |
//! | [`flight`] | what ranks were doing when a job lost one: records, and who was at fault |
//! | [`main`] | the `main` of a program: an error is printed once, with the right exit code |
//! | [`logging`] | messages to the terminal and to a file for each rank |
//!
//! Among the library crates, only this one, [`launch`] and [`config`](isobar_config) read launchers' variables and
//! configuration files. It knows nothing of how tensors are laid out.
//!
//! ```
//! use isobar_manager::DistributedManager;
//!
//! let manager = DistributedManager::initialize()?;
//! assert_eq!((manager.rank(), manager.world_size()), (0, 1));
//! manager.initialize_mesh(&[-1], &["data"])?;
//! assert_eq!(manager.mesh(Some("data"))?.size(), 1);
//! DistributedManager::cleanup(false)?;
//! # Ok::<(), isobar_manager::Error>(())
//! ```

mod address;
pub mod checks;
pub mod config;
mod descriptors;
mod error;
pub mod flight;
mod format;
pub mod logging;
mod manager;
mod printable;
mod program;
mod rank_thread;
mod reason;
mod report;
mod start;
mod terminate;
mod watchdog;

pub use error::{Error, Result};
pub use format::format_bytes;
pub use isobar_launch::{self as launch, Environment};
pub use isobar_mesh::{DeviceMesh, ProcessGroupConfig, ProcessGroupNode};
pub use isobar_rendezvous::Token;
pub use isobar_torch::{BoxError, error_text};
pub use manager::{DistributedManager, SetupOptions, ThreadBinding};
pub use printable::printable;
pub use program::{main, main_with};
pub use reason::ExitReason;
pub use report::{report_error, report_text};
pub use terminate::{Termination, make_file_limit_an_error, remove_partial_outputs};
