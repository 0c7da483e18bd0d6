//! Arguments and results of the original models by the arrays of a batch.

/// Maps the arguments and results of the original model's forward function (PhysicsNeMo, The Well) to the arrays of a
/// [`Batch`](crate::Batch). Golden cases use the original's names.
///
/// ```
/// use isobar_models::{Architecture, PanguConfig, Signature};
///
/// let pangu = PanguConfig::default().signature();
/// assert_eq!(pangu.outputs, ["surface", "upper_air"]);
/// assert_eq!(pangu.array("x"), "fields");
/// assert_eq!((Signature::default().domain)(4), [0, 2, 3]);
/// assert_eq!([0, 1, 3].map(Signature::FEATURES_LAST.domain), [vec![], vec![0], vec![0, 1]]);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Signature {
    /// Pairs of argument and array that override the default mapping of [`array`](Self::array).
    pub arguments: &'static [(&'static str, &'static str)],
    /// The arrays of the results, in order.
    pub outputs: &'static [&'static str],
    /// Returns the indices of the sample and spatial dims of an argument with this number of dims.
    pub domain: fn(usize) -> Vec<usize>,
    /// True if channels are the last dim of the original's arrays, and the second of the batch's.
    pub moves_channels: bool,
}

/// Arguments of most models, and their arrays.
const ARGUMENTS: [(&str, &str); 5] =
    [("input", "fields"), ("x", "fields"), ("mod", "time"), ("t", "time"), ("condition", "conditions")];

impl Signature {
    /// Returns the array of a batch for an argument of the original.
    pub fn array<'a>(&self, argument: &'a str) -> &'a str {
        let mut known = self.arguments.iter().chain(&ARGUMENTS);
        known.find(|(name, _)| *name == argument).map_or(argument, |(_, array)| array)
    }

    /// The signature of points or fields with their features in the last dim.
    pub const FEATURES_LAST: Self =
        Self { domain: |dims| (0..(dims.max(2) - 1).min(dims)).collect(), ..Self::FIELDS };

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
