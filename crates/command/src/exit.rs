//! Exit codes, and which error ends in which.

use std::fmt;

/// Reason for the end of the command.
pub use isobar_manager::ExitReason as Exit;

/// Meanings of the codes, for the help text.
pub const TABLE: &str = "\
Exit codes:
  0  success
  1  a case or a threshold failed, or any other error
  2  wrong command line or configuration
  3  data or a checkpoint that cannot be used
  4  a rank was lost or timed out
  5  ranks have different configurations, data or collective arguments
  6  a run was stopped by a signal (SIGTERM, SIGINT, or SIGUSR1 with requeue), and saved a checkpoint if it had taken a step";

/// Returns the meaning of a code, in the words of the table.
pub fn description(code: u8) -> Option<&'static str> {
    let code = format!("{code}  ");
    TABLE.lines().find_map(|line| line.trim_start().strip_prefix(&code))
}

/// Errors of the application itself.
pub trait Because {
    /// Makes an error that ends the command for this reason.
    fn because(self, why: impl fmt::Display) -> Ended;
}

impl Because for Exit {
    fn because(self, why: impl fmt::Display) -> Ended {
        Ended { exit: self, why: why.to_string() }
    }
}

/// An error of the application itself, which knows its exit code.
#[derive(Debug)]
pub struct Ended {
    exit: Exit,
    why: String,
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl std::error::Error for Ended {}

/// An error and its causes on one line.
pub fn text(error: &anyhow::Error) -> String {
    isobar_manager::error_text(error.as_ref())
}

/// Returns the exit for an error: that of this application's own error, else that of the root cause.
pub fn of(error: &anyhow::Error) -> Exit {
    let own = error.chain().find_map(|cause| cause.downcast_ref::<Ended>());
    own.map_or_else(|| isobar_train::exit_reason(error.as_ref()), |ended| ended.exit)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever another error wraps around it, as where random numbers of split fields are drawn together.
    #[test]
    fn a_rank_lost_inside_of_data_is_lost() {
        let problem = "the store is gone".to_owned();
        let lost = isobar_collectives::Error::LostAtStart { backend: "gloo", problem };
        let data = isobar_data::Error::Random(isobar_shard::Error::Communication(lost).into());
        let error = anyhow::Error::from(data).context("the training data");
        assert_eq!(of(&error), Exit::Lost, "{error:?}");
        assert_eq!(text(&error).matches("the store is gone").count(), 1, "{}", text(&error));
    }

    #[test]
    fn codes_have_meanings() {
        assert_eq!(description(Exit::Lost as u8), Some("a rank was lost or timed out"));
        assert_eq!(description(7), None);
    }
}
