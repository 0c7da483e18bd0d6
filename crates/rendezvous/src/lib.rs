//! Key-value store over TCP at which the ranks of a job meet without MPI. Only clients that know the job's token may connect.
//!
//! ```
//! use std::time::Duration;
//! use isobar_rendezvous::{TcpStore, Token};
//!
//! let timeout = Duration::from_secs(20);
//! // Port 0 takes any free port; give `store.port()` and the token to the other ranks.
//! let token = Token::new(b"0123456789abcdef0123456789abcdef");
//! let store = TcpStore::server(&["127.0.0.1".parse()?], 0, &token, timeout)?;
//! store.set("answer", b"42")?;
//! assert_eq!(store.get("answer", timeout)?, b"42");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! gloo's groups meet at it (`isobar_torch::c10d`), and the watchdog's connections use its [`Token`]. This crate knows
//! nothing of tensors or ranks, and reads no environment variable.

mod client;
mod error;
mod port;
mod server;
mod store;
mod table;
#[cfg(test)]
mod tests;
mod token;
mod wire;

pub use error::{Error, Result};
pub use port::FreePort;
pub use store::TcpStore;
pub use token::{Nonce, Proof, Token};
