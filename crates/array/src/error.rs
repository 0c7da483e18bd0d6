//! Errors of this crate.

use std::error::Error as StdError;

use tch::{TchError, Tensor};

/// Errors of arrays and random numbers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operator of libtorch refused its arguments.
    #[error("{} failed: {source}", operation(op, shapes))]
    Operator {
        /// The operator's name.
        op: &'static str,
        /// Kinds and shapes of its tensors.
        shapes: String,
        /// Error of libtorch.
        source: TchError,
    },
    /// An argument that an operator cannot take, found before libtorch is asked.
    #[error("{op}: {reason}")]
    Argument {
        /// The operator's name.
        op: &'static str,
        /// The given and the expected value.
        reason: String,
    },
    /// `Array::op` was asked for a name that nobody registered.
    #[error(
        "unknown operator \"{name}\"; registered are {}; add it with register_op{}",
        list(known),
        meant(name, known)
    )]
    UnknownOperator {
        /// The name asked for.
        name: String,
        /// All registered names.
        known: Vec<String>,
    },
    /// A registered operator failed.
    #[error("operator \"{name}\" failed: {source}")]
    Registered {
        /// Its name in the registry.
        name: String,
        /// Error that it returned.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A random tensor that was asked for with bad arguments.
    #[error("random {what}: {reason}")]
    Random {
        /// The distribution.
        what: &'static str,
        /// Description of the problem.
        reason: String,
    },
    /// The shim refused.
    // This is transparent because its text begins with its origin, such as libtorch or a closure.
    #[error(transparent)]
    Torch(#[from] isobar_torch::Error),
    /// An error of another implementation of `Array`, such as one that communicates.
    // This is transparent because it only carries the error through `Array` to the crate that made it.
    #[error(transparent)]
    Implementation(Box<dyn StdError + Send + Sync>),
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Words that propose the nearest of the known names, or nothing.
fn meant(name: &str, known: &[String]) -> String {
    match isobar_registry::nearest(name, known.iter().map(String::as_str)) {
        Some(near) => format!("; did you mean \"{near}\"?"),
        None => String::new(),
    }
}

fn operation(op: &str, shapes: &str) -> String {
    if shapes.is_empty() { op.to_owned() } else { format!("{op} of {shapes}") }
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

/// Returns the error of an argument that an operator cannot take.
pub fn argument(op: &'static str, reason: impl Into<String>) -> Error {
    Error::Argument { op, reason: reason.into() }
}

/// Refuses an argument that an operator cannot take.
///
/// # Errors
///
/// Always.
pub fn refuse<T>(op: &'static str, reason: impl Into<String>) -> Result<T> {
    Err(argument(op, reason))
}

/// Adds the operator's name and its tensors to an error of libtorch.
///
/// # Errors
///
/// libtorch's.
///
/// ```
/// use isobar_array::kernel::named;
/// use tch::Tensor;
///
/// let (a, b) = (Tensor::from_slice(&[1.0, 2.0]), Tensor::from_slice(&[1.0, 2.0, 3.0]));
/// let error = named("add", &[&a, &b], a.f_add(&b)).unwrap_err();
/// assert!(error.to_string().starts_with("add of Double [2], Double [3] failed: "));
/// ```
pub fn named<T>(op: &'static str, tensors: &[&Tensor], result: Result<T, TchError>) -> Result<T> {
    result.map_err(|source| {
        let shapes: Vec<String> =
            tensors.iter().map(|tensor| format!("{:?} {:?}", Tensor::kind(tensor), tensor.size())).collect();
        Error::Operator { op, shapes: shapes.join(", "), source: first_line(source) }
    })
}

/// libtorch appends its C++ stack to the message.
fn first_line(error: TchError) -> TchError {
    match error {
        TchError::Torch(text) => {
            let end = text.find("\nException raised from").unwrap_or(text.len());
            TchError::Torch(text[..end].trim_end().to_string())
        }
        other => other,
    }
}
