//! Launches that contradict themselves.

use crate::Method;

/// Most ranks of a job: more than any machine has.
pub(crate) const MOST_RANKS: usize = 1 << 20;

/// A launch that cannot be understood, with what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A variable of a method that is there is missing.
    #[error("{method} launch: {present} is set but {missing} is not; {mend}")]
    Missing {
        /// The method.
        method: Method,
        /// A variable that is set.
        present: String,
        /// The one that is not.
        missing: &'static str,
        /// Remedy.
        mend: String,
    },
    /// None of a forced method's variables is there.
    #[error("initialization method {method} is forced, but {missing} is not set; {mend}")]
    NotLaunched {
        /// The method.
        method: Method,
        /// The first variable that it needs.
        missing: &'static str,
        /// Remedy.
        mend: String,
    },
    /// A variable that is no number where one is needed.
    #[error("{method} launch: {variable}={value} is not {expected}; set it to one or unset it")]
    NotANumber {
        /// The method.
        method: Method,
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// Expected value.
        expected: &'static str,
    },
    /// A rank that is not below the number of ranks.
    #[error(
        "{method} launch: {variable} is {rank}, but there are {size} ranks, numbered from 0; start each with its own number below {size}"
    )]
    RankOutOfRange {
        /// The method.
        method: Method,
        /// The variable that holds the rank.
        variable: &'static str,
        /// The rank.
        rank: usize,
        /// The number of ranks.
        size: usize,
    },
    /// A number of ranks that is 0 or above the maximum.
    #[error(
        "{method} launch: {variable} is {size}, expected 1 to {MOST_RANKS}; set it to the number of ranks"
    )]
    SizeOutOfRange {
        /// The method.
        method: Method,
        /// The variable.
        variable: &'static str,
        /// Its value.
        size: usize,
    },
    /// Two launchers that say different things of this process.
    #[error("{variable}={value}, but {other}={other_value}: two launchers disagree; {mend}")]
    Disagreement {
        /// A variable of the method that would be taken.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The variable of the other launcher.
        other: String,
        /// Its value.
        other_value: String,
        /// Remedy.
        mend: String,
    },
    /// A forced method that does not exist.
    #[error("{variable}={value} is not an initialization method; expected one of {}{help}", known())]
    UnknownMethod {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The nearest name.
        help: String,
    },
    /// The two variables that force a method say different things.
    #[error(
        "ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD={isobar} and PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD={physicsnemo} disagree; unset one"
    )]
    TwoMethods {
        /// The value of Isobar's variable.
        isobar: String,
        /// The value of PhysicsNeMo's variable.
        physicsnemo: String,
    },
    /// A secret that can be guessed. It is not shown.
    #[error(
        "{} has {characters} characters, expected at least {shortest}; draw one by `openssl rand -hex 32` and give it to all ranks",
        super::TOKEN
    )]
    Token {
        /// The number of its characters.
        characters: usize,
        /// The fewest that are taken.
        shortest: usize,
    },
    /// MPI counts other ranks than the launcher.
    #[error("this is {launched} by the {method} launch, but rank {mpi_rank} of {mpi} by MPI; {mend}")]
    WorldSize {
        /// The method.
        method: Method,
        /// Rank and number of ranks by the launcher, in words.
        launched: String,
        /// This process's rank by MPI.
        mpi_rank: usize,
        /// The number of ranks by MPI.
        mpi: usize,
        /// Remedy.
        mend: String,
    },
    /// A backend that cannot serve this launch.
    #[error("backend {backend} cannot be used under a {method} launch of {ranks}: {why}; {mend}")]
    Backend {
        /// The backend.
        backend: &'static str,
        /// The method.
        method: Method,
        /// The number of ranks, in words.
        ranks: String,
        /// Reason why it cannot be used.
        why: String,
        /// Remedy.
        mend: String,
    },
}

fn known() -> String {
    Method::FORCEABLE.map(Method::name).join(", ")
}
