//! The crate's error, and how errors cross the border in both directions.

use std::any::Any;
use std::ffi::{CStr, CString, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::ffi::{self, RawError, RawFailure};

/// The error of a user's closure: any type.
pub type BoxError = Box<dyn std::error::Error + Send + Sync + 'static>;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors at the border to libtorch.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// libtorch reported an error.
    #[error("libtorch: {message}")]
    Torch {
        /// libtorch's own text, without its C++ stack.
        message: String,
    },
    /// tch reported an error.
    #[error("tensor operation failed: {0}")]
    Tch(#[from] tch::TchError),
    /// A closure that ran inside backward returned an error.
    #[error("{what} failed: {}", error_text(error.as_ref()))]
    Closure {
        /// Name of the closure: the function's backward, or a hook.
        what: String,
        /// Returned error, also the source; downcast it to tell errors apart.
        #[source]
        error: BoxError,
    },
    /// A closure that ran inside backward panicked.
    #[error("{what} panicked: {message}")]
    Panic {
        /// Name of the closure: the function's backward, or a hook.
        what: String,
        /// The panic's message.
        message: String,
    },
    /// An argument does not fit.
    #[error("{0}")]
    Argument(String),
    /// CUDA was asked for where it cannot be had.
    #[error("CUDA is not available: {reason}")]
    NoCuda {
        /// Missing part, and the remedy.
        reason: String,
    },
}

/// Formats an error and its causes on one line, without repeating a cause that the error's text ends with.
#[must_use]
pub fn error_text(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let part = error.to_string();
        // Some errors repeat their source in their own text.
        if !text.ends_with(&part) {
            text = format!("{text}: {part}");
        }
        cause = error.source();
    }
    text
}

/// Calls a shim function, handing it the place for its error.
pub(crate) fn call<T>(shim: impl FnOnce(*mut RawError) -> T) -> Result<T> {
    let mut raw = RawError { message: std::ptr::null_mut(), boxed: std::ptr::null_mut() };
    let value = shim(&mut raw);
    if !raw.boxed.is_null() {
        // SAFETY: C++ gives back the `Box<Parcel>` made by `RawFailure::fill`, once.
        let parcel = unsafe { Box::from_raw(raw.boxed.cast::<Parcel>()) };
        return Err(parcel.error);
    }
    if raw.message.is_null() {
        return Ok(value);
    }
    // SAFETY: a message is a C string that we now own.
    let message = unsafe { CStr::from_ptr(raw.message) }.to_string_lossy().trim_end().to_owned();
    // SAFETY: it was allocated by the shim and is not used after this.
    unsafe { ffi::isobar_free_text(raw.message) };
    Err(Error::Torch { message })
}

/// A Rust error on its way through C++, with its text for C++'s `what()`.
struct Parcel {
    error: Error,
    text: CString,
}

impl RawFailure {
    fn fill(&mut self, error: Error) {
        let text = CString::new(error.to_string().replace('\0', " ")).unwrap_or_default();
        let parcel = Box::new(Parcel { error, text });
        self.text = parcel.text.as_ptr();
        self.drop = Some(drop_parcel);
        self.boxed = Box::into_raw(parcel).cast();
    }
}

extern "C" fn drop_parcel(parcel: *mut c_void) {
    // SAFETY: C++ calls this once for a parcel that nobody took.
    drop(unsafe { Box::from_raw(parcel.cast::<Parcel>()) });
}

/// Runs a callback's body: an error or a panic is left in `failure`, and the default is returned.
pub(crate) fn catch<T: Default>(
    what: impl Fn() -> String,
    failure: &mut RawFailure,
    body: impl FnOnce() -> Result<T, BoxError>,
) -> T {
    // Unwind safety: state that a panicking closure leaves behind is the closure's own concern, as with a thread.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => return value,
        Ok(Err(error)) => failure.fill(Error::Closure { what: what(), error }),
        Err(panic) => failure.fill(Error::Panic { what: what(), message: panic_text(panic) }),
    }
    T::default()
}

fn panic_text(panic: Box<dyn Any + Send>) -> String {
    let text = match panic.downcast::<String>() {
        Ok(text) => return *text,
        Err(panic) => panic,
    };
    match text.downcast::<&'static str>() {
        Ok(text) => (*text).to_owned(),
        Err(payload) => {
            // Dropping an unknown payload could panic again, in a place where nothing may unwind.
            std::mem::forget(payload);
            "a panic without a text".to_owned()
        }
    }
}

/// Drops a boxed value for C++, where a panic must not unwind.
pub(crate) extern "C" fn drop_box<T>(value: *mut c_void) {
    // SAFETY: the box was made by `Box::into_raw` of this very type, and its C++ owner drops it once.
    let value = unsafe { Box::from_raw(value.cast::<T>()) };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(value))) {
        std::mem::forget(panic);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_is_told_once() {
        let refused = Error::from(tch::TchError::Shape("a scalar has no dim 0".into()));
        let text = "tensor operation failed: invalid shape: a scalar has no dim 0";
        assert_eq!(error_text(&refused), text);
        let closure = Error::Closure { what: "a hook".into(), error: refused.into() };
        assert_eq!(error_text(&closure), format!("a hook failed: {text}"));
    }
}
