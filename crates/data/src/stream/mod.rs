//! Samples that are read while they are needed: this rank's window of them, ahead of their use, in bounded memory.
//!
//! A [`Source`] knows which frames a request needs and reads them. A [`Reader`] reads requests ahead in background threads and
//! keeps account of their memory. [`Streamed`] makes batches of what was read.
//!
//! Nothing here depends on a format, and no rank reads for another.

mod account;
mod options;
mod reader;
mod source;
mod streamed;

pub use self::account::Account;
pub use self::options::{StreamOptions, TargetWindow};
pub use self::reader::{Reader, ReaderOptions};
pub use self::streamed::Streamed;
