//! Philox-4x32-10: a counter-based generator, a pure function of key and counter.
//!
//! Salmon, Moraes, Dror, Shaw: *Parallel random numbers: as easy as 1, 2, 3*, SC 2011.

const MULTIPLIERS: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// The four random words that Philox-4x32-10 gives for a counter and a key.
///
/// ```
/// // Known answer of Random123.
/// let words = isobar_array::random::philox4x32([0; 4], [0; 2]);
/// assert_eq!(words, [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
/// ```
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    lanes::<1>(counter.map(|word| [word]), key).map(|[word]| word)
}

/// Computes `N` counters at once, words outermost, so that the compiler uses vector registers.
#[inline(always)]
pub(super) fn lanes<const N: usize>(mut counter: [[u32; N]; 4], mut key: [u32; 2]) -> [[u32; N]; 4] {
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let [c0, c1, c2, c3] = counter;
        let mut next = [[0u32; N]; 4];
        for lane in 0..N {
            let (high0, low0) = product(MULTIPLIERS[0], c0[lane]);
            let (high1, low1) = product(MULTIPLIERS[1], c2[lane]);
            next[0][lane] = high1 ^ c1[lane] ^ key[0];
            next[1][lane] = low1;
            next[2][lane] = high0 ^ c3[lane] ^ key[1];
            next[3][lane] = low0;
        }
        counter = next;
    }
    counter
}

#[inline(always)]
fn product(multiplier: u64, word: u32) -> (u32, u32) {
    let wide = multiplier * u64::from(word);
    ((wide >> 32) as u32, wide as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    // The known-answer file of Random123, "philox4x32 10".
    #[rstest]
    #[case([0; 4], [0; 2], [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8])]
    #[case([u32::MAX; 4], [u32::MAX; 2], [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd])]
    #[case(
        [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344],
        [0xa4093822, 0x299f31d0],
        [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
    )]
    fn known_answers(#[case] counter: [u32; 4], #[case] key: [u32; 2], #[case] want: [u32; 4]) {
        assert_eq!(philox4x32(counter, key), want);
    }

    #[test]
    fn lanes_are_the_scalar_function() {
        let mut counter = [[0u32; 8]; 4];
        for lane in 0..8 {
            for (word, row) in counter.iter_mut().enumerate() {
                row[lane] = (lane * 7919 + word * 104_729) as u32;
            }
        }
        let got = lanes(counter, [3, 5]);
        for lane in 0..8 {
            let want = philox4x32(counter.map(|row| row[lane]), [3, 5]);
            assert_eq!(got.map(|row| row[lane]), want);
        }
    }
}
