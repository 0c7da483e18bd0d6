//! The store as libtorch sees it: `isobar::RustStore` in `src/cpp/store.h`.

use std::ffi::c_void;

use super::TcpStore;
use super::wire::{Kind, Message};
use crate::error::catch;
use crate::ffi::{self, RawFailure};

/// Answers one request of libtorch's: the number, with the value given to `receive` where there is one.
pub(in crate::c10d) extern "C" fn ask(
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
            let kind = Kind::of(kind).ok_or("a request that there is not")?;
            let waits = matches!(kind, Kind::Get | Kind::Wait);
            let timeout = std::time::Duration::from_millis(number.try_into().unwrap_or_default());
            let answer = store.ask(&Message { kind, number, parts }, waits.then_some(timeout))?;
            if let Some(value) = answer.parts.first() {
                receive(target, value.as_ptr(), value.len());
            }
            Ok(answer.number)
        },
    )
}
