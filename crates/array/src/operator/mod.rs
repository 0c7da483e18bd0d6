//! Operators by name: their signatures, a call's checked arguments, and the dense kernels that are registered under names.
//! This module never knows which operators there are, nor how any of them communicates.

mod argument;
mod call;
mod table;

use tch::Tensor;

pub use argument::{Argument, Form};
pub use call::Call;
pub(crate) use call::meant;
pub use table::{Described, Table};

use crate::error::Result;

#[doc(hidden)]
pub use inventory;

/// Name and arguments of an operator, as PyTorch names them.
///
/// ```
/// use isobar_array::operator::{Argument, Form, Signature};
///
/// static CLIP: Signature = Signature {
///     name: "clip",
///     aliases: &[],
///     package: env!("CARGO_PKG_NAME"),
///     tensors: &["input"],
///     needed: 1,
///     arguments: &[Argument::needed("min", Form::Number), Argument::with("max", Form::Number, "null")],
/// };
/// assert_eq!(CLIP.to_string(), "clip(input; min: number, max: number = null)");
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Signature {
    /// PyTorch's name.
    pub name: &'static str,
    /// Other names of the same operator.
    pub aliases: &'static [&'static str],
    /// Package that registers it. An operator of a program's own replaces a built-in one of its name.
    pub package: &'static str,
    /// Names of its tensors, in order; none for an operator of any number of tensors.
    pub tensors: &'static [&'static str],
    /// Number of tensors that must be given.
    pub needed: usize,
    /// The other arguments.
    pub arguments: &'static [Argument],
}

impl Signature {
    /// Returns the argument of a name.
    pub fn argument(&self, name: &str) -> Option<&'static Argument> {
        self.arguments.iter().find(|argument| argument.name == name)
    }
}

impl std::fmt::Display for Signature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tensor = |(at, name): (usize, &&str)| {
            if at < self.needed { (*name).to_owned() } else { format!("{name} (optional)") }
        };
        let tensors: Vec<String> = match self.tensors {
            [] => vec!["tensors…".to_owned()],
            named => named.iter().enumerate().map(tensor).collect(),
        };
        write!(f, "{}({}", self.name, tensors.join(", "))?;
        for (at, argument) in self.arguments.iter().enumerate() {
            write!(f, "{}{argument}", if at == 0 { "; " } else { ", " })?;
        }
        f.write_str(")")
    }
}

/// A dense kernel under a name: what [`Array::op`](crate::Array::op) of `tch::Tensor` runs. The macro `operator!` of the crate of
/// sharded tensors submits one beside the sharding rule.
#[derive(Debug)]
pub struct DenseOperator {
    /// Name and arguments.
    pub signature: &'static Signature,
    /// Computes the operator on one rank's tensors; differentiable.
    pub call: fn(&Call<'_, Tensor>) -> Result<Vec<Tensor>>,
}

inventory::collect!(DenseOperator);

impl Described for DenseOperator {
    fn signature(&self) -> &'static Signature {
        self.signature
    }
}

/// The linked dense kernels.
pub(crate) fn dense() -> &'static Table<DenseOperator> {
    static TABLE: std::sync::LazyLock<Table<DenseOperator>> =
        std::sync::LazyLock::new(|| Table::new(inventory::iter::<DenseOperator>()));
    &TABLE
}
