//! The CPU allocator that libtorch is given: it counts, and keeps large blocks for reuse.
//!
//! A large block that goes back to the system at every free costs a page fault for each of its pages at the next
//! use, more than a copy into it. Large blocks therefore stay here ([`Blocks`]); small ones are the system's affair.

use std::alloc::Layout;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use super::blocks::{Blocks, LARGE, Mapping, PAGE};
use crate::ffi;

/// Replaces libtorch's CPU allocator for the whole process by one that keeps large blocks for reuse and counts bytes.
///
/// Repeated calls do nothing. Tensors that exist already keep their memory; it goes back to where it came from. To be
/// called before other threads use torch (libtorch's allocator table is not locked).
///
/// Blocks of at least 1 MiB are mapped on huge pages where the system has them, and kept when freed as long as live
/// and kept memory together stay within 5/4 of the highest live memory so far, plus 256 MiB; the longest unused go
/// first.
pub fn install_caching_allocator() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the two functions are an allocator: blocks are apart, 64-byte aligned, and live until freed.
        unsafe { ffi::isobar_install_allocator(allocate, free) };
        INSTALLED.store(true, Ordering::Release);
    });
}

/// Returns whether [`install_caching_allocator`] was called.
pub fn is_installed() -> bool {
    INSTALLED.load(Ordering::Acquire)
}

/// Bytes in use by CPU tensors, as they were asked for: of tensors made since the allocator was installed, and of
/// vectors lent by [`from_vec`](super::from_vec).
pub fn live_bytes() -> u64 {
    LIVE.load(Ordering::Relaxed)
}

/// The highest [`live_bytes`] since the start or [`reset_peak`].
pub fn peak_bytes() -> u64 {
    PEAK.load(Ordering::Relaxed).max(live_bytes())
}

/// Starts a new measurement of [`peak_bytes`] at what is live now.
pub fn reset_peak() {
    PEAK.store(live_bytes(), Ordering::Relaxed);
}

/// Bytes of freed blocks that are kept for reuse.
pub fn cached_bytes() -> u64 {
    blocks().cached() as u64
}

/// The largest blocks of CPU tensors that are in use, of those of at least 1 MiB, largest first: where they begin, and how many
/// bytes they were asked for. None where the allocator is not installed.
pub fn largest_blocks(count: usize) -> Vec<(usize, usize)> {
    blocks().largest(count)
}

/// Gives all kept blocks back to the system.
pub fn empty_cache() {
    let released = blocks().empty();
    drop(released);
}

static INSTALLED: AtomicBool = AtomicBool::new(false);
static LIVE: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);
static BLOCKS: Mutex<Blocks> = Mutex::new(Blocks::new());

fn blocks() -> MutexGuard<'static, Blocks> {
    BLOCKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory that counts as live while this exists.
pub(super) struct Counted(usize);

impl Counted {
    pub(super) fn new(bytes: usize) -> Self {
        count(bytes);
        Self(bytes)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        discount(self.0);
    }
}

fn count(bytes: usize) {
    let live = LIVE.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
    if live > PEAK.load(Ordering::Relaxed) {
        PEAK.fetch_max(live, Ordering::Relaxed);
    }
}

fn discount(bytes: usize) {
    LIVE.fetch_sub(bytes as u64, Ordering::Relaxed);
}

extern "C" fn allocate(bytes: usize) -> *mut c_void {
    let block = if bytes < LARGE { allocate_small(bytes) } else { allocate_large(bytes) };
    if !block.is_null() {
        count(bytes);
    }
    block
}

extern "C" fn free(block: *mut c_void) {
    if block.is_null() {
        return;
    }
    // Large blocks start on a page. A small one may do so by chance, but is not known to `Blocks`.
    if block.addr().is_multiple_of(PAGE) {
        let returned = blocks().park(block.addr());
        if let Some((bytes, released)) = returned {
            discount(bytes);
            drop(released);
            return;
        }
    }
    free_small(block);
}

fn allocate_large(bytes: usize) -> *mut c_void {
    let reused = blocks().reuse(bytes);
    if let Some(address) = reused {
        return std::ptr::with_exposed_provenance_mut(address);
    }
    // Outside the lock: mapping takes time.
    let mapping = Mapping::new(bytes).or_else(|| {
        empty_cache();
        Mapping::new(bytes)
    });
    let Some(mapping) = mapping else { return std::ptr::null_mut() };
    let (address, released) = blocks().adopt(mapping, bytes);
    drop(released);
    std::ptr::with_exposed_provenance_mut(address)
}

/// Alignment of libtorch's own allocator, for vector instructions.
const ALIGNMENT: usize = 64;
/// A small block's size is kept before it; as long as the alignment, to keep that.
const HEADER: usize = ALIGNMENT;

fn small_layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.checked_add(HEADER)?, ALIGNMENT).ok()
}

fn allocate_small(bytes: usize) -> *mut c_void {
    let Some(layout) = small_layout(bytes) else { return std::ptr::null_mut() };
    // SAFETY: the layout is not empty.
    let start = unsafe { std::alloc::alloc(layout) };
    if start.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: the block has room for the header, and its alignment is more than that of usize.
    unsafe {
        start.cast::<usize>().write(bytes);
        start.add(HEADER).cast()
    }
}

fn free_small(block: *mut c_void) {
    // SAFETY: a block that is not large was made by `allocate_small`, with its header before it.
    let (start, bytes) = unsafe {
        let start = block.cast::<u8>().sub(HEADER);
        (start, start.cast::<usize>().read())
    };
    discount(bytes);
    if let Some(layout) = small_layout(bytes) {
        // SAFETY: the block was allocated with this layout, and its owner frees it once.
        unsafe { std::alloc::dealloc(start, layout) };
    }
}
