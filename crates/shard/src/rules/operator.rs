//! Descriptors of operators: each registers in the file of its rule, and is collected at link time (`inventory`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, OnceLock, PoisonError};

use isobar_array::Attrs;
use isobar_array::kernel::{self, Dtype};
use tch::Device;

use super::rule::failed;
use super::{Call, Traffic};
use crate::error::{Error, Result};
use crate::tensor::ShardTensor;

/// Operator of sharded tensors: its name, its tensors and arguments, what a rank receives, and its rule.
/// [`register!`](crate::register) makes it.
#[derive(Debug)]
pub struct Operator {
    name: &'static str,
    summary: &'static str,
    tensors: &'static [&'static str],
    dtypes: &'static [Dtype],
    arguments: &'static [&'static str],
    by_name: &'static [&'static str],
    traffic: Traffic,
    run: Run,
    module: &'static str,
}

/// Names of tensors or arguments.
type Names = &'static [&'static str];

/// Names of tensors, and the dtypes that each may have.
type Typed = (Names, &'static [Dtype]);

type Run = fn(&Call<'_>) -> Result<Vec<ShardTensor>>;

inventory::collect!(Operator);

impl Operator {
    /// Makes a descriptor; [`register!`](crate::register) calls this.
    #[doc(hidden)]
    pub const fn new(
        name: &'static str,
        summary: &'static str,
        ((tensors, dtypes), arguments, by_name): (Typed, Names, Names),
        traffic: Traffic,
        run: Run,
        module: &'static str,
    ) -> Self {
        Self { name, summary, tensors, dtypes, arguments, by_name, traffic, run, module }
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

    /// Returns the dtypes that each of its tensors may have.
    pub fn dtypes(&self) -> &'static [Dtype] {
        self.dtypes
    }

    /// Returns the names of its arguments other than tensors. The last ones may exist only in calls by name.
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

    /// Refuses dtypes that it does not take, before anything is computed or exchanged.
    pub(super) fn check_dtypes(&self, tensors: &[&ShardTensor]) -> Result<()> {
        let device = tensors.first().map_or(Device::Cpu, |tensor| tensor.device());
        let typed = tensors.iter().zip(self.tensors.iter().zip(self.dtypes));
        let typed = typed.map(|(tensor, (name, dtype))| (*name, tensor.kind(), *dtype));
        kernel::check_dtypes(self.name, typed, device)
            .map_err(|source| failed(self.name, tensors, source.into()))
    }

    /// Refuses tensors and arguments that it does not have: to leave them out would compute something else.
    fn check(&self, call: &Call<'_>, tensors: usize, attrs: &Attrs) -> Result<()> {
        self.check_dtypes(call.tensors())?;
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

/// Registers operators of sharded tensors. An entry has a doc comment that says what the operator computes, its name, and in
/// parentheses the names of its tensors (none: any number), each with its [`Dtype`](crate::rules::Dtype) after a colon
/// (default: any). After a semicolon follow the names of its arguments, and after a second one those that only calls by name have. Then follow its [`Traffic`](crate::rules::Traffic), with a function in parentheses if
/// the class needs one, and its rule: a function of a [`Call`](crate::rules::Call) that returns one tensor, two, or a `Vec` of
/// them. A rule is called on all ranks of the mesh, and must decide from layouts only.
///
/// `ShardTensor::op` calls an operator by name and rejects unknown tensors and arguments. An operator with a built-in name replaces the
/// built-in one and its method on sharded tensors. While it runs, the name refers to the built-in operator.
///
/// ```
/// use isobar_array::Elementwise;
/// use isobar_collectives::Group;
/// use isobar_mesh::DeviceMesh;
/// use isobar_shard::{Placement, ShardTensor};
/// use tch::{Kind, Tensor};
///
/// isobar_shard::register! {
///     /// The elements to the power of 3.
///     "cubed"(input) Nothing: |call| { let x = call.tensor(0)?; x.mul(x)?.mul(x) };
///     /// The elements times `factor`, or 2.
///     "scaled"(input: Floating; factor) Nothing: |call| call.tensor(0)?.mul_scalar(call.or("factor", 2.0)?);
/// }
///
/// let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
/// let x = ShardTensor::distribute(&Tensor::from_slice(&[2.0]), &mesh, &[Placement::Shard(0)])?;
/// let y = ShardTensor::op("cubed", &[&x], &Default::default())?;
/// assert_eq!(y[0].full_tensor(None)?, Tensor::from_slice(&[8.0]));
/// let whole = x.to_kind(Kind::Int64)?;
/// assert!(ShardTensor::op("scaled", &[&whole], &Default::default()).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[macro_export]
macro_rules! register {
    ($(
        $(#[doc = $summary:literal])+
        $name:literal($($tensor:ident $(: $dtype:ident)?),* $(; $($argument:ident),* $(; $($by_name:ident),+)?)?) $traffic:ident $(($($bound:expr),+))?:
            |$call:ident| $body:expr;
    )+) => {
        $($crate::inventory::submit! {
            $crate::rules::Operator::new(
                $name,
                concat!($($summary),+),
                (
                    (&[$(stringify!($tensor)),*], &[$($crate::__dtype!($($dtype)?)),*]),
                    &[$($(stringify!($argument),)* $($(stringify!($by_name)),+)?)?],
                    &[$($($(stringify!($by_name)),+)?)?],
                ),
                $crate::rules::Traffic::$traffic $(($($bound),+))?,
                |$call| $crate::rules::IntoTensors::into_tensors($body),
                module_path!(),
            )
        })+
    };
}

/// The dtypes of a tensor in a descriptor: any unless some are named.
#[doc(hidden)]
#[macro_export]
macro_rules! __dtype {
    () => {
        $crate::rules::Dtype::Any
    };
    ($dtype:ident) => {
        $crate::rules::Dtype::$dtype
    };
}

/// Returns whether to check a method's arguments: once in a process, and never for operators with a generator, whose arguments
/// take a draw from it.
pub(crate) fn is_first_call(name: &str) -> bool {
    static CALLED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut called = CALLED.lock().unwrap_or_else(PoisonError::into_inner);
    let draws = || built_in(name).is_some_and(|operator| operator.arguments.contains(&"generator"));
    !called.contains(name) && called.insert(name.to_owned()) && !draws()
}

/// Panics if a method passes an argument that its descriptor lacks, or omits one that its descriptor names, except those that
/// only calls by name have. The names stand in both places, because only the method has the values.
pub(crate) fn assert_arguments(name: &str, args: &Attrs) {
    let Some(operator) = built_in(name) else {
        panic!("{name} has no descriptor; register it beside its rule")
    };
    // A method shared by several operators passes null for arguments that only some of them have.
    let given = args.iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| &name[..]);
    let unknown: Vec<&str> = given.filter(|name| !operator.arguments.contains(name)).collect();
    let needed = operator.arguments.iter().filter(|name| !operator.by_name.contains(name));
    let missing: Vec<&&str> = needed.filter(|name| !args.contains_key(**name)).collect();
    assert!(
        unknown.is_empty() && missing.is_empty(),
        "the method {name} passes {unknown:?}, which its descriptor does not name, or does not pass {missing:?}, which it names; \
         name arguments of calls by name only after a second semicolon"
    );
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

impl<const N: usize> Tensors for [ShardTensor; N] {
    fn into_vec(self) -> Vec<ShardTensor> {
        self.into()
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
