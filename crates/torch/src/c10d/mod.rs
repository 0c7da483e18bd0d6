//! torch's gloo group, whose ranks meet at an [`isobar_rendezvous::TcpStore`]: communication for launches without MPI.
//!
//! It carries bytes, and depends on no collective of Isobar.
//!
//! ```
//! use std::time::Duration;
//! use isobar_rendezvous::{TcpStore, Token};
//! use isobar_torch::c10d::{Gloo, GlooOptions};
//! use tch::{Device, Kind, Tensor};
//!
//! let timeout = Duration::from_secs(20);
//! // Port 0: any free one; other ranks are told `store.port()`, and know the token.
//! let token = Token::new(b"0123456789abcdef0123456789abcdef");
//! let store = TcpStore::server(&["127.0.0.1".parse()?], 0, &token, timeout)?;
//! let group = Gloo::new(&store, "world", 0, 1, &GlooOptions::host("127.0.0.1", timeout))?;
//! let t = Tensor::from_slice(&[1.0f32, 2.0]);
//! group.all_reduce(&t, isobar_torch::c10d::ReduceOp::Sum)?.wait(timeout)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bridge;
mod gloo;

pub use gloo::{Gloo, GlooOptions, ReduceOp, Work};

use std::ffi::CString;
use std::time::Duration;

use crate::error::{Error, Result};

fn text(what: &str, value: &str) -> Result<CString> {
    CString::new(value).map_err(|_| Error::Argument(format!("{what} {value:?} holds a zero byte")))
}

/// Milliseconds, rounded up to one, since torch takes zero for no limit.
fn milliseconds(timeout: Duration) -> i64 {
    // A hundred years is as good as for ever, and torch adds it to the clock without overflow.
    const LONGEST: u128 = 100 * 365 * 24 * 3600 * 1000;
    timeout.as_millis().clamp(1, LONGEST) as i64
}

#[cfg(test)]
mod tests;
