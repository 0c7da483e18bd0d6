//! Descriptors of operators: each registers in the file of its rule, and is collected at link time (`inventory`).

use std::collections::BTreeMap;
use std::sync::OnceLock;

use isobar_array::Attrs;

use super::Call;
use crate::error::{Error, Result};
use crate::tensor::ShardTensor;

/// Operator of sharded tensors: its name, its tensors and arguments, what a rank receives, and its rule.
/// [`register!`](crate::register) makes it.
#[derive(Debug)]
pub struct Operator {
    name: &'static str,
    summary: &'static str,
    tensors: &'static [&'static str],
    arguments: &'static [&'static str],
    traffic: Traffic,
    run: Run,
    module: &'static str,
}

type Run = fn(&Call<'_>) -> Result<Vec<ShardTensor>>;

inventory::collect!(Operator);

/// Data that a rank receives from others in an operator and its gradient. `isobar verify` bounds the bytes of each layout by
/// it: of built-in operators, and of a program's own where it is [`Nothing`](Traffic::Nothing).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Traffic {
    /// Nothing.
    Nothing,
    /// The smaller operands and their gradients, where layouts differ.
    SmallerOperands,
    /// The elements of its windows that others hold, and sums of the weights' gradients.
    Halo,
    /// One statistic of each row from each other shard.
    Rows,
    /// The result's terms from each other shard.
    Terms,
    /// Means and squared deviations from each other shard.
    Moments,
    /// The smaller operand of a product, and sums of its gradient; the result, where the contracted dim is sharded.
    Product,
    /// Keys and values once, and once more with their gradients.
    Attention,
    /// The selected elements.
    Selected,
    /// The elements between the boundaries of the old shards and of the new.
    Boundaries,
    /// A dim of extent 1 that was sharded.
    Squeezed,
    /// Tensors whose layouts differ from that of the largest.
    Followed,
    /// The indexed elements and the indices.
    Indexed,
    /// One all-to-all, and one back.
    Sorted,
    /// The best elements of each other shard.
    Best,
    /// One set of points.
    Points,
    /// The points of each other shard, and sums of their gradients.
    Candidates,
    /// The sampled points, and their gradients.
    Samples,
    /// One all-to-all for each transformed dim that is sharded.
    Transform,
}

impl Traffic {
    /// Returns it in words.
    pub fn text(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::SmallerOperands => "the smaller operands, where layouts differ",
            Self::Halo => "its halo",
            Self::Rows => "one statistic of each row from each other shard",
            Self::Terms => "the result's terms from each other shard",
            Self::Moments => "means and squared deviations from each other shard",
            Self::Product => "the smaller operand; the result, where the contracted dim is sharded",
            Self::Attention => "keys and values once (ring), or the heads it computes (all-to-all)",
            Self::Selected => "the selected elements",
            Self::Boundaries => "the elements between old and new boundaries of shards",
            Self::Squeezed => "a sharded dim of extent 1",
            Self::Followed => "tensors whose layouts differ from that of the largest",
            Self::Indexed => "the indexed elements",
            Self::Sorted => "one all-to-all, where the sorted dim is sharded",
            Self::Best => "the best elements of each other shard",
            Self::Points => "one set of points",
            Self::Candidates => "the points of each other shard",
            Self::Samples => "the sampled points",
            Self::Transform => "one all-to-all for each transformed dim that is sharded",
        }
    }
}

impl Operator {
    /// Makes a descriptor; [`register!`](crate::register) calls this.
    #[doc(hidden)]
    pub const fn new(
        name: &'static str,
        summary: &'static str,
        (tensors, arguments): (&'static [&'static str], &'static [&'static str]),
        traffic: Traffic,
        run: Run,
        module: &'static str,
    ) -> Self {
        Self { name, summary, tensors, arguments, traffic, run, module }
    }

    /// Returns its name, which is PyTorch's where PyTorch has the operator.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns what it computes, in a sentence.
    pub fn summary(&self) -> &'static str {
        self.summary.trim()
    }

    /// Returns the names of its tensors in order, optional ones included; none if it takes any number of tensors.
    pub fn tensors(&self) -> &'static [&'static str] {
        self.tensors
    }

    /// Returns the names of its arguments, beside the tensors.
    pub fn arguments(&self) -> &'static [&'static str] {
        self.arguments
    }

    /// Returns what a rank receives from others.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Returns whether this crate registers it, and not the program.
    pub fn is_built_in(&self) -> bool {
        let own = env!("CARGO_CRATE_NAME");
        self.module.split("::").next() == Some(own)
    }

    pub(crate) fn run(&self, tensors: &[&ShardTensor], attrs: &Attrs) -> Result<Vec<ShardTensor>> {
        let call = Call::new(self, tensors, attrs);
        self.check(&call, tensors.len(), attrs)?;
        (self.run)(&call)
    }

    /// Refuses tensors and arguments that it does not have: to leave them out would compute something else.
    fn check(&self, call: &Call<'_>, tensors: usize, attrs: &Attrs) -> Result<()> {
        let most = self.tensors.len();
        if most > 0 && tensors > most {
            let names = self.tensors.join(", ");
            return call.refuse(format!("{tensors} tensors were given; it takes at most {most}: {names}"));
        }
        let unknown =
            attrs.iter().find(|(name, value)| !value.is_null() && !self.arguments.contains(&&name[..]));
        let Some((name, value)) = unknown else { return Ok(()) };
        let known = match self.arguments {
            [] => "it has none".to_owned(),
            names => format!("its arguments are {}", names.join(", ")),
        };
        call.refuse(format!("there is no argument \"{name}\" (given as {value}); {known}"))
    }
}

/// Operators by name.
type Table = BTreeMap<&'static str, &'static Operator>;

/// The built-in operators, and those that a program registers at link time.
fn tables() -> &'static (Table, Table) {
    static TABLES: OnceLock<(Table, Table)> = OnceLock::new();
    TABLES.get_or_init(|| {
        let (mut built_in, mut own) = (Table::new(), Table::new());
        for operator in inventory::iter::<Operator> {
            let table = if operator.is_built_in() { &mut built_in } else { &mut own };
            if let Some(other) = table.insert(operator.name, operator) {
                tracing::warn!(
                    operator = operator.name,
                    "{} is registered in {} and in {}; one of them is never called: rename it",
                    operator.name,
                    operator.module,
                    other.module
                );
            }
        }
        (built_in, own)
    })
}

pub(crate) fn built_in(name: &str) -> Option<&'static Operator> {
    tables().0.get(name).copied()
}

pub(super) fn own(name: &str) -> Option<&'static Operator> {
    tables().1.get(name).copied()
}

pub(super) fn is_any_own() -> bool {
    !tables().1.is_empty()
}

/// Returns the descriptors of all operators, by name; a program's own stands for the built-in one of that name.
///
/// ```
/// let operators = isobar_shard::rules::operators();
/// let softmax = operators.iter().find(|operator| operator.name() == "softmax").unwrap();
/// assert_eq!(softmax.tensors(), ["input"]);
/// ```
pub fn operators() -> Vec<&'static Operator> {
    let (built_in, own) = tables();
    let mut all = built_in.clone();
    all.extend(own);
    all.into_values().collect()
}

/// Registers operators of sharded tensors, each with what it computes, its name, the names of its tensors (none: any number) and,
/// after a semicolon, of its arguments, its [`Traffic`](crate::rules::Traffic), and its rule, a function of a
/// [`Call`](crate::rules::Call) that returns one tensor, two, or a `Vec` of them. A rule is called on all ranks of the mesh, and must
/// decide from layouts only.
///
/// `ShardTensor::op` calls an operator by name and rejects unknown tensors and arguments. An operator with a built-in name replaces the
/// built-in one and its method on sharded tensors. While it runs, the name refers to the built-in operator.
///
/// ```
/// use isobar_array::Elementwise;
/// use isobar_collectives::Group;
/// use isobar_mesh::DeviceMesh;
/// use isobar_shard::{Placement, ShardTensor};
/// use tch::Tensor;
///
/// isobar_shard::register! {
///     /// The elements to the power of 3.
///     "cubed"(input) Nothing: |call| { let x = call.tensor(0)?; x.mul(x)?.mul(x) };
///     /// The elements times `factor`, or 2.
///     "scaled"(input; factor) Nothing: |call| call.tensor(0)?.mul_scalar(call.or("factor", 2.0)?);
/// }
///
/// let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
/// let x = ShardTensor::distribute(&Tensor::from_slice(&[2.0]), &mesh, &[Placement::Shard(0)])?;
/// let y = ShardTensor::op("cubed", &[&x], &Default::default())?;
/// assert_eq!(y[0].full_tensor(None)?, Tensor::from_slice(&[8.0]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[macro_export]
macro_rules! register {
    ($(
        $(#[doc = $summary:literal])+
        $name:literal($($tensor:ident),* $(; $($argument:ident),+)?) $traffic:ident: |$call:ident| $body:expr;
    )+) => {
        $($crate::inventory::submit! {
            $crate::rules::Operator::new(
                $name,
                concat!($($summary),+),
                (&[$(stringify!($tensor)),*], &[$($(stringify!($argument)),+)?]),
                $crate::rules::Traffic::$traffic,
                |$call| $crate::rules::IntoTensors::into_tensors($body),
                module_path!(),
            )
        })+
    };
}

/// Result of the rule of an operator.
#[doc(hidden)]
pub trait IntoTensors {
    /// Returns its tensors in order.
    fn into_tensors(self) -> Result<Vec<ShardTensor>>;
}

/// Tensors that an operator returns.
#[doc(hidden)]
pub trait Tensors {
    /// Returns them in order.
    fn into_vec(self) -> Vec<ShardTensor>;
}

impl<T: Tensors, E: Into<Error>> IntoTensors for Result<T, E> {
    fn into_tensors(self) -> Result<Vec<ShardTensor>> {
        self.map(Tensors::into_vec).map_err(Into::into)
    }
}

impl Tensors for ShardTensor {
    fn into_vec(self) -> Vec<ShardTensor> {
        vec![self]
    }
}

impl Tensors for (ShardTensor, ShardTensor) {
    fn into_vec(self) -> Vec<ShardTensor> {
        vec![self.0, self.1]
    }
}

impl Tensors for Vec<ShardTensor> {
    fn into_vec(self) -> Vec<ShardTensor> {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_of_one_operator_each() {
        let built_in = inventory::iter::<Operator>.into_iter().filter(|operator| operator.is_built_in());
        assert_eq!(built_in.count(), tables().0.len());
    }
}
