//! The secret by which the ranks of a job know each other.

use std::ffi::OsString;
use std::fmt;

use anyhow::{Result, bail};
use isobar_manager::launch::TOKEN;
use isobar_rendezvous::Token;

use isobar_command::exit::{Because, Exit};

/// Value of [`TOKEN`] for the ranks: on other hosts by the standard input of their keepers, since all users of a host may read a
/// command line. Its `Debug` form does not show it.
pub(super) struct Secret(String);

impl Secret {
    /// The one that was given, which leaves the variables; a fresh one where none was.
    pub(super) fn taken_from(variables: &mut Vec<(OsString, OsString)>) -> Result<Self> {
        let given = variables.extract_if(.., |(name, _)| name == TOKEN).last();
        // As ranks read it.
        let given = given.map(|(_, value)| value.to_string_lossy().trim().to_owned());
        match given.filter(|value| !value.is_empty()) {
            Some(value) if value.contains('\n') => {
                let problem = format!("{TOKEN} has more than one line; give a line of random characters");
                bail!(Exit::Usage.because(problem))
            }
            Some(value) => Ok(Self(value)),
            None => Ok(Self(Token::nonce()?.map(|byte| format!("{byte:02x}")).concat())),
        }
    }

    pub(super) fn value(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}
