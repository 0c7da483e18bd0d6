//! One body of tests for every backend of the collectives: [`run`] calls each of them on a given group of ranks and
//! compares with the dense answer, which every rank computes by itself from seeded data.
//!
//! [`errors`] holds what must fail, and [`endings`] what ends a group and so needs a world of its own.

mod adjoints;
mod data;
pub mod endings;
pub mod errors;
mod exchanges;
mod gathers;
mod groups;
pub mod memory;
mod pairs;
mod precision;
mod reductions;
mod regions;
mod shared;

use isobar_collectives::{Error, Group};
use isobar_torch::guard::NoGrad;
use tch::{Kind, Tensor};

/// Selection of the suite's tests.
#[derive(Debug, Clone)]
pub struct Options {
    /// Only the cases whose name contains this.
    pub only: Option<String>,
    /// Varies the data, and the sizes of the cases that draw them.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { only: None, seed: 1 }
    }
}

/// Results of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// Cases run.
    pub cases: usize,
    /// Comparisons made in them, on this rank.
    pub checks: usize,
}

type Case = (&'static str, fn(&mut Suite<'_>) -> Result<(), Error>);

/// Runs the suite on `group`: all its ranks call, with the same options.
///
/// # Errors
///
/// The failures on this rank, one line each, at most 20.
pub fn run(group: &Group, options: &Options) -> Result<Report, String> {
    let cases = [
        gathers::CASES,
        exchanges::CASES,
        reductions::CASES,
        pairs::CASES,
        groups::CASES,
        adjoints::CASES,
        regions::CASES,
        precision::CASES,
        shared::CASES,
        errors::CASES,
    ];
    run_cases(group, options, &cases.concat())
}

fn run_cases(group: &Group, options: &Options, cases: &[Case]) -> Result<Report, String> {
    let mut suite = Suite { group, seed: options.seed, case: "", failures: Vec::new(), checks: 0, next: 0 };
    let mut count = 0;
    for &(name, body) in cases {
        if options.only.as_ref().is_some_and(|only| !name.contains(only.as_str())) {
            continue;
        }
        count += 1;
        suite.case = name;
        suite.next = 0;
        if let Err(error) = body(&mut suite) {
            // The ranks may have parted: going on would compare what does not belong together.
            suite.fail(format!("stopped by an error: {error}"));
            break;
        }
    }
    if count == 0 {
        return Err(format!("no case is named like {:?}", options.only));
    }
    match suite.failures.is_empty() {
        true => Ok(Report { cases: count, checks: suite.checks }),
        false => {
            let total = suite.failures.len();
            suite.failures.truncate(20);
            Err(format!("{total} failures on rank {}:\n{}", group.rank(), suite.failures.join("\n")))
        }
    }
}

/// A run of the suite on one rank.
pub(crate) struct Suite<'a> {
    group: &'a Group,
    seed: u64,
    case: &'static str,
    failures: Vec<String>,
    checks: usize,
    /// The number of the next tensor of data of the case.
    next: u64,
}

impl Suite<'_> {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn ranks(&self) -> usize {
        self.group.size()
    }

    fn fail(&mut self, problem: String) {
        self.failures.push(format!("{}: {problem}", self.case));
    }

    /// Notes a failure unless `condition` holds.
    fn check(&mut self, condition: bool, problem: impl FnOnce() -> String) {
        self.checks += 1;
        if !condition {
            self.fail(problem());
        }
    }

    /// Checks that `got` has the dtype, shape and bits of `want`.
    fn same(&mut self, what: &str, got: &Tensor, want: &Tensor) {
        let alike = got.kind() == want.kind() && got.size() == want.size();
        let problem = match alike {
            false => {
                format!("is {:?} {:?}, expected {:?} {:?}", got.kind(), got.size(), want.kind(), want.size())
            }
            true if bytes(got) == bytes(want) => {
                self.checks += 1;
                return;
            }
            true => format!("{:?} {:?} has wrong values:\n{got}\nexpected\n{want}", got.kind(), got.size()),
        };
        self.check(false, || format!("{what} {problem}"));
    }

    /// Checks that `got` is near `want`, element by element, relative to the largest.
    fn near(&mut self, what: &str, got: &Tensor, want: &Tensor, tolerance: f64) {
        if got.size() != want.size() || got.kind() != want.kind() {
            self.same(what, got, want);
            return;
        }
        if got.numel() == 0 {
            return self.check(true, String::new);
        }
        let _guard = NoGrad::new();
        let error = (got - want).abs().max().to_kind(Kind::Double).double_value(&[]);
        let scale = want.abs().max().to_kind(Kind::Double).double_value(&[]).max(1.0);
        self.check(error <= tolerance * scale, || {
            format!("{what} is off by {error}\n{got}\nexpected\n{want}")
        });
    }

    /// Checks that all ranks hold the same bits.
    fn same_everywhere(&mut self, what: &str, tensor: &Tensor) -> Result<(), Error> {
        let all = self.group.all_gather_bytes(&bytes(tensor))?;
        self.check(all.iter().all(|one| *one == all[0]), || format!("{what} differs between ranks"));
        Ok(())
    }

    /// Runs `body` and checks that `inputs` have the same bits after as before.
    fn unchanged<T>(
        &mut self,
        inputs: &[&Tensor],
        body: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let before: Vec<_> = inputs.iter().map(|input| bytes(input)).collect();
        let result = body(self)?;
        let after: Vec<_> = inputs.iter().map(|input| bytes(input)).collect();
        self.check(before == after, || "an input was changed".into());
        Ok(result)
    }
}

/// The elements in row-major order, as bytes.
fn bytes(tensor: &Tensor) -> Vec<u8> {
    let _guard = NoGrad::new();
    let flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view([-1]);
    if flat.numel() == 0 {
        return Vec::new();
    }
    let flat = flat.view_dtype(Kind::Uint8);
    let mut bytes = vec![0; flat.numel()];
    flat.copy_data_u8(&mut bytes, flat.numel());
    bytes
}
