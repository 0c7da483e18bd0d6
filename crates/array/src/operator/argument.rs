//! Arguments of operators.

use std::fmt;

use serde_json::Value;

/// An argument of an operator, by PyTorch's name.
#[derive(Debug, Clone, Copy)]
pub struct Argument {
    /// Its name.
    pub name: &'static str,
    /// Values that it takes.
    pub form: Form,
    /// Default as JSON; `None` where it must be given.
    pub default: Option<&'static str>,
}

/// Values that an argument takes.
#[derive(Debug, Clone, Copy)]
pub enum Form {
    /// `true` or `false`.
    Flag,
    /// A whole number.
    Integer,
    /// A whole number, or several.
    Integers,
    /// A number; infinities and NaN by their names.
    Number,
    /// A number, or several.
    Numbers,
    /// One of these words; any text, where there are none.
    Text(&'static [&'static str]),
    /// Whole numbers, or one of these words.
    IntegersOr(&'static [&'static str]),
    /// Anything else, such as a table, in these words.
    Other(&'static str),
}

impl Argument {
    /// Makes an argument that must be given.
    pub const fn needed(name: &'static str, form: Form) -> Self {
        Self { name, form, default: None }
    }

    /// Makes an argument with a default, as JSON.
    pub const fn with(name: &'static str, form: Form, default: &'static str) -> Self {
        Self { name, form, default: Some(default) }
    }

    /// Returns whether the argument takes a value.
    pub(super) fn takes(&self, value: &Value) -> bool {
        value.is_null() && self.default.is_some() || self.form.takes(value)
    }
}

impl Form {
    fn takes(self, value: &Value) -> bool {
        let integer = |value: &Value| value.is_i64() || value.is_u64() || value.is_null();
        let number =
            |value: &Value| value.is_number() || matches!(value.as_str(), Some("inf" | "-inf" | "nan"));
        let all =
            |each: &dyn Fn(&Value) -> bool| value.as_array().is_some_and(|values| values.iter().all(each));
        let word =
            |words: &[&str]| value.as_str().is_some_and(|text| words.is_empty() || words.contains(&text));
        match self {
            Self::Flag => value.is_boolean(),
            Self::Integer => value.is_i64() || value.is_u64(),
            Self::Integers => !value.is_null() && integer(value) || all(&integer),
            Self::Number => number(value),
            Self::Numbers => number(value) || all(&number),
            Self::Text(words) => word(words),
            Self::IntegersOr(words) => Self::Integers.takes(value) || word(words),
            Self::Other(_) => true,
        }
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("true or false"),
            Self::Integer => f.write_str("integer"),
            Self::Integers => f.write_str("integer or list of integers"),
            Self::Number => f.write_str("number"),
            Self::Numbers => f.write_str("number or list of numbers"),
            Self::Text([]) => f.write_str("text"),
            Self::Text(words) => f.write_str(&words.join(" | ")),
            Self::IntegersOr(words) => write!(f, "integer, list of integers, {}", words.join(" | ")),
            Self::Other(words) => f.write_str(words),
        }
    }
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.form)?;
        self.default.map_or(Ok(()), |default| write!(f, " = {default}"))
    }
}
