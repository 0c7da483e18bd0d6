//! A call of an operator by name.

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Signature;
use crate::array::Attrs;
use crate::error::{Error, Result};

/// A call of an operator by name, with checked arguments.
///
/// ```
/// use isobar_array::operator::{Argument, Call, Form, Signature};
/// use tch::Tensor;
///
/// static CLIP: Signature = Signature {
///     name: "clip",
///     aliases: &[],
///     package: env!("CARGO_PKG_NAME"),
///     tensors: &["input"],
///     needed: 1,
///     arguments: &[Argument::needed("min", Form::Number), Argument::with("max", Form::Number, "\"inf\"")],
/// };
/// let x = Tensor::from_slice(&[1.0, 2.0]);
/// let attrs = isobar_array::args!("min": 1.5)();
/// let call = Call::new(&CLIP, &[&x], &attrs)?;
/// assert_eq!((call.number("min")?, call.number("max")?), (Some(1.5), Some(f64::INFINITY)));
///
/// let attrs = isobar_array::args!("mni": 1.5)();
/// let error = Call::new(&CLIP, &[&x], &attrs).unwrap_err().to_string();
/// assert!(error.starts_with("clip: there is no argument \"mni\"; did you mean \"min\"?"), "{error}");
/// # Ok::<(), isobar_array::Error>(())
/// ```
#[derive(Debug)]
pub struct Call<'a, A> {
    signature: &'static Signature,
    inputs: &'a [&'a A],
    attrs: &'a Attrs,
}

impl<'a, A> Call<'a, A> {
    /// Checks the number of tensors, and the arguments' names and forms.
    ///
    /// # Errors
    ///
    /// One that lists the operator's arguments.
    pub fn new(signature: &'static Signature, inputs: &'a [&'a A], attrs: &'a Attrs) -> Result<Self> {
        let call = Self { signature, inputs, attrs };
        let count = inputs.len();
        let most = if signature.tensors.is_empty() { usize::MAX } else { signature.tensors.len() };
        if !(signature.needed..=most).contains(&count) {
            return call.wrong(&format!("{count} tensors were given"));
        }
        for (name, value) in attrs {
            match signature.argument(name) {
                None => {
                    let known = signature.arguments.iter().map(|argument| argument.name);
                    let meant = meant(name, known);
                    return call.wrong(&format!("there is no argument \"{name}\"{meant}"));
                }
                Some(argument) if !argument.takes(value) => {
                    return call
                        .wrong(&format!("the argument \"{name}\" is {value}, expected {}", argument.form));
                }
                Some(_) => {}
            }
        }
        let given = |name: &str| attrs.get(name).is_some_and(|value| !value.is_null());
        let mut missing = signature.arguments.iter().filter(|argument| argument.default.is_none());
        match missing.find(|argument| !given(argument.name)) {
            Some(argument) => call.wrong(&format!("the argument \"{}\" is missing", argument.name)),
            None => Ok(call),
        }
    }

    fn wrong<T>(&self, what: &str) -> Result<T> {
        self.refuse(format!("{what}; expected {}", self.signature))
    }

    /// Refuses the call.
    ///
    /// # Errors
    ///
    /// Always.
    pub fn refuse<T>(&self, reason: impl Into<String>) -> Result<T> {
        Err(Error::Argument { op: self.signature.name, reason: reason.into() })
    }

    /// Name of the operator.
    pub fn name(&self) -> &'static str {
        self.signature.name
    }

    /// All tensors.
    pub fn inputs(&self) -> &'a [&'a A] {
        self.inputs
    }

    /// The other arguments as given.
    pub fn attrs(&self) -> &'a Attrs {
        self.attrs
    }

    /// Returns tensor `index`.
    ///
    /// # Errors
    ///
    /// It was not given.
    pub fn tensor(&self, index: usize) -> Result<&'a A> {
        match self.inputs.get(index) {
            Some(input) => Ok(input),
            None => self.wrong(&format!("{} tensors were given", self.inputs.len())),
        }
    }

    /// Returns tensor `index`, where it was given.
    pub fn optional_tensor(&self, index: usize) -> Option<&'a A> {
        self.inputs.get(index).copied()
    }

    /// Returns the argument `name`, or its default; `None` for null.
    ///
    /// # Errors
    ///
    /// Another type than `T`; a name that the signature lacks.
    pub fn optional<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        match self.value(name)? {
            Value::Null => Ok(None),
            value => match serde_json::from_value(value.clone()) {
                Ok(value) => Ok(Some(value)),
                Err(error) => self.wrong(&format!("the argument \"{name}\" is {value}: {error}")),
            },
        }
    }

    /// Returns the argument `name`, or its default.
    ///
    /// # Errors
    ///
    /// As [`optional`](Self::optional); null.
    pub fn get<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        match self.optional(name)? {
            Some(value) => Ok(value),
            None => self.wrong(&format!("the argument \"{name}\" is missing")),
        }
    }

    /// Returns one value or several as a list; nothing for null.
    ///
    /// # Errors
    ///
    /// As [`optional`](Self::optional).
    pub fn list<T: DeserializeOwned>(&self, name: &str) -> Result<Vec<T>> {
        match self.value(name)? {
            Value::Null => Ok(Vec::new()),
            Value::Array(_) => self.get(name),
            _ => Ok(vec![self.get(name)?]),
        }
    }

    /// Returns a number, also one that is not finite.
    ///
    /// # Errors
    ///
    /// As [`optional`](Self::optional).
    pub fn number(&self, name: &str) -> Result<Option<f64>> {
        match self.value(name)?.as_str() {
            Some("inf") => Ok(Some(f64::INFINITY)),
            Some("-inf") => Ok(Some(f64::NEG_INFINITY)),
            Some("nan") => Ok(Some(f64::NAN)),
            _ => self.optional(name),
        }
    }

    fn value(&self, name: &str) -> Result<Value> {
        if let Some(value) = self.attrs.get(name).filter(|value| !value.is_null()) {
            return Ok(value.clone());
        }
        let Some(argument) = self.signature.argument(name) else {
            return self.refuse(format!("its signature has no argument \"{name}\": {}", self.signature));
        };
        let default = argument.default.unwrap_or("null");
        serde_json::from_str(default)
            .or_else(|error| self.refuse(format!("the default {default} of \"{name}\" is no JSON: {error}")))
    }
}

/// Words that propose the nearest of the known names, or nothing.
pub(crate) fn meant<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> String {
    let near = known.map(|known| (strsim::damerau_levenshtein(name, known), known)).min();
    match near.filter(|(distance, _)| *distance <= name.chars().count().div_ceil(3)) {
        Some((_, near)) => format!("; did you mean \"{near}\"?"),
        None => String::new(),
    }
}
