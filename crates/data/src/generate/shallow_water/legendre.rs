//! Gauss–Legendre quadrature and associated Legendre functions.

use std::f64::consts::PI;

use tch::Tensor;

use crate::Result;

/// Returns the nodes of Gauss–Legendre quadrature on `[-1, 1]`, descending, and their weights. It is exact for polynomials of degree
/// below twice the number of nodes.
pub(super) fn gauss_legendre(count: usize) -> (Vec<f64>, Vec<f64>) {
    (0..count)
        .map(|at| {
            let mut node = (PI * (at as f64 + 0.75) / (count as f64 + 0.5)).cos();
            // Newton's method doubles the digits of this estimate, about four, in each step.
            for _ in 0..5 {
                let (value, slope) = polynomial(count, node);
                node -= value / slope;
            }
            let (_, slope) = polynomial(count, node);
            (node, 2.0 / ((1.0 - node * node) * slope * slope))
        })
        .unzip()
}

/// The Legendre polynomial of a degree above 0 and its derivative, inside of `(-1, 1)`.
fn polynomial(degree: usize, x: f64) -> (f64, f64) {
    let (mut before, mut value) = (1.0, x);
    for l in 2..=degree {
        let l = l as f64;
        (before, value) = (value, ((2.0 * l - 1.0) * x * value - (l - 1.0) * before) / l);
    }
    (value, degree as f64 * (before - x * value) / (1.0 - x * x))
}

/// Associated Legendre functions `[m, point, l]`, zero for l < m: P(l, m) of unit norm on `[-1, 1]`.
#[derive(Debug)]
pub(super) struct Functions {
    pub(super) values: Tensor,
    /// (1 − μ²) dP/dμ.
    pub(super) slopes: Tensor,
}

impl Functions {
    /// Evaluates those of degrees up to `truncation` at sines of latitudes.
    pub(super) fn new(truncation: usize, sines: &[f64]) -> Result<Self> {
        let size = (truncation + 1) * sines.len() * (truncation + 1);
        let (mut values, mut slopes) = (Vec::with_capacity(size), Vec::with_capacity(size));
        // P(m, m) at each point.
        let mut diagonal = vec![0.5_f64.sqrt(); sines.len()];
        for m in 0..=truncation {
            for (&sine, first) in sines.iter().zip(&mut diagonal) {
                if m > 0 {
                    *first *= ((1.0 - sine * sine) * (1.0 + 0.5 / m as f64)).sqrt();
                }
                let functions = of_order(m, truncation + 1, sine, *first);
                values.extend(&functions[..=truncation]);
                slopes.extend((0..=truncation).map(|l| slope(&functions, l, m)));
            }
        }
        let shape = [truncation as i64 + 1, sines.len() as i64, truncation as i64 + 1];
        let table = |numbers: &[f64]| -> Result<Tensor> { Ok(Tensor::f_from_slice(numbers)?.f_view(shape)?) };
        Ok(Self { values: table(&values)?, slopes: table(&slopes)? })
    }
}

/// P(l, m) at a point for l = 0, …, `last`, given P(m, m).
fn of_order(m: usize, last: usize, sine: f64, first: f64) -> Vec<f64> {
    let mut functions = vec![0.0; last + 1];
    functions[m] = first;
    for l in m + 1..=last {
        let before = if l > m + 1 { functions[l - 2] } else { 0.0 };
        functions[l] = (sine * functions[l - 1] - ratio(l - 1, m) * before) / ratio(l, m);
    }
    functions
}

/// (1 − μ²) dP(l, m)/dμ from the functions of the degrees next to l.
fn slope(functions: &[f64], l: usize, m: usize) -> f64 {
    if l < m {
        return 0.0;
    }
    let below = if l > m { (l + 1) as f64 * ratio(l, m) * functions[l - 1] } else { 0.0 };
    below - l as f64 * ratio(l + 1, m) * functions[l + 1]
}

/// The factor of the recurrence μ P(l, m) = ε(l + 1, m) P(l + 1, m) + ε(l, m) P(l − 1, m).
fn ratio(l: usize, m: usize) -> f64 {
    let (l, m) = (l as f64, m as f64);
    ((l * l - m * m) / (4.0 * l * l - 1.0)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quadrature_integrates_polynomials() {
        let (nodes, weights) = gauss_legendre(8);
        assert!(nodes.is_sorted_by(|one, other| one > other));
        for power in 0..16 {
            let sum: f64 = nodes.iter().zip(&weights).map(|(node, weight)| weight * node.powi(power)).sum();
            let exact = if power % 2 == 0 { 2.0 / f64::from(power + 1) } else { 0.0 };
            assert!((sum - exact).abs() < 1e-14, "{power}: {sum}");
        }
    }

    #[test]
    fn functions_and_slopes_have_their_closed_forms() {
        let sine = 0.3_f64;
        let square: f64 = 1.0 - sine * sine;
        let functions = Functions::new(3, &[sine]).unwrap();
        let at = |table: &Tensor, l: i64, m: i64| table.double_value(&[m, 0, l]);
        for (l, m, value, slope) in [
            (0, 0, 0.5_f64.sqrt(), 0.0),
            (1, 0, 1.5_f64.sqrt() * sine, 1.5_f64.sqrt()),
            (2, 0, 2.5_f64.sqrt() * (1.5 * sine * sine - 0.5), 2.5_f64.sqrt() * 3.0 * sine),
            (1, 1, 0.75_f64.sqrt() * square.sqrt(), -0.75_f64.sqrt() * sine / square.sqrt()),
            (2, 2, (15.0_f64 / 16.0).sqrt() * square, -(15.0_f64 / 16.0).sqrt() * 2.0 * sine),
        ] {
            assert!((at(&functions.values, l, m) - value).abs() < 1e-15, "P({l}, {m})");
            assert!((at(&functions.slopes, l, m) - square * slope).abs() < 1e-15, "slope of P({l}, {m})");
        }
        assert_eq!((at(&functions.values, 1, 2), at(&functions.slopes, 1, 2)), (0.0, 0.0));
    }
}
