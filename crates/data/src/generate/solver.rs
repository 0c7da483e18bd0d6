//! Finite volumes for Darcy flow.

use faer::linalg::solvers::Solve;
use faer::sparse::linalg::solvers::{Llt, SymbolicLlt};
use faer::sparse::{SparseColMatRef, SymbolicSparseColMat};
use faer::{MatMut, Side};

use crate::{Error, Result};

/// Solves −∇·(a ∇u) = f on the unit square with u = 0 on its boundary, for cell values on n × n equal cells.
///
/// Five-point finite volumes in float64: the flux through a face is the difference of the two cell values times the
/// harmonic mean of their coefficients, which keeps second order where a jumps at a face; the boundary lies half a cell
/// outside the outermost centres. The system is solved directly by sparse Cholesky factorisation. Its structure depends
/// on n only and is analysed once, so keep the solver for many coefficients; a clone shares the analysis, for use in
/// another thread.
///
/// Cell (i, j), at x = (i + ½) / n and y = (j + ½) / n, has index `i * n + j`, as in the files.
///
/// ```
/// use isobar_data::generate::DarcySolver;
///
/// let solver = DarcySolver::new(2)?;
/// // By symmetry all four cells are equal. Two of a cell's faces lie half a cell from the boundary, where u = 0, and
/// // carry its source out: 4 u = 1/4.
/// let u = solver.solve(&[1.0; 4], &[1.0; 4])?;
/// assert!(u.iter().all(|value| (value - 0.0625).abs() < 1e-15));
/// # Ok::<(), isobar_data::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DarcySolver {
    n: usize,
    structure: SymbolicSparseColMat<usize>,
    analysis: SymbolicLlt<usize>,
}

impl DarcySolver {
    /// For n × n cells.
    ///
    /// # Errors
    /// If n is 0, or the analysis runs out of memory.
    pub fn new(n: usize) -> Result<Self> {
        if n == 0 {
            return Err(Error::Invalid("a grid needs at least one cell".to_owned()));
        }
        let (starts, rows) = lower_triangle(n);
        let structure = SymbolicSparseColMat::new_checked(n * n, n * n, starts, None, rows);
        let analysis = SymbolicLlt::try_new(structure.as_ref(), Side::Lower)
            .map_err(|error| Error::Solver(format!("analysis for {n} x {n} cells: {error}")))?;
        Ok(Self { n, structure, analysis })
    }

    /// Cells along each side.
    pub fn cells(&self) -> usize {
        self.n
    }

    /// The solution u for coefficient `a` and source `f`, given and returned as n² cell values.
    ///
    /// # Errors
    /// If a slice has another length than n², a coefficient is not finite and positive, or a source is not finite.
    pub fn solve(&self, a: &[f64], f: &[f64]) -> Result<Vec<f64>> {
        self.check(a)?;
        self.check_length("source", f)?;
        if let Some(at) = f.iter().position(|value| !value.is_finite()) {
            return Err(Error::Invalid(format!("source {} in cell {at} is not finite", f[at])));
        }
        let values = self.matrix(a);
        let matrix = SparseColMatRef::new(self.structure.as_ref(), &values);
        let factors = Llt::try_new_with_symbolic(self.analysis.clone(), matrix, Side::Lower)
            .map_err(|error| Error::Solver(error.to_string()))?;
        let area = 1.0 / (self.n * self.n) as f64;
        let mut solution: Vec<f64> = f.iter().map(|value| value * area).collect();
        let cells = solution.len();
        factors.solve_in_place(MatMut::from_column_major_slice_mut(&mut solution, cells, 1));
        Ok(solution)
    }

    /// Computes the flow out of each cell, less its source: zero up to rounding, if `u` is the solution. In units of
    /// f times a cell's area.
    ///
    /// # Errors
    /// If a slice has another length than n², or a coefficient is not finite and positive.
    pub fn residual(&self, a: &[f64], f: &[f64], u: &[f64]) -> Result<Vec<f64>> {
        self.check(a)?;
        self.check_length("source", f)?;
        self.check_length("solution", u)?;
        let n = self.n;
        let area = 1.0 / (n * n) as f64;
        let mut residual: Vec<f64> = f.iter().map(|value| -value * area).collect();
        for cell in 0..n * n {
            residual[cell] += boundary_faces(n, cell) * 2.0 * a[cell] * u[cell];
            for neighbour in later_neighbours(n, cell) {
                let flux = harmonic(a[cell], a[neighbour]) * (u[cell] - u[neighbour]);
                residual[cell] += flux;
                residual[neighbour] -= flux;
            }
        }
        Ok(residual)
    }

    /// Computes the flow out of the square: the integral of f, if `u` is the solution.
    ///
    /// # Errors
    /// See [`DarcySolver::residual`].
    pub fn outflow(&self, a: &[f64], u: &[f64]) -> Result<f64> {
        self.check(a)?;
        self.check_length("solution", u)?;
        Ok((0..a.len()).map(|cell| boundary_faces(self.n, cell) * 2.0 * a[cell] * u[cell]).sum())
    }

    /// The values of the lower triangle, in the order of [`lower_triangle`].
    fn matrix(&self, a: &[f64]) -> Vec<f64> {
        let n = self.n;
        let mut diagonal: Vec<f64> = (0..n * n).map(|cell| boundary_faces(n, cell) * 2.0 * a[cell]).collect();
        for cell in 0..n * n {
            for neighbour in later_neighbours(n, cell) {
                let weight = harmonic(a[cell], a[neighbour]);
                diagonal[cell] += weight;
                diagonal[neighbour] += weight;
            }
        }
        let mut values = Vec::with_capacity(3 * n * n);
        for cell in 0..n * n {
            values.push(diagonal[cell]);
            values.extend(later_neighbours(n, cell).map(|neighbour| -harmonic(a[cell], a[neighbour])));
        }
        values
    }

    fn check(&self, a: &[f64]) -> Result<()> {
        self.check_length("coefficient", a)?;
        match a.iter().position(|value| !(value.is_finite() && *value > 0.0)) {
            Some(at) => {
                Err(Error::Invalid(format!("coefficient {} in cell {at} is not finite and positive", a[at])))
            }
            None => Ok(()),
        }
    }

    fn check_length(&self, what: &str, values: &[f64]) -> Result<()> {
        let n = self.n;
        if values.len() == n * n {
            return Ok(());
        }
        Err(Error::Invalid(format!("{what} of {} values for {n} x {n} cells", values.len())))
    }
}

/// Starts of columns and rows of the entries: the cell itself, then its later neighbours.
fn lower_triangle(n: usize) -> (Vec<usize>, Vec<usize>) {
    let mut starts = Vec::with_capacity(n * n + 1);
    let mut rows = Vec::with_capacity(3 * n * n);
    for cell in 0..n * n {
        starts.push(rows.len());
        rows.push(cell);
        rows.extend(later_neighbours(n, cell));
    }
    starts.push(rows.len());
    (starts, rows)
}

/// The next cells along y and x, so that each face inside is met once; ascending.
fn later_neighbours(n: usize, cell: usize) -> impl Iterator<Item = usize> {
    let along_y = (cell % n + 1 < n).then_some(cell + 1);
    let along_x = (cell / n + 1 < n).then_some(cell + n);
    along_y.into_iter().chain(along_x)
}

/// Returns the number of a cell's faces on the boundary.
fn boundary_faces(n: usize, cell: usize) -> f64 {
    let (i, j) = (cell / n, cell % n);
    [i == 0, i + 1 == n, j == 0, j + 1 == n].into_iter().map(|at| f64::from(u8::from(at))).sum()
}

fn harmonic(a: f64, b: f64) -> f64 {
    2.0 * a * b / (a + b)
}

#[cfg(test)]
mod tests {
    use std::f64::consts::PI;

    use super::*;

    fn cells(n: usize, value: impl Fn(f64, f64) -> f64) -> Vec<f64> {
        let centre = |i: usize| (i as f64 + 0.5) / n as f64;
        (0..n * n).map(|cell| value(centre(cell / n), centre(cell % n))).collect()
    }

    fn largest_error(got: &[f64], want: &[f64]) -> f64 {
        let largest = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0_f64, |a, b| a.max(b.abs()));
        largest(&mut got.iter().zip(want).map(|(a, b)| a - b)) / largest(&mut want.iter().copied())
    }

    /// Errors at n = 16, 32, 64, 128, whose last order of convergence is about 2.
    fn converges_at_second_order(
        a: impl Fn(f64, f64) -> f64,
        f: impl Fn(f64, f64) -> f64,
        u: impl Fn(f64, f64) -> f64,
    ) -> Vec<f64> {
        let errors: Vec<f64> = [16, 32, 64, 128]
            .into_iter()
            .map(|n| {
                let solution = DarcySolver::new(n).unwrap().solve(&cells(n, &a), &cells(n, &f)).unwrap();
                largest_error(&solution, &cells(n, &u))
            })
            .collect();
        let order = (errors[2] / errors[3]).log2();
        assert!((1.9..2.1).contains(&order), "order {order}, errors {errors:?}");
        errors
    }

    #[test]
    fn constant_coefficient_converges_to_the_fourier_series() {
        let series = |x: f64, y: f64| {
            let terms = (0..2000).map(|i| {
                let k = f64::from(2 * i + 1);
                // cosh(kπ(y − ½)) / cosh(kπ/2), without overflow.
                let falloff = ((-k * PI * y).exp() + (-k * PI * (1.0 - y)).exp()) / (1.0 + (-k * PI).exp());
                (k * PI * x).sin() / k.powi(3) * falloff
            });
            x * (1.0 - x) / 2.0 - 4.0 / PI.powi(3) * terms.sum::<f64>()
        };
        let errors = converges_at_second_order(|_, _| 1.0, |_, _| 1.0, series);
        // 7.6e-6 of a largest value of 0.0737, by an independent implementation.
        assert!((errors[3] * 0.0737 / 7.577e-6 - 1.0).abs() < 0.02, "{errors:?}");
    }

    /// Coefficient 12 left of x = ½ and 3 right of it. With the flux q(x) = a g′ = 1 − kx, continuous across the
    /// interface, and k such that g(1) = 0, u = g(x) sin πy solves the equation for f = (k + aπ²g) sin πy.
    #[test]
    fn an_interface_between_cells_keeps_second_order() {
        const K: f64 = 20.0 / 13.0;
        let a = |x: f64| if x < 0.5 { 12.0 } else { 3.0 };
        let potential = |x: f64| x - K * x * x / 2.0;
        let g = move |x: f64| {
            if x < 0.5 {
                potential(x) / 12.0
            } else {
                potential(0.5) / 12.0 + (potential(x) - potential(0.5)) / 3.0
            }
        };
        assert!(g(1.0).abs() < 1e-15);
        converges_at_second_order(
            |x, _| a(x),
            |x, y| (K + a(x) * PI * PI * g(x)) * (PI * y).sin(),
            |x, y| g(x) * (PI * y).sin(),
        );
    }

    #[test]
    fn an_interface_along_the_other_axis_gives_the_transposed_solution() {
        let n = 12;
        let solver = DarcySolver::new(n).unwrap();
        let a = |x: f64| if x < 0.25 { 12.0 } else { 3.0 };
        let along_x = solver.solve(&cells(n, |x, _| a(x)), &cells(n, |x, y| x + 2.0 * y)).unwrap();
        let along_y = solver.solve(&cells(n, |_, y| a(y)), &cells(n, |x, y| y + 2.0 * x)).unwrap();
        let transposed: Vec<f64> = (0..n * n).map(|cell| along_y[cell % n * n + cell / n]).collect();
        assert!(largest_error(&along_x, &transposed) < 1e-13);
    }

    #[test]
    fn nothing_is_lost_inside_and_what_is_made_flows_out() {
        let n = 40;
        let solver = DarcySolver::new(n).unwrap();
        let a = cells(n, |x, y| if (7.0 * x).sin() * (5.0 * y).cos() > 0.1 { 12.0 } else { 3.0 });
        let f = cells(n, |x, y| 1.0 + x * y);
        let u = solver.solve(&a, &f).unwrap();
        let norm = |values: &[f64]| values.iter().map(|v| v * v).sum::<f64>().sqrt();
        let relative = norm(&solver.residual(&a, &f, &u).unwrap()) * (n * n) as f64 / norm(&f);
        assert!(relative < 1e-12, "{relative:e}");
        let source = f.iter().sum::<f64>() / (n * n) as f64;
        assert!((solver.outflow(&a, &u).unwrap() - source).abs() < 1e-12);
    }

    #[test]
    fn bad_input_is_refused() {
        let solver = DarcySolver::new(2).unwrap();
        let message = |a: &[f64], f: &[f64]| solver.solve(a, f).unwrap_err().to_string();
        assert_eq!(message(&[1.0; 3], &[1.0; 4]), "coefficient of 3 values for 2 x 2 cells");
        assert_eq!(message(&[1.0; 4], &[1.0; 5]), "source of 5 values for 2 x 2 cells");
        assert_eq!(
            message(&[1.0, 0.0, 1.0, 1.0], &[1.0; 4]),
            "coefficient 0 in cell 1 is not finite and positive"
        );
        assert_eq!(message(&[1.0; 4], &[1.0, 1.0, 1.0, f64::NAN]), "source NaN in cell 3 is not finite");
        assert!(DarcySolver::new(0).is_err());
    }
}
