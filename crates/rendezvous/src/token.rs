//! Shared secret of a job's processes.

use std::fmt;

use crate::{Error, Result};

/// Random bytes that each side draws for each handshake, to prevent replays.
pub type Nonce = [u8; 32];

/// A secret by which the processes of a job know each other.
///
/// It does not travel: each side draws a [`Nonce`], and shows that it knows the secret by a [`proof`](Self::proof) over
/// both. Its `Debug` form does not show it.
///
/// ```
/// use isobar_rendezvous::Token;
///
/// let token = Token::new(b"0123456789abcdef0123456789abcdef");
/// let nonces = [Token::nonce()?, Token::nonce()?];
/// assert_eq!(token.proof("client", &nonces), token.clone().proof("client", &nonces));
/// assert_ne!(token.proof("client", &nonces), token.proof("server", &nonces));
/// assert_ne!(token.proof("client", &nonces), Token::none().proof("client", &nonces));
/// # Ok::<(), isobar_rendezvous::Error>(())
/// ```
#[derive(Clone)]
pub struct Token([u8; 32]);

impl Token {
    /// The token of a secret, which should be random and of at least 16 bytes.
    #[must_use]
    pub fn new(secret: &[u8]) -> Self {
        Self(blake3::derive_key("isobar 2026-11-22 token of a job", secret))
    }

    /// The token of a job without a secret: it keeps out those who speak another language, and nobody else.
    #[must_use]
    pub fn none() -> Self {
        Self::new(&[])
    }

    /// Fresh bytes from the system's own source of random numbers.
    ///
    /// # Errors
    ///
    /// If the system has none.
    pub fn nonce() -> Result<Nonce> {
        let mut nonce = [0; 32];
        getrandom::fill(&mut nonce).map_err(|error| Error::RandomNumbers(error.to_string()))?;
        Ok(nonce)
    }

    /// Shows that whoever made it knows the secret. `role` says who speaks, so that nobody can give a proof back to where
    /// it came from; `nonces` are those of both sides.
    #[must_use]
    pub fn proof(&self, role: &str, nonces: &[Nonce; 2]) -> Proof {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        // Of fixed length first, so that no two inputs are the same bytes.
        hasher.update(&nonces[0]).update(&nonces[1]).update(role.as_bytes());
        Proof(hasher.finalize())
    }
}

impl PartialEq for Token {
    /// Takes the same time wherever two differ.
    fn eq(&self, other: &Self) -> bool {
        blake3::Hash::from_bytes(self.0) == blake3::Hash::from_bytes(other.0)
    }
}

impl Eq for Token {}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// A keyed hash. Comparing takes the same time wherever two differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proof(blake3::Hash);

impl Proof {
    /// Its bytes, to be sent.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; 32] {
        *self.0.as_bytes()
    }

    /// Wraps the bytes that the other side has sent.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(blake3::Hash::from_bytes(bytes))
    }
}
