//! Errors of this crate.

/// Errors of making and running models.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A configuration that no such model has.
    #[error("{model}: {reason}")]
    Config {
        /// The model.
        model: &'static str,
        /// The argument, its value, and the values that are accepted.
        reason: String,
    },
    /// An input of a shape that the model does not take.
    #[error("{model}: input has shape {got:?}, expected {want}")]
    Input {
        /// The model.
        model: &'static str,
        /// The input's shape.
        got: Vec<i64>,
        /// The shape that the model takes.
        want: String,
    },
    /// A batch that lacks an array.
    #[error("{model}: the batch has no array {name:?}, only {given:?}; add it with `Batch::with`")]
    Missing {
        /// The model.
        model: &'static str,
        /// The array.
        name: String,
        /// The arrays that the batch has.
        given: Vec<String>,
    },
    /// The network that a loss or a sampler was given failed.
    #[error("the denoiser failed")]
    Denoiser(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A parameter or an operator failed.
    #[error(transparent)]
    Shard(#[from] isobar_shard::Error),
}

impl From<isobar_array::Error> for Error {
    fn from(error: isobar_array::Error) -> Self {
        Self::Shard(error.into())
    }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Checks of a configuration.
pub(crate) struct Checker(pub(crate) &'static str);

impl Checker {
    pub(crate) fn ensure(&self, holds: bool, reason: impl FnOnce() -> String) -> Result<()> {
        if holds { Ok(()) } else { Err(self.error(reason())) }
    }

    pub(crate) fn error(&self, reason: String) -> Error {
        Error::Config { model: self.0, reason }
    }

    /// A count or extent, at least 1 and small enough to multiply with others.
    pub(crate) fn extent(&self, name: &str, value: usize) -> Result<i64> {
        let top = i32::MAX as usize;
        self.ensure((1..=top).contains(&value), || format!("{name} is {value}, expected 1 to {top}"))?;
        Ok(value as i64)
    }

    /// Several counts or extents.
    pub(crate) fn extents<const N: usize>(&self, name: &str, values: [usize; N]) -> Result<[i64; N]> {
        let mut extents = [0; N];
        for (i, (extent, value)) in extents.iter_mut().zip(values).enumerate() {
            *extent = self.extent(&format!("{name}[{i}]"), value)?;
        }
        Ok(extents)
    }

    pub(crate) fn divisible(&self, (name, value): (&str, i64), (of, divisor): (&str, i64)) -> Result<()> {
        self.ensure(value % divisor == 0, || format!("{name} {value} is not divisible by {of} {divisor}"))
    }

    pub(crate) fn probability(&self, name: &str, value: f64) -> Result<()> {
        self.ensure((0.0..1.0).contains(&value), || {
            format!("{name} is {value}, expected 0 or more and below 1")
        })
    }
}
