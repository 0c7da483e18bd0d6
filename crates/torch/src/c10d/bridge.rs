//! The store as libtorch sees it: `isobar::RustStore` in `src/cpp/store.h`.

use std::ffi::c_void;

use isobar_rendezvous::TcpStore;

use crate::error::catch;
use crate::ffi::{self, RawFailure};

/// Answers one request of libtorch's: the number, with the value given to `receive` where there is one.
pub(super) extern "C" fn ask(
    store: *mut c_void,
    kind: u8,
    number: i64,
    parts: *const ffi::Bytes,
    part_count: usize,
    target: *mut c_void,
    receive: extern "C" fn(target: *mut c_void, data: *const u8, size: usize),
    failure: *mut RawFailure,
) -> i64 {
    // SAFETY: the failure is valid and ours during the call.
    let failure = unsafe { &mut *failure };
    catch(
        || "a call of the store".to_owned(),
        failure,
        || {
            // SAFETY: C++ keeps the box that `Gloo::new` made of it, alive during the call.
            let store = unsafe { &*store.cast::<TcpStore>() };
            let parts: Vec<ffi::Bytes> = match part_count {
                0 => Vec::new(),
                // SAFETY: C++ hands over so many, alive during the call.
                count => unsafe { std::slice::from_raw_parts(parts, count) }.to_vec(),
            };
            let parts: Vec<Vec<u8>> = parts
                .into_iter()
                .map(|ffi::Bytes { data, size }| match size {
                    0 => Vec::new(),
                    // SAFETY: as above; the bytes are those of a C++ string or vector.
                    size => unsafe { std::slice::from_raw_parts(data, size) }.to_vec(),
                })
                .collect();
            let (number, value) = store.request(kind, number, parts)?;
            if let Some(value) = value {
                receive(target, value.as_ptr(), value.len());
            }
            Ok(number)
        },
    )
}
