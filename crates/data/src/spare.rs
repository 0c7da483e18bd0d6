//! Buffers of a thread that are used again: memory that the system hands out anew costs more time than to fill it.

use std::cell::RefCell;
use std::io::{Error, ErrorKind, Result};

thread_local! {
    static SPARE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// Buffers that a thread keeps: one each for a chunk that is packed, unpacked and cut, and for the window.
const MOST: usize = 4;
/// Largest of them, in bytes.
const LARGEST: usize = 2 << 20;

/// Returns a buffer of `length` bytes with unspecified content, to be overwritten; an error if there is no memory.
pub(crate) fn buffer(length: usize) -> Result<Vec<u8>> {
    let kept = SPARE.with_borrow_mut(|spare| {
        let fits = spare.iter().enumerate().filter(|(_, bytes)| bytes.capacity() >= length);
        let (at, _) = fits.min_by_key(|(_, bytes)| bytes.capacity())?;
        Some(spare.swap_remove(at))
    });
    if let Some(mut bytes) = kept {
        bytes.resize(length, 0);
        return Ok(bytes);
    }
    // Asks for the memory first: `vec!` ends the process if there is none. It takes a page only when that is written.
    let mut probe = Vec::<u8>::new();
    probe.try_reserve_exact(length).map_err(|_| Error::from(ErrorKind::OutOfMemory))?;
    drop(std::hint::black_box(probe));
    Ok(vec![0; length])
}

/// Keeps a buffer for the next call of this thread.
pub(crate) fn keep(bytes: Vec<u8>) {
    SPARE.with_borrow_mut(|spare| {
        if bytes.capacity() > LARGEST {
            return;
        }
        spare.push(bytes);
        if spare.len() > MOST
            && let Some((smallest, _)) = spare.iter().enumerate().min_by_key(|(_, bytes)| bytes.capacity())
        {
            drop(spare.swap_remove(smallest));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_buffer_is_used_again() {
        let own = vec![7; 100];
        let place = own.as_ptr();
        keep(own);
        let bytes = buffer(50).unwrap();
        assert_eq!((bytes.as_ptr(), bytes.len()), (place, 50));
        assert!(buffer(isize::MAX as usize).is_err());
    }

    #[test]
    fn few_buffers_are_kept_and_no_large_one() {
        (0..9).for_each(|_| keep(vec![0; 10]));
        assert_eq!(SPARE.with_borrow(Vec::len), MOST);
        SPARE.with_borrow_mut(Vec::clear);
        keep(vec![0; LARGEST + 1]);
        assert!(SPARE.with_borrow(Vec::is_empty));
    }
}
