//! Opening libtorch's CUDA part at run time.

use std::ffi::{CStr, CString, c_int};
use std::path::PathBuf;
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// Opens libtorch's CUDA part, once a process; tells whether CUDA can be used from now on.
///
/// Without an NVIDIA driver the answer is `false`, which is no error.
///
/// # Errors
///
/// If there is a driver, but libtorch's CUDA part is missing or cannot be opened.
pub fn load() -> Result<bool> {
    static LOADED: OnceLock<Result<bool, String>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| {
        if open(c"libcuda.so.1", libc::RTLD_LAZY).is_err() {
            return Ok(false);
        }
        let library = beside_libtorch("libtorch_cuda.so").ok_or("libtorch is not loaded from a file")?;
        let path = CString::new(library.into_os_string().into_encoded_bytes())
            .map_err(|_| "libtorch's path holds a zero byte")?;
        // Global, since its kernels are found by the libraries that are loaded already.
        open(&path, libc::RTLD_NOW | libc::RTLD_GLOBAL).map(|()| true).map_err(|reason| {
            format!("there is a driver, but libtorch's CUDA part does not load: {reason}; install the CUDA set of libtorch")
        })
    });
    loaded.clone().map_err(|reason| Error::NoCuda { reason })
}

/// Returns whether there is a GPU that torch can use.
pub fn is_available() -> bool {
    matches!(load(), Ok(true)) && tch::Cuda::is_available()
}

/// The number of GPUs that torch can use.
pub fn device_count() -> usize {
    if is_available() { usize::try_from(tch::Cuda::device_count()).unwrap_or(0) } else { 0 }
}

/// Fails with a clear error where the device cannot be used.
pub(super) fn require(device: usize) -> Result<c_int> {
    require_any()?;
    let count = device_count();
    c_int::try_from(device).ok().filter(|_| device < count).ok_or_else(|| Error::NoCuda {
        reason: format!("device {device} was asked for, but there are {count}"),
    })
}

pub(super) fn require_any() -> Result<()> {
    if !load()? {
        return Err(Error::NoCuda { reason: "there is no NVIDIA driver on this machine".into() });
    }
    if !tch::Cuda::is_available() {
        let reason =
            "there is a driver, but no GPU that torch can use (or torch was asked before cuda::load)";
        return Err(Error::NoCuda { reason: reason.into() });
    }
    Ok(())
}

/// The path of a library in the folder that libtorch was loaded from.
fn beside_libtorch(name: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let libtorch = maps.lines().filter_map(|line| line.find('/').map(|start| &line[start..]));
    let libtorch = libtorch.map(PathBuf::from).find(|path| path.ends_with("libtorch_cpu.so"))?;
    Some(libtorch.with_file_name(name))
}

fn open(library: &CStr, flags: c_int) -> Result<(), String> {
    // SAFETY: the name is a C string; the libraries' initialisers are the driver's and libtorch's own.
    let handle = unsafe { libc::dlopen(library.as_ptr(), flags) };
    if !handle.is_null() {
        // Never closed: code of it may run until the process ends.
        return Ok(());
    }
    // SAFETY: after a failure this is null or a text that is valid until the next call on this thread.
    let reason = unsafe { libc::dlerror() };
    if reason.is_null() {
        return Err("unknown reason".into());
    }
    // SAFETY: as above.
    Err(unsafe { CStr::from_ptr(reason) }.to_string_lossy().into_owned())
}
