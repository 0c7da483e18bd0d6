//! Text for forecast errors: a line for a single variable, a table for several, and a warning if a model is
//! no better than a baseline.

use isobar_train::{Variable, VariableError, mean_relative, no_better_than, percent};

/// Name of the baseline that a network must beat, for trajectories or for samples without time.
pub(crate) fn baseline_name(has_steps: bool) -> &'static str {
    if has_steps { "predicting no change" } else { "predicting the mean field" }
}

/// Header of the RMSEs of errors, which count all points alike, unlike the metric `rmse`.
pub(crate) const UNWEIGHTED_RMSE: &str = "RMSE, unweighted";

/// Errors of a network and of its baseline at one lead time.
pub(crate) struct Compared<'a> {
    pub(crate) errors: &'a [VariableError],
    /// Empty where it is not known.
    pub(crate) baseline: &'a [VariableError],
}

impl Compared<'_> {
    /// The mean over the variables that are not missing, or the error of the only one.
    pub(crate) fn summary(&self, variables: &[Variable], baseline: &str) -> String {
        let mut text = format!("relative L2 error {}", percent(mean_relative(self.errors)));
        match (variables, self.errors) {
            ([variable], [error]) => text += &format!(", unweighted RMSE {}", variable.quantity(error.rmse)),
            _ => {
                let all = self.errors.len();
                text += &match self.errors.iter().filter(|error| !error.missing).count() {
                    known if known == all => format!(", mean over {all} variables"),
                    known => format!(", mean over {known} of {all} variables"),
                };
            }
        }
        if !self.baseline.is_empty() {
            text += &format!("; {baseline} gives {}", percent(mean_relative(self.baseline)));
        }
        text
    }

    /// A line for each variable with its error, the baseline's, and its RMSE; nothing for a single variable.
    pub(crate) fn table(&self, variables: &[Variable]) -> Vec<String> {
        if variables.len() < 2 {
            return Vec::new();
        }
        let mut rows = vec![["variable", "error", "baseline", UNWEIGHTED_RMSE, ""].map(str::to_owned)];
        for (at, (variable, error)) in variables.iter().zip(self.errors).enumerate() {
            let baseline = self.baseline.get(at);
            rows.push([
                variable.name.clone(),
                percent(error.relative),
                baseline.map_or_else(|| "-".to_owned(), |baseline| percent(baseline.relative)),
                variable.quantity(error.rmse),
                if baseline.is_some_and(|baseline| !error.beats(baseline)) { "no better" } else { "" }
                    .to_owned(),
            ]);
        }
        aligned(&rows)
    }

    /// Names the variables that are predicted no better than by the baseline; `None` if there are none.
    pub(crate) fn no_better(&self, variables: &[Variable], what: &str, baseline: &str) -> Option<String> {
        no_better_than(variables, self.errors, self.baseline, baseline, what)
    }
}

/// Aligns columns, the first to the left and numbers to the right.
pub(crate) fn aligned<const N: usize>(rows: &[[String; N]]) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cell = |at: usize| match at == 0 || at + 1 == N {
            true => format!("{:<1$}", row[at], widths[at]),
            false => format!("{:>1$}", row[at], widths[at]),
        };
        (0..N).map(cell).collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(relative: f64, rmse: f64) -> VariableError {
        VariableError::new(relative, rmse)
    }

    #[test]
    fn variables_are_told_apart() {
        let height = Variable { unit: Some("m".to_owned()), ..Variable::new("h") };
        let variables = [Variable::new("velocity_x"), height];
        let errors = [error(1.28, 10.26), error(0.014, 137.2)];
        let baseline = [error(1.28, 10.0), error(0.02, 196.0)];
        let compared = Compared { errors: &errors, baseline: &baseline };
        assert_eq!(
            compared.summary(&variables, "predicting no change"),
            "relative L2 error 64.70 %, mean over 2 variables; predicting no change gives 65.00 %"
        );
        insta::assert_snapshot!(compared.table(&variables).join("\n"), @r"
        variable       error  baseline  RMSE, unweighted
        velocity_x  128.00 %  128.00 %             10.26  no better
        h             1.40 %    2.00 %           137.2 m
        ");
        assert_eq!(
            compared.no_better(&variables, "one step ahead", "predicting no change").unwrap(),
            "no better than predicting no change, one step ahead: velocity_x (128.00 % against 128.00 %)"
        );
        let gap = [errors[0], VariableError::MISSING];
        let gap = Compared { errors: &gap, baseline: &[] };
        assert_eq!(gap.summary(&variables, ""), "relative L2 error 128.00 %, mean over 1 of 2 variables");
        let good = Compared { errors: &errors[1..], baseline: &baseline[1..] };
        assert_eq!(good.no_better(&variables[1..], "", ""), None);
        assert_eq!(
            good.summary(&variables[1..], "predicting no change"),
            "relative L2 error 1.40 %, unweighted RMSE 137.2 m; predicting no change gives 2.00 %"
        );
        assert!(good.table(&variables[1..]).is_empty());
    }
}
