//! The crate's error.

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of the store and of its token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The store cannot be served or reached, or refuses a request.
    #[error("the store at {address}: {problem}")]
    Store {
        /// Address.
        address: String,
        /// Description of the problem.
        problem: String,
    },
    /// The store did not answer in time.
    #[error("the store at {address}: timeout: {problem}")]
    Timeout {
        /// Address.
        address: String,
        /// Description of the problem.
        problem: String,
    },
    /// A store without an address to listen on.
    #[error("a store needs an address to listen on")]
    NoAddress,
    /// A system without random numbers.
    #[error("the system gives no random numbers: {0}")]
    RandomNumbers(String),
}

impl Error {
    /// Returns whether a store did not answer in time, or none was there.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Timeout { .. })
    }
}
