//! The secret of a job, by which its ranks know each other.

use isobar_rendezvous::Token;

use crate::Environment;
use crate::LaunchError;

/// The variable that holds the secret. It is no key of the configuration, which is shown, written down and compared.
pub const TOKEN: &str = "ISOBAR_DISTRIBUTED_TOKEN";

/// Fewer characters can be guessed.
const SHORTEST: usize = 16;

/// The job's token, where its ranks were given one.
///
/// # Errors
///
/// A secret that is too short.
pub fn token(environment: &Environment) -> Result<Option<Token>, LaunchError> {
    match environment.get(TOKEN) {
        None => Ok(None),
        Some(secret) if secret.len() < SHORTEST => {
            Err(LaunchError::Token { characters: secret.len(), shortest: SHORTEST })
        }
        Some(secret) => Ok(Some(Token::new(secret.as_bytes()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(secret: &str) -> Result<Option<Token>, LaunchError> {
        token(&[(TOKEN, secret)].into_iter().collect())
    }

    #[test]
    fn secrets_that_can_be_guessed_are_refused_and_not_shown() {
        assert_eq!(read(""), Ok(None));
        let error = read("hunter2").unwrap_err().to_string();
        assert!(error.contains("7 characters, expected at least 16") && !error.contains("hunter"), "{error}");
        let secret = "0123456789abcdef";
        assert_eq!(read(secret), Ok(Some(Token::new(secret.as_bytes()))));
        assert_eq!(read(&format!(" {secret}\n")), read(secret));
    }
}
