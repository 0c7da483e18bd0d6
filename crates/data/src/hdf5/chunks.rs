//! Two functions of the HDF5 library that its crate does not wrap: the size of one chunk by its coordinates, and its bytes as
//! they are in the file.
#![expect(unsafe_code, reason = "calls the HDF5 library; each block says why it is sound")]

use std::ffi::c_int;

use hdf5_metno::{Dataset, Error, Result, sync::sync};
use hdf5_metno_sys::h5d::H5Dread_chunk1;

unsafe extern "C" {
    fn H5Dget_chunk_storage_size(dataset: i64, offset: *const u64, size: *mut u64) -> c_int;
}

/// Chunks of a dataset with filters, by the coordinates of their first values.
#[derive(Debug)]
pub(super) struct PackedChunks {
    dataset: Dataset,
    ndim: usize,
}

impl PackedChunks {
    /// Returns `None` for a dataset without chunks or without filters: for these, the library may read more bytes than the size
    /// that it reports.
    pub(super) fn new(dataset: &Dataset) -> Option<Self> {
        let filtered = dataset.is_chunked() && !dataset.dcpl().ok()?.get_filters().ok()?.is_empty();
        filtered.then(|| Self { dataset: dataset.clone(), ndim: dataset.ndim() })
    }

    /// Returns the number of bytes that the chunk at `offset` takes in the file; 0 if it was never written.
    ///
    /// # Errors
    ///
    /// An offset at which no chunk begins, or a damaged index of chunks.
    pub(super) fn size(&self, offset: &[u64]) -> Result<u64> {
        if offset.len() != self.ndim {
            return Err(failure("index", offset));
        }
        let mut size = 0;
        // SAFETY: the dataset is open during the call, the offset has one number for each of its dims, and the lock of the
        // library is held.
        let status =
            sync(|| unsafe { H5Dget_chunk_storage_size(self.dataset.id(), offset.as_ptr(), &raw mut size) });
        if status < 0 { Err(failure("size", offset)) } else { Ok(size) }
    }

    /// Returns the bytes of the chunk at `offset` as they are in the file, and the mask of the filters that its writer left out.
    /// `size` is the result of [`PackedChunks::size`].
    ///
    /// # Errors
    ///
    /// A chunk that was never written, changed its size, or is not inside the file.
    pub(super) fn read(&self, offset: &[u64], size: u64) -> Result<(Vec<u8>, u32)> {
        let mut bytes = vec![0; usize::try_from(size).map_err(|_| failure("size", offset))?];
        let mut skipped = 0;
        let status = sync(|| {
            // The lock is held from here on: the size is that of the chunk that is read next.
            if size == 0 || self.size(offset).ok() != Some(size) {
                return -1;
            }
            // SAFETY: the dataset is open during the call, the offset has one number for each of its dims, the library writes as
            // many bytes as the index of chunks says, which are those of the buffer where there are filters, and its lock is
            // held. 0 stands for the default properties.
            unsafe {
                let (skipped, bytes) = (&raw mut skipped, bytes.as_mut_ptr().cast());
                H5Dread_chunk1(self.dataset.id(), 0, offset.as_ptr(), skipped, bytes)
            }
        });
        if status < 0 { Err(failure("bytes", offset)) } else { Ok((bytes, skipped)) }
    }
}

fn failure(what: &str, offset: &[u64]) -> Error {
    format!("the library has no {what} of the chunk at {offset:?}").into()
}
