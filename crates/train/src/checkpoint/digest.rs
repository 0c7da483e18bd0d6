//! BLAKE3 of files and of their blocks, so that a reader of some bytes need not read the others to trust them.
//!
//! BLAKE3 is a tree: the digests of blocks of a power of two of bytes are nodes of the tree whose root is the digest of the
//! file. One pass gives both, and the digest of the file follows from those of the blocks.

use blake3::hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};
use blake3::{Hash, Hasher};
use serde::{Deserialize, Serialize};

/// Bytes of a block.
pub(super) const BLOCK: u64 = 1 << 20;

/// The length of a file, its BLAKE3 (what `b3sum` prints), and that of each of its blocks, where it has more than one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileDigest {
    pub(super) bytes: u64,
    pub(super) blake3: String,
    pub(super) blocks: Vec<String>,
}

impl FileDigest {
    /// The blocks' digests, found to be those of a file of this length and digest.
    pub(super) fn check(&self) -> Result<CheckedDigest, String> {
        let expected = if self.bytes <= BLOCK { 0 } else { self.bytes.div_ceil(BLOCK) };
        if self.blocks.len() as u64 != expected {
            return Err(format!("has {} blocks, expected {expected}", self.blocks.len()));
        }
        let hash = |hex: &String| Hash::from_hex(hex).map_err(|_| format!("has the digest {hex:?}"));
        let root = hash(&self.blake3)?;
        let blocks =
            self.blocks.iter().map(|hex| hash(hex).map(|h| *h.as_bytes())).collect::<Result<Vec<_>, _>>()?;
        if !blocks.is_empty() && root_of(&blocks) != root {
            return Err("has a digest that is not that of its blocks".to_owned());
        }
        Ok(CheckedDigest { bytes: self.bytes, root, blocks })
    }
}

/// The digests of a file, ready to check blocks by.
#[derive(Debug)]
pub(super) struct CheckedDigest {
    pub(super) bytes: u64,
    root: Hash,
    blocks: Vec<ChainingValue>,
}

impl CheckedDigest {
    /// Returns whether a block has the digest with which it was written.
    pub(super) fn holds(&self, block: u64, data: &[u8]) -> bool {
        match self.blocks.get(block as usize) {
            None => block == 0 && self.blocks.is_empty() && blake3::hash(data) == self.root,
            Some(expected) => !data.is_empty() && node(block, data) == *expected,
        }
    }
}

/// Takes the bytes of a file one after the other.
#[derive(Debug)]
pub(super) struct FileHasher {
    /// Hash of the current block.
    hasher: Hasher,
    filled: u64,
    blocks: Vec<ChainingValue>,
}

impl FileHasher {
    pub(super) fn new() -> Self {
        Self { hasher: Hasher::new(), filled: 0, blocks: Vec::new() }
    }

    pub(super) fn update(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            // A block ends when the next one begins: the only block of a file is the root of the tree itself.
            if self.filled == BLOCK {
                self.blocks.push(self.hasher.finalize_non_root());
                self.hasher = Hasher::new();
                self.hasher.set_input_offset(self.blocks.len() as u64 * BLOCK);
                self.filled = 0;
            }
            let (now, later) = data.split_at(data.len().min((BLOCK - self.filled) as usize));
            self.hasher.update(now);
            self.filled += now.len() as u64;
            data = later;
        }
    }

    pub(super) fn finish(mut self) -> FileDigest {
        let bytes = self.blocks.len() as u64 * BLOCK + self.filled;
        let root = if self.blocks.is_empty() {
            self.hasher.finalize()
        } else {
            self.blocks.push(self.hasher.finalize_non_root());
            root_of(&self.blocks)
        };
        let hex = |block: &ChainingValue| Hash::from_bytes(*block).to_hex().to_string();
        FileDigest { bytes, blake3: root.to_hex().to_string(), blocks: self.blocks.iter().map(hex).collect() }
    }
}

fn node(block: u64, data: &[u8]) -> ChainingValue {
    let mut hasher = Hasher::new();
    hasher.set_input_offset(block * BLOCK);
    hasher.update(data);
    hasher.finalize_non_root()
}

/// The root of a tree of two blocks or more.
fn root_of(blocks: &[ChainingValue]) -> Hash {
    let (left, right) = halves(blocks);
    merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash)
}

fn subtree(blocks: &[ChainingValue]) -> ChainingValue {
    match blocks {
        [only] => *only,
        _ => {
            let (left, right) = halves(blocks);
            merge_subtrees_non_root(&subtree(left), &subtree(right), Mode::Hash)
        }
    }
}

/// As BLAKE3 splits: the left half is the largest power of two that leaves something for the right.
fn halves(blocks: &[ChainingValue]) -> (&[ChainingValue], &[ChainingValue]) {
    blocks.split_at(blocks.len().next_power_of_two() / 2)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    fn the_blocks_make_the_digest_of_the_file(
        #[values(0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 7, 5 * BLOCK)] bytes: u64,
    ) {
        let data: Vec<u8> = (0..bytes).map(|i| (i * 31 % 251) as u8).collect();
        let mut hasher = FileHasher::new();
        data.chunks(700_001).for_each(|part| hasher.update(part));
        let digest = hasher.finish();
        assert_eq!(digest.bytes, bytes);
        assert_eq!(digest.blake3, blake3::hash(&data).to_hex().to_string());
        let checked = digest.check().unwrap();
        let mut blocks = data.chunks(BLOCK as usize).enumerate();
        assert!(blocks.all(|(index, block)| checked.holds(index as u64, block)));
        assert!(!checked.holds(0, b"something else"));

        let mut other = digest.clone();
        other.blocks.push(digest.blake3.clone());
        assert!(other.check().is_err());
        if !digest.blocks.is_empty() {
            let mut other = digest;
            other.blocks.swap(0, 1);
            assert!(other.check().is_err());
        }
    }
}
