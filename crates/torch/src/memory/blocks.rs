//! Large blocks, mapped from the system and kept when freed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::LazyLock;

/// From this size on a block is large.
pub(super) const LARGE: usize = 1 << 20;
/// Large blocks start at a multiple of this (the system's pages may be larger).
pub(super) const PAGE: usize = 4096;
/// The size of a huge page; mappings of at least one start at a multiple.
const HUGE: usize = 2 << 20;
/// Kept memory that needs no justification by the peak.
const SLACK: usize = 256 << 20;

/// The large blocks in use and those kept for reuse.
#[derive(Default)]
pub(super) struct Blocks {
    // Found by address only, never walked, so that the order of a hash map does no harm.
    live: LazyLock<HashMap<usize, Live>>,
    /// By capacity, then latest first, since what was used last is still in the processor's caches.
    kept: BTreeSet<(usize, Reverse<u64>)>,
    by_age: BTreeMap<u64, Mapping>,
    clock: u64,
    live_capacity: usize,
    kept_capacity: usize,
    peak_capacity: usize,
}

struct Live {
    bytes: usize,
    mapping: Mapping,
}

impl Blocks {
    pub(super) const fn new() -> Self {
        Self {
            live: LazyLock::new(HashMap::new),
            kept: BTreeSet::new(),
            by_age: BTreeMap::new(),
            clock: 0,
            live_capacity: 0,
            kept_capacity: 0,
            peak_capacity: 0,
        }
    }

    /// The largest live blocks, largest first: where they begin, and how many bytes were asked for.
    pub(super) fn largest(&self, count: usize) -> Vec<(usize, usize)> {
        let mut live: Vec<(usize, usize)> =
            self.live.iter().map(|(&address, live)| (address, live.bytes)).collect();
        live.sort_unstable_by_key(|&(address, bytes)| (Reverse(bytes), address));
        live.truncate(count);
        live
    }

    pub(super) fn cached(&self) -> usize {
        self.kept_capacity
    }

    /// Takes a kept block that is large enough and not wastefully larger.
    pub(super) fn reuse(&mut self, bytes: usize) -> Option<usize> {
        let wanted = rounded(bytes)?;
        let most = wanted.saturating_add(wanted / 4);
        let &(capacity, age) = self.kept.range((wanted, Reverse(u64::MAX))..).next()?;
        if capacity > most {
            return None;
        }
        self.kept.remove(&(capacity, age));
        let mapping = self.by_age.remove(&age.0)?;
        self.kept_capacity -= capacity;
        Some(self.enter(mapping, bytes))
    }

    /// Takes a new block into use. The mappings returned are over the limit, to be dropped outside the lock.
    pub(super) fn adopt(&mut self, mapping: Mapping, bytes: usize) -> (usize, Vec<Mapping>) {
        let address = self.enter(mapping, bytes);
        (address, self.trim())
    }

    /// Keeps a freed block, if it is one of ours; gives its bytes, and mappings as `adopt` does.
    pub(super) fn park(&mut self, address: usize) -> Option<(usize, Vec<Mapping>)> {
        let Live { bytes, mapping } = self.live.remove(&address)?;
        let capacity = mapping.len;
        self.live_capacity -= capacity;
        self.kept_capacity += capacity;
        self.clock += 1;
        self.kept.insert((capacity, Reverse(self.clock)));
        self.by_age.insert(self.clock, mapping);
        Some((bytes, self.trim()))
    }

    /// Forgets the kept blocks and the peak.
    pub(super) fn empty(&mut self) -> Vec<Mapping> {
        self.kept.clear();
        self.kept_capacity = 0;
        self.peak_capacity = self.live_capacity;
        std::mem::take(&mut self.by_age).into_values().collect()
    }

    fn enter(&mut self, mapping: Mapping, bytes: usize) -> usize {
        self.live_capacity += mapping.len;
        self.peak_capacity = self.peak_capacity.max(self.live_capacity);
        let address = mapping.address;
        self.live.insert(address, Live { bytes, mapping });
        address
    }

    /// Takes out the longest unused blocks that are over the limit.
    fn trim(&mut self) -> Vec<Mapping> {
        let limit = self.peak_capacity + self.peak_capacity / 4 + SLACK;
        let mut released = Vec::new();
        while self.live_capacity + self.kept_capacity > limit
            && let Some((age, mapping)) = self.by_age.pop_first()
        {
            self.kept.remove(&(mapping.len, Reverse(age)));
            self.kept_capacity -= mapping.len;
            released.push(mapping);
        }
        released
    }
}

/// Memory mapped from the system, given back on drop.
pub(super) struct Mapping {
    address: usize,
    len: usize,
}

impl Mapping {
    /// Maps at least `bytes`; `None` where the system has no more.
    pub(super) fn new(bytes: usize) -> Option<Self> {
        let len = rounded(bytes)?;
        // Room to start at a huge page's boundary; the rest goes back at once.
        let spare = if len >= HUGE { HUGE } else { 0 };
        let start = map(len.checked_add(spare)?)?;
        let address = if spare > 0 { start.next_multiple_of(HUGE) } else { start };
        let before = address - start;
        unmap(start, before);
        unmap(address + len, spare - before);
        if spare > 0 {
            ask_for_huge_pages(address, len);
        }
        Some(Self { address, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        unmap(self.address, self.len);
    }
}

/// The capacity of a block for `bytes`: eight sizes to each power of two, so that blocks of nearly equal tensors
/// serve each other, and at most an eighth lies idle.
fn rounded(bytes: usize) -> Option<usize> {
    let step = (1 << bytes.max(LARGE).ilog2()) / 8;
    bytes.max(LARGE).checked_next_multiple_of(step)
}

fn map(len: usize) -> Option<usize> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new anonymous mapping anywhere touches no other memory.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
    (start != libc::MAP_FAILED).then(|| start.expose_provenance())
}

fn unmap(address: usize, len: usize) {
    if len > 0 {
        // SAFETY: the range is part of a mapping that `map` made, and nobody uses it any more. (It fails where the
        // system is out of mappings; then the memory stays ours, unused.)
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(address), len) };
    }
}

#[cfg(target_os = "linux")]
fn ask_for_huge_pages(address: usize, len: usize) {
    // SAFETY: advice on our own mapping, which changes no content. A refusal does no harm.
    unsafe { libc::madvise(std::ptr::with_exposed_provenance_mut(address), len, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_address: usize, _len: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(blocks: &mut Blocks, bytes: usize) -> usize {
        blocks.reuse(bytes).unwrap_or_else(|| blocks.adopt(Mapping::new(bytes).unwrap(), bytes).0)
    }

    #[test]
    fn a_freed_block_serves_sizes_near_its_own() {
        let mut blocks = Blocks::new();
        let first = take(&mut blocks, 10 << 20);
        assert!(first.is_multiple_of(HUGE));
        assert_eq!(blocks.park(first).unwrap().0, 10 << 20);
        assert_eq!(blocks.reuse(5 << 20), None, "half the size would waste half");
        assert_eq!(blocks.reuse(9 << 20), Some(first));
        assert_eq!(blocks.park(first).unwrap().0, 9 << 20, "bytes are those asked for");
        assert_eq!(blocks.reuse(11 << 20), None);
        assert!(blocks.park(first).is_none(), "not live");
    }

    #[test]
    fn the_latest_of_equal_blocks_is_taken() {
        let mut blocks = Blocks::new();
        let [a, b] = [take(&mut blocks, LARGE), take(&mut blocks, LARGE)];
        blocks.park(a).unwrap();
        blocks.park(b).unwrap();
        assert_eq!(blocks.reuse(LARGE), Some(b));
        assert_eq!(blocks.reuse(LARGE), Some(a));
    }

    #[test]
    fn what_is_kept_stays_within_the_limit() {
        let mut blocks = Blocks::new();
        // Sizes that do not serve each other, one live at a time.
        for step in 0..10 {
            let bytes = (100 + 40 * step) << 20;
            let address = take(&mut blocks, bytes);
            blocks.park(address).unwrap();
            let limit = blocks.peak_capacity * 5 / 4 + SLACK;
            assert!(blocks.cached() <= limit, "{} kept at a limit of {limit}", blocks.cached());
        }
        assert!(blocks.cached() > 0);
        assert!(!blocks.empty().is_empty());
        assert_eq!((blocks.cached(), blocks.peak_capacity), (0, 0));
    }

    #[test]
    fn capacities_waste_an_eighth_at_most() {
        for bytes in [LARGE, LARGE + 1, 3 << 20, (64 << 20) + 4, (1 << 30) - 1] {
            let capacity = rounded(bytes).unwrap();
            assert!(capacity >= bytes && capacity - bytes <= bytes / 8 + 1 && capacity.is_multiple_of(PAGE));
        }
        assert_eq!(rounded(64 << 20), Some(64 << 20));
        assert_eq!(rounded(usize::MAX), None);
        assert!(Mapping::new(usize::MAX / 2).is_none());
    }
}
