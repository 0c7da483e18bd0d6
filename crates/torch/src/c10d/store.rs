//! The key-value store over TCP.

use std::ffi::{CString, c_char, c_void};
use std::time::Duration;

use super::{milliseconds, text};
use crate::error::{Result, call};
use crate::ffi;

/// A key-value store that ranks reach over TCP; one of them serves it.
///
/// A value is a string of bytes. Every call is bounded by a timeout. A store may be shared by threads, which then
/// take turns on its one connection, also while one of them waits: a rank that lives in a thread has its own.
#[derive(Debug)]
pub struct TcpStore {
    pub(super) store: *mut ffi::Store,
}

// SAFETY: torch's TCPStore locks its connection for each operation.
unsafe impl Send for TcpStore {}
// SAFETY: as above.
unsafe impl Sync for TcpStore {}

impl TcpStore {
    /// Serves a store at `port` of this machine, all its addresses, and connects to it as `host`; port 0 takes any
    /// free one. The store ends for all when this value is dropped.
    ///
    /// # Errors
    ///
    /// If the port is taken.
    pub fn server(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        Self::new(host, port, true, None, timeout)
    }

    /// Connects to the store at `host` and `port`, waiting up to `timeout` for its server to appear.
    ///
    /// # Errors
    ///
    /// If there is no server within `timeout`.
    pub fn client(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        Self::new(host, port, false, None, timeout)
    }

    /// What [`server`](Self::server) and [`client`](Self::client) do, as torch's own ranks do it: `world_size`, where
    /// known, is the number of ranks that will connect. None of them waits here for the others.
    ///
    /// # Errors
    ///
    /// If the port is taken, or there is no server within `timeout`.
    pub fn new(
        host: &str,
        port: u16,
        is_server: bool,
        world_size: Option<usize>,
        timeout: Duration,
    ) -> Result<Self> {
        let host = text("host", host)?;
        // SAFETY: the host is a C string during the call.
        let store = call(|error| unsafe {
            let (ranks, timeout) = (world_size.unwrap_or(0), milliseconds(timeout));
            ffi::isobar_store_new(host.as_ptr(), port, is_server, ranks, timeout, error)
        })?;
        Ok(Self { store })
    }

    /// The port that the store is served at.
    pub fn port(&self) -> u16 {
        // SAFETY: the store lives as long as this value.
        unsafe { ffi::isobar_store_port(self.store) }
    }

    /// Sets a key, replacing its value.
    ///
    /// # Errors
    ///
    /// If the server is gone.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let key = text("key", key)?;
        // SAFETY: the store lives, the key and the value are as said during the call.
        call(|error| unsafe {
            ffi::isobar_store_set(self.store, key.as_ptr(), value.as_ptr(), value.len(), error);
        })
    }

    /// Waits for a key and returns its value.
    ///
    /// # Errors
    ///
    /// If nobody sets the key within `timeout`, or the server is gone.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let key = text("key", key)?;
        let mut value = Vec::<u8>::new();
        let target = std::ptr::from_mut(&mut value).cast();
        // SAFETY: the store lives, and `receive` writes to the vector during the call only.
        call(|error| unsafe {
            ffi::isobar_store_get(self.store, key.as_ptr(), milliseconds(timeout), target, receive, error);
        })?;
        Ok(value)
    }

    /// Adds to a counter, which starts at zero, and returns its new value.
    ///
    /// # Errors
    ///
    /// If the server is gone.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let key = text("key", key)?;
        // SAFETY: the store lives and the key is a C string during the call.
        call(|error| unsafe { ffi::isobar_store_add(self.store, key.as_ptr(), amount, error) })
    }

    /// Waits until all keys are set.
    ///
    /// # Errors
    ///
    /// If one is not within `timeout`, or the server is gone.
    pub fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let (_texts, keys) = texts(keys)?;
        // SAFETY: the store lives, and the keys are C strings during the call.
        call(|error| unsafe {
            ffi::isobar_store_wait(self.store, keys.as_ptr(), keys.len(), milliseconds(timeout), error);
        })
    }

    /// Whether all keys are set now.
    ///
    /// # Errors
    ///
    /// If the server is gone.
    pub fn check(&self, keys: &[&str]) -> Result<bool> {
        let (_texts, keys) = texts(keys)?;
        // SAFETY: the store lives, and the keys are C strings during the call.
        call(|error| unsafe { ffi::isobar_store_check(self.store, keys.as_ptr(), keys.len(), error) })
    }

    /// Deletes a key; tells whether there was one.
    ///
    /// # Errors
    ///
    /// If the server is gone.
    pub fn delete(&self, key: &str) -> Result<bool> {
        let key = text("key", key)?;
        // SAFETY: the store lives and the key is a C string during the call.
        call(|error| unsafe { ffi::isobar_store_delete(self.store, key.as_ptr(), error) })
    }
}

impl Drop for TcpStore {
    fn drop(&mut self) {
        // SAFETY: the store is ours, and not used after this. (A group made of it holds its own reference.)
        unsafe { ffi::isobar_store_free(self.store) };
    }
}

extern "C" fn receive(target: *mut c_void, data: *const u8, size: usize) {
    if size == 0 {
        return;
    }
    // SAFETY: `target` is the vector of `get`, which waits for us.
    let target = unsafe { &mut *target.cast::<Vec<u8>>() };
    // SAFETY: the shim hands over `size` bytes.
    target.extend_from_slice(unsafe { std::slice::from_raw_parts(data, size) });
}

fn texts(keys: &[&str]) -> Result<(Vec<CString>, Vec<*const c_char>)> {
    let texts = keys.iter().map(|key| text("key", key)).collect::<Result<Vec<_>>>()?;
    let pointers = texts.iter().map(|text| text.as_ptr()).collect();
    Ok((texts, pointers))
}
