//! Calls of operators by name: their tensors, and their arguments by name.

use std::fmt::Debug;

use isobar_array::{Attrs, Generator};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IntoDeserializer};
use serde_json::Value;
use tch::Kind;

use super::Operator;
use crate::error::{Error, Result};
use crate::tensor::ShardTensor;

/// A call of an operator by name.
///
/// Every method fails with the name of the operator and of the argument.
#[derive(Debug)]
pub struct Call<'a> {
    operator: &'a Operator,
    tensors: &'a [&'a ShardTensor],
    attrs: &'a Attrs,
}

#[expect(
    clippy::missing_errors_doc,
    reason = "all fail alike: a tensor or an argument that is missing or of another type"
)]
impl<'a> Call<'a> {
    pub(super) fn new(operator: &'a Operator, tensors: &'a [&'a ShardTensor], attrs: &'a Attrs) -> Self {
        Self { operator, tensors, attrs }
    }

    /// Returns all tensors, in the operator's order.
    pub fn tensors(&self) -> &'a [&'a ShardTensor] {
        self.tensors
    }

    /// Returns the tensor at `index`, which is required.
    pub fn tensor(&self, index: usize) -> Result<&'a ShardTensor> {
        match self.tensors.get(index) {
            Some(tensor) => Ok(tensor),
            None => self.refuse(format!(
                "{} tensors were given, expected at least {}; pass the missing ones, or ask for fewer in the operator's descriptor",
                self.tensors.len(),
                index + 1
            )),
        }
    }

    /// Returns the tensor at `index`, if it is there.
    pub fn optional_tensor(&self, index: usize) -> Option<&'a ShardTensor> {
        self.tensors.get(index).copied()
    }

    /// Returns the argument `name`, which is required.
    pub fn get<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        match self.optional(name)? {
            Some(value) => Ok(value),
            None => self.missing(name),
        }
    }

    /// Returns the argument `name`, or the default.
    pub fn or<T: DeserializeOwned>(&self, name: &str, default: T) -> Result<T> {
        Ok(self.optional(name)?.unwrap_or(default))
    }

    /// Returns the argument `name`, if it is there and not null. "inf", "-inf" and "nan" are floating numbers, too, which JSON
    /// lacks.
    pub fn optional<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let Some(value) = self.value(name)? else { return Ok(None) };
        let read = serde_json::from_value(value.clone()).or_else(|error| match not_finite(value) {
            Some(number) => T::deserialize(number.into_deserializer()),
            None => Err(error),
        });
        match read {
            Ok(value) => Ok(Some(value)),
            Err(error) => self.refuse(format!("the argument \"{name}\" is {value}: {error}")),
        }
    }

    /// Returns the number `name`, if it is there.
    pub fn optional_number(&self, name: &str) -> Result<Option<f64>> {
        self.optional(name)
    }

    /// Returns the number `name`, which is required.
    pub fn number(&self, name: &str) -> Result<f64> {
        self.get(name)
    }

    /// Returns the argument `name`, one value or a list of them, or the default.
    pub fn list<T: DeserializeOwned>(&self, name: &str, default: Vec<T>) -> Result<Vec<T>> {
        match self.value(name)? {
            None => Ok(default),
            Some(Value::Array(_)) => self.get(name),
            Some(_) => Ok(vec![self.get(name)?]),
        }
    }

    /// Returns the word `name`, or the default.
    pub(crate) fn word(&self, name: &str, default: &str) -> Result<String> {
        self.or(name, default.to_owned())
    }

    /// Returns whether an argument is there and not null.
    pub(crate) fn has(&self, name: &str) -> Result<bool> {
        Ok(self.value(name)?.is_some())
    }

    /// Fails if both of two mutually exclusive arguments are given.
    pub(crate) fn either(&self, first: &str, second: &str) -> Result<()> {
        match self.has(first)? && self.has(second)? {
            true => self.refuse(format!("both \"{first}\" and \"{second}\" are given; expected one of them")),
            false => Ok(()),
        }
    }

    /// Returns the tensor at `index`, if any; fails if a number of the same name is also given.
    pub(crate) fn tensor_or_number(&self, index: usize) -> Result<Option<&'a ShardTensor>> {
        let tensor = self.optional_tensor(index);
        match self.operator.tensors().get(index) {
            Some(name) if tensor.is_some() && self.has(name)? => {
                self.refuse(format!("\"{name}\" is given as a tensor and as a number; expected one of them"))
            }
            _ => Ok(tensor),
        }
    }

    /// Fails if the argument `name` has another value than its default, the only one that is supported.
    pub(crate) fn only<T: DeserializeOwned + PartialEq + Debug>(&self, name: &str, default: T) -> Result<()> {
        match self.optional::<T>(name)? {
            Some(value) if value != default => {
                self.refuse(format!("\"{name}\" is {value:?}; only {default:?} is supported"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the value of the argument `name`, if it is there and not null.
    fn value(&self, name: &str) -> Result<Option<&'a Value>> {
        if !self.operator.arguments().contains(&name) {
            let op = self.operator.name();
            return self.refuse(format!(
                "its rule reads the argument \"{name}\", which it does not register; name it: \"{op}\"(…; {name})"
            ));
        }
        Ok(self.attrs.get(name).filter(|value| !value.is_null()))
    }

    /// Returns the dtype in the argument `name`, spelled as in libtorch's bindings.
    pub(crate) fn kind(&self, name: &str) -> Result<Kind> {
        const KINDS: [Kind; 12] = [
            Kind::Uint8,
            Kind::Int8,
            Kind::Int16,
            Kind::Int,
            Kind::Int64,
            Kind::Half,
            Kind::BFloat16,
            Kind::Float,
            Kind::Double,
            Kind::ComplexFloat,
            Kind::ComplexDouble,
            Kind::Bool,
        ];
        let text: String = self.get(name)?;
        match KINDS.into_iter().find(|kind| format!("{kind:?}") == text) {
            Some(kind) => Ok(kind),
            None => self.refuse(format!("{name} = \"{text}\"; expected one of {KINDS:?}")),
        }
    }

    /// Returns the generator that is to draw next, from its seed and the number of its draws so far.
    pub(crate) fn generator(&self) -> Result<Option<Generator>> {
        #[derive(Deserialize)]
        struct State {
            seed: u64,
            draws: u64,
        }
        let state: Option<State> = self.optional("generator")?;
        Ok(state.map(|state| Generator::resume(state.seed, state.draws)))
    }

    /// Fails with what is wrong about this call.
    pub fn refuse<T>(&self, reason: impl Into<String>) -> Result<T> {
        Err(Error::from(isobar_array::Error::Argument { op: self.operator.name(), reason: reason.into() }))
    }

    fn missing<T>(&self, name: &str) -> Result<T> {
        self.refuse(format!("the argument \"{name}\" is missing"))
    }
}

/// Returns the number that a word stands for; `None` if it stands for none.
fn not_finite(value: &Value) -> Option<f64> {
    match value.as_str()? {
        "inf" => Some(f64::INFINITY),
        "-inf" => Some(f64::NEG_INFINITY),
        "nan" => Some(f64::NAN),
        _ => None,
    }
}
