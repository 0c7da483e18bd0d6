//! Forward functions of the models' sources, by the arrays of a batch.

/// How the forward function of a model's source (PhysicsNeMo, The Well) stands for a [`Batch`](crate::Batch): golden cases and
/// weights follow the source.
///
/// ```
/// use isobar_models::{Architecture, PanguConfig, Signature};
///
/// let pangu = PanguConfig::default().signature();
/// assert_eq!(pangu.outputs, ["surface", "upper_air"]);
/// assert_eq!(pangu.array("x"), "fields");
/// assert_eq!((Signature::default().domain)(4), [0, 2, 3]);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Signature {
    /// Arguments that stand for another array than [`array`](Self::array) says for all models, and the array.
    pub arguments: &'static [(&'static str, &'static str)],
    /// The arrays of the results, in order.
    pub outputs: &'static [&'static str],
    /// Returns which of so many dims of an argument are those of the samples and of space.
    pub domain: fn(usize) -> Vec<usize>,
    /// True if channels are the last dim in the source, and the second in a batch.
    pub moves_channels: bool,
}

/// Arguments of most sources, and their arrays.
const ARGUMENTS: [(&str, &str); 5] =
    [("input", "fields"), ("x", "fields"), ("mod", "time"), ("t", "time"), ("condition", "conditions")];

impl Signature {
    /// Returns the array of a batch that an argument of the source stands for.
    pub fn array<'a>(&self, argument: &'a str) -> &'a str {
        let mut known = self.arguments.iter().chain(&ARGUMENTS);
        known.find(|(name, _)| *name == argument).map_or(argument, |(_, array)| array)
    }

    /// The signature of points or fields with their features in the last dim.
    pub const FEATURES_LAST: Self = Self { domain: |dims| (0..dims.max(2) - 1).collect(), ..Self::FIELDS };

    /// The signature of fields with their channels in the second dim.
    pub const FIELDS: Self = Self {
        arguments: &[],
        outputs: &["fields"],
        domain: |dims| (0..dims).filter(|&dim| dim != 1).collect(),
        moves_channels: false,
    };
}

impl Default for Signature {
    fn default() -> Self {
        Self::FIELDS
    }
}
