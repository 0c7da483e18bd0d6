//! Spectral weights, whole or made of factors.

use isobar_array::Array;
use isobar_shard::{Init, Params, Placement, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Kind;

/// Factorization of a spectral weight.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Factorization {
    /// It is a parameter itself.
    #[default]
    None,
    /// A smaller tensor, times a matrix along each dim: Tucker, *Psychometrika* 31, 1966.
    Tucker,
    /// A sum of products of a vector for each dim: Hitchcock, *J. Math. Phys.* 6, 1927.
    Cp,
}

/// A complex weight `[in, out, modes…]`.
#[derive(Debug)]
pub(super) enum SpectralWeight<A> {
    /// With real and imaginary part as the last dim.
    Whole(A),
    /// A core, and a matrix for each dim.
    Tucker { core: A, factors: Vec<A> },
    /// A weight for each term, and the terms' vectors for each dim.
    Cp { core: A, factors: Vec<A> },
}

impl<A: Array> SpectralWeight<A> {
    /// The weight `name` of the given shape. Entries of a whole one start uniform in [0, `scale`); factored ones are normal,
    /// of the same mean square.
    pub(super) fn new(
        name: &str,
        shape: &[i64],
        scale: f64,
        (factorization, rank): (Factorization, f64),
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let whole = Placement::Replicate;
        let pairs = |shape: &[i64]| [shape, &[2]].concat();
        let ranks = match factorization {
            Factorization::None => {
                let start = Init::Uniform { low: 0.0, high: scale };
                return Ok(Self::Whole(params.param(name, &pairs(shape), start, whole)?));
            }
            Factorization::Tucker => tucker_ranks(shape, rank),
            Factorization::Cp => vec![cp_rank(shape, rank)],
        };
        let mut params = params.scope(name);
        let normal = |std| Init::Normal { mean: 0.0, std };
        let core = params.param("core", &pairs(&ranks), normal(scale / 3f64.sqrt()), whole)?;
        let mut factors = Vec::with_capacity(shape.len());
        for (dim, &extent) in shape.iter().enumerate() {
            // The products add up `terms` numbers: of this mean square they keep that of the core.
            let (terms, share) = match factorization {
                Factorization::Cp => (ranks[0], 1.0 / shape.len() as f64),
                _ => (ranks[dim], 1.0),
            };
            let std = ((terms as f64).powf(-share) / 2.0).sqrt();
            factors.push(params.param(&format!("factors.{dim}"), &[extent, terms, 2], normal(std), whole)?);
        }
        Ok(match factorization {
            Factorization::Cp => Self::Cp { core, factors },
            _ => Self::Tucker { core, factors },
        })
    }

    /// The whole weight, complex, with parts of the given dtype.
    pub(super) fn complex(&self, kind: Kind) -> Result<A> {
        let pairs = |parameter: &A| parameter.to_kind(kind)?.view_as_complex();
        match self {
            Self::Whole(weight) => Ok(pairs(weight)?),
            Self::Tucker { core, factors } => {
                let core = pairs(core)?;
                let mut shape = core.shape();
                let mut weight = core;
                // The first dim is multiplied and goes to the end; after all of them each is in its place again.
                for factor in factors {
                    let factor = pairs(factor)?;
                    let (extent, terms) = (factor.extent(0)?, shape.remove(0));
                    let rest: i64 = shape.iter().product();
                    weight = weight.reshape(&[terms, rest])?.transpose(0, 1)?;
                    weight = weight.matmul(&factor.transpose(0, 1)?)?;
                    shape.push(extent);
                }
                Ok(weight.reshape(&shape)?)
            }
            Self::Cp { core, factors } => {
                let core = pairs(core)?;
                let terms = core.extent(0)?;
                let mut weight = core.reshape(&[1, terms])?;
                let mut shape = Vec::with_capacity(factors.len());
                for (index, factor) in factors.iter().enumerate() {
                    let factor = pairs(factor)?;
                    let (points, extent) = (weight.extent(0)?, factor.extent(0)?);
                    shape.push(extent);
                    weight = match index + 1 == factors.len() {
                        true => weight.matmul(&factor.transpose(0, 1)?)?,
                        false => {
                            let products = weight.unsqueeze(1)?.mul(&factor.unsqueeze(0)?)?;
                            products.reshape(&[points * extent, terms])?
                        }
                    };
                }
                Ok(weight.reshape(&shape)?)
            }
        }
    }
}

/// The extents of a core, in about the proportions of `shape`, such that core and factors have at most the fraction `rank` of
/// its elements, and at least one each.
fn tucker_ranks(shape: &[i64], rank: f64) -> Vec<i64> {
    let total: f64 = shape.iter().map(|&extent| extent as f64).product();
    let ranks = |share: f64| -> Vec<i64> {
        shape.iter().map(|&extent| ((extent as f64 * share).round() as i64).clamp(1, extent)).collect()
    };
    let fits = |ranks: &[i64]| {
        let core: f64 = ranks.iter().map(|&extent| extent as f64).product();
        let factors: f64 = ranks.iter().zip(shape).map(|(&rank, &extent)| (rank * extent) as f64).sum();
        core + factors <= rank * total
    };
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..40 {
        let middle = (low + high) / 2.0;
        if fits(&ranks(middle)) { low = middle } else { high = middle }
    }
    ranks(low)
}

/// The number of terms with at most the fraction `rank` of the elements of `shape`, and at least one.
fn cp_rank(shape: &[i64], rank: f64) -> i64 {
    let total: f64 = shape.iter().map(|&extent| extent as f64).product();
    let term = 1 + shape.iter().sum::<i64>();
    ((rank * total / term as f64) as i64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_the_fraction_asked_for() {
        let shape = [32, 32, 16, 16];
        let total = shape.iter().product::<i64>() as f64;
        for rank in [0.01, 0.1, 0.5] {
            let ranks = tucker_ranks(&shape, rank);
            let size = ranks.iter().product::<i64>()
                + ranks.iter().zip(&shape).map(|(rank, extent)| rank * extent).sum::<i64>();
            assert!(size as f64 <= rank * total && size as f64 > 0.5 * rank * total, "{ranks:?}");
            let terms = cp_rank(&shape, rank);
            assert!((terms * 97) as f64 <= rank * total && ((terms + 1) * 97) as f64 > rank * total);
        }
        assert_eq!((tucker_ranks(&[2, 2, 3], 1e-9), cp_rank(&[2, 2, 3], 1e-9)), (vec![1, 1, 1], 1));
    }
}
