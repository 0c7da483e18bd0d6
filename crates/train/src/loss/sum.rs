//! Weighted sum of losses.

use isobar_registry::Registered;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::{Loss, LossArray, LossKind, Support, Weighting};
use crate::error::{Error, Result};

/// Weighted sum of losses: Σ wᵢ Lᵢ. `train.loss = [{ type = "mse" }, { type = "spectral", weight = 0.1 }]` is short for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Sum {
    /// The losses, each a name, or a table of the loss with the key `weight` besides, a finite number above 0, by default 1.
    #[schemars(with = "Vec<serde_json::Value>")]
    pub terms: Vec<Term>,
}

/// A loss in a [`Sum`].
#[derive(Debug, Clone, PartialEq)]
pub struct Term {
    /// Factor of the loss.
    pub weight: f64,
    /// The loss.
    pub loss: LossKind,
}

impl Default for Sum {
    fn default() -> Self {
        Self { terms: vec![Term { weight: 1.0, loss: LossKind::default() }] }
    }
}

impl Serialize for Term {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let failed = <S::Error as serde::ser::Error>::custom::<serde_json::Error>;
        let mut table = match serde_json::to_value(&self.loss).map_err(failed)? {
            Value::Object(table) => table,
            name => Map::from_iter([("type".to_owned(), name)]),
        };
        table.insert("weight".to_owned(), self.weight.into());
        table.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Term {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut value = Value::deserialize(deserializer)?;
        let weight = value.as_object_mut().and_then(|table| table.remove("weight"));
        let weight = match weight {
            None => 1.0,
            Some(weight) => weight.as_f64().ok_or_else(|| {
                D::Error::custom(format!("weight is {weight}, expected a number such as 0.1"))
            })?,
        };
        Ok(Self { weight, loss: serde_json::from_value(value).map_err(D::Error::custom)? })
    }
}

impl Registered for Sum {
    const NAME: &'static str = "sum";
    const SUMMARY: &'static str = "Weighted sum of losses.";
}

impl Loss for Sum {
    fn compute<A: LossArray>(&self, prediction: &A, target: &A) -> Result<A> {
        self.weighted(prediction, target, &Weighting::default())
    }

    fn support(&self) -> Support {
        let supports = || self.terms.iter().map(|term| term.loss.support());
        Support {
            channels: supports().all(|of| of.channels),
            // Those that have no points leave their weights out.
            points: supports().any(|of| of.points),
            members: supports().all(|of| of.members),
            // Each term scales differences itself, or not.
            unscaled: true,
        }
    }

    fn weighted<A: LossArray>(&self, prediction: &A, target: &A, weights: &Weighting<A>) -> Result<A> {
        let mut sum: Option<A> = None;
        for Term { weight, loss } in &self.terms {
            let own = if loss.support().points { None } else { Some(weights.without_area()) };
            let value = loss.weighted(prediction, target, own.as_ref().unwrap_or(weights))?;
            let value = value.mul_scalar(*weight)?;
            sum = Some(match sum {
                None => value,
                Some(sum) => sum.add(&value)?,
            });
        }
        sum.ok_or_else(|| no_terms(&self.terms))
    }

    fn check(&self) -> Result<()> {
        if self.terms.is_empty() {
            return Err(no_terms(&self.terms));
        }
        for (at, Term { weight, loss }) in self.terms.iter().enumerate() {
            if !(weight.is_finite() && *weight > 0.0) {
                let expected =
                    "a finite number above 0, as in --set 'train.loss=[{ type = \"mse\", weight = 0.5 }]'";
                return Err(Error::invalid(format!("the weight of train.loss[{at}]"), weight, expected));
            }
            loss.check()?;
        }
        Ok(())
    }
}

fn no_terms(terms: &[Term]) -> Error {
    Error::setting("train.loss", format!("a sum of {} losses", terms.len()), "a loss at least", "mse")
}

crate::register_loss!(Sum);
