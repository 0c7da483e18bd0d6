//! Two functions of the HDF5 library that its crate does not wrap: size and address of one chunk by its coordinates. The
//! crate only finds chunks by their number, by a linear search for each.
#![expect(unsafe_code, reason = "calls the HDF5 library; each block says why it is sound")]

use std::ffi::{c_int, c_uint};

use hdf5_metno::{Dataset, Error, Result, sync::sync};

unsafe extern "C" {
    fn H5Dget_chunk_storage_size(dataset: i64, offset: *const u64, size: *mut u64) -> c_int;
    fn H5Dget_chunk_info_by_coord(
        dataset: i64,
        offset: *const u64,
        filters: *mut c_uint,
        address: *mut u64,
        size: *mut u64,
    ) -> c_int;
}

/// Place of a chunk in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packed {
    pub(crate) address: u64,
    pub(crate) size: u64,
}

/// Returns the number of bytes that the chunk at `offset` takes in the file; 0 if it was never written.
///
/// # Errors
///
/// An offset that is not that of a chunk, or an index of chunks that is damaged.
pub(crate) fn stored_size(dataset: &Dataset, offset: &[u64]) -> Result<u64> {
    check(dataset, offset)?;
    let mut size = 0;
    // SAFETY: the dataset is open during the call, the offset has one number for each of its dims, and the lock of the
    // library is held.
    let status = sync(|| unsafe { H5Dget_chunk_storage_size(dataset.id(), offset.as_ptr(), &raw mut size) });
    if status < 0 { Err(failure("size", offset)) } else { Ok(size) }
}

/// Returns where the chunk at `offset` is. Linear in the number of chunks.
///
/// # Errors
///
/// As [`stored_size`], and for a chunk that was never written.
pub(crate) fn find(dataset: &Dataset, offset: &[u64]) -> Result<Packed> {
    check(dataset, offset)?;
    let (mut filters, mut address, mut size) = (0, u64::MAX, 0);
    // SAFETY: as above; the results are numbers on the stack.
    let status = sync(|| unsafe {
        let (filters, address, size) = (&raw mut filters, &raw mut address, &raw mut size);
        H5Dget_chunk_info_by_coord(dataset.id(), offset.as_ptr(), filters, address, size)
    });
    if status < 0 || address == u64::MAX {
        Err(failure("address", offset))
    } else {
        Ok(Packed { address, size })
    }
}

fn check(dataset: &Dataset, offset: &[u64]) -> Result<()> {
    match dataset.is_chunked() && dataset.ndim() == offset.len() {
        true => Ok(()),
        false => Err(failure("index", offset)),
    }
}

fn failure(what: &str, offset: &[u64]) -> Error {
    format!("the library has no {what} of the chunk at {offset:?}").into()
}
