//! Errors of this crate.

use tch::TchError;

/// Errors of arrays, parameters and random numbers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A dense operator, an argument or a random number.
    #[error(transparent)]
    Array(isobar_array::Error),
    /// A parameter that cannot be made.
    #[error("parameter \"{name}\": {reason}")]
    Parameter {
        /// The parameter's name.
        name: String,
        /// Description of the problem.
        reason: String,
    },
    /// A state dict that does not fit the model. Nothing was changed.
    #[error(
        "state dict does not fit the model ({}); nothing was loaded",
        differences(missing, unused, wrong)
    )]
    StateDict {
        /// Names that the model has and the state dict lacks.
        missing: Vec<String>,
        /// Names that the state dict has and the model lacks.
        unused: Vec<String>,
        /// Tensors of another shape or dtype, one sentence each.
        wrong: Vec<String>,
    },
    /// A file of tensors could not be read.
    #[error("cannot read tensors from {path}: {source}")]
    File {
        /// The file.
        path: String,
        /// Error of libtorch or the system.
        source: TchError,
    },
    /// A layout that cannot be.
    #[error("layout {placements} of shape {shape:?} on {mesh}: {problem}")]
    Layout {
        /// The mesh.
        mesh: String,
        /// The placements.
        placements: String,
        /// The global shape.
        shape: Vec<i64>,
        /// Description of the problem, and the expected value.
        problem: String,
    },
    /// An operator of sharded tensors failed.
    #[error("{op} of {}: {source}", layouts.join("; "))]
    Sharded {
        /// The operator.
        op: String,
        /// The layouts of its inputs.
        layouts: Vec<String>,
        /// Cause of the failure.
        source: Box<Error>,
    },
    /// An operator would communicate more than it says, where that is forbidden.
    #[error(
        "{op} has no rule for {layouts} and would gather {bytes} bytes, which is forbidden here; redistribute before it, or \
         register a rule with register_sharding or register_sharded_op"
    )]
    HiddenCommunication {
        /// The operator.
        op: String,
        /// The layouts of its inputs.
        layouts: String,
        /// Bytes that a rank would receive.
        bytes: i64,
    },
    /// A mesh refused.
    #[error("{0}")]
    Mesh(#[from] isobar_mesh::Error),
    /// The communication under an operator failed.
    #[error("{0}")]
    Communication(#[from] isobar_collectives::Error),
    /// The shim refused.
    #[error(transparent)]
    Torch(#[from] isobar_torch::Error),
}

impl Error {
    /// As an error of a collective, which adjoints give.
    pub(crate) fn into_communication(self) -> isobar_collectives::Error {
        match self.communication() {
            Some(error) => error.clone(),
            None => isobar_collectives::Error::Torch(self.to_string()),
        }
    }

    /// The failed communication at the bottom of this error, whatever operator met it.
    #[must_use]
    pub fn communication(&self) -> Option<&isobar_collectives::Error> {
        match self {
            Self::Communication(error) | Self::Mesh(isobar_mesh::Error::Collective(error)) => Some(error),
            Self::Sharded { source, .. } => source.communication(),
            _ => None,
        }
    }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

fn differences(missing: &[String], unused: &[String], wrong: &[String]) -> String {
    let mut parts = Vec::new();
    for (what, names) in [("missing", missing), ("not of this model", unused)] {
        if !names.is_empty() {
            parts.push(format!("{what}: {}", names.join(", ")));
        }
    }
    parts.extend(wrong.iter().cloned());
    parts.join("; ")
}

impl From<isobar_array::Error> for Error {
    /// Unwraps an error of this crate that went through a method of `Array`.
    fn from(error: isobar_array::Error) -> Self {
        match error {
            isobar_array::Error::Implementation(inner) => match inner.downcast() {
                Ok(own) => *own,
                Err(other) => Self::Array(isobar_array::Error::Implementation(other)),
            },
            error => Self::Array(error),
        }
    }
}

impl From<Error> for isobar_array::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Array(error) => error,
            error => Self::Implementation(Box::new(error)),
        }
    }
}
