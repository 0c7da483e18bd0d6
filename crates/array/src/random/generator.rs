//! The generator: a seed and a count of draws.

use std::sync::atomic::{AtomicU64, Ordering};

use super::philox::{lanes, philox4x32};

/// Elements that are made at once.
const LANES: usize = 16;

/// A source of random numbers that all ranks of a mesh share.
///
/// Its whole state is the seed and how many draws were made. All ranks that hold parts of a tensor make the same draws in
/// the same order; a rank with an empty part draws as well.
///
/// ```
/// use isobar_array::{Generator, Window};
/// use tch::{Device, Kind};
///
/// let options = (Kind::Float, Device::Cpu);
/// let whole = Generator::new(7).normal(&Window::whole(&[4, 6]), 0.0, 1.0, options)?;
/// let rows = Window::whole(&[4, 6]).narrow(0, 2, 2)?;
/// let part = Generator::new(7).normal(&rows, 0.0, 1.0, options)?;
/// assert_eq!(part, whole.narrow(0, 2, 2));
/// # Ok::<(), isobar_array::Error>(())
/// ```
#[derive(Debug)]
pub struct Generator {
    seed: u64,
    draws: AtomicU64,
}

impl Generator {
    /// A generator that has drawn nothing yet.
    pub fn new(seed: u64) -> Self {
        Self::resume(seed, 0)
    }

    /// The generator of `seed` after `draws` draws, as saved in a checkpoint.
    ///
    /// ```
    /// use isobar_array::Generator;
    ///
    /// let generator = Generator::new(5);
    /// generator.next_u64();
    /// let resumed = Generator::resume(generator.seed(), generator.draws());
    /// assert_eq!(resumed.next_u64(), generator.next_u64());
    /// ```
    pub fn resume(seed: u64, draws: u64) -> Self {
        Self { seed, draws: AtomicU64::new(draws) }
    }

    /// An independent generator for the purpose called `stream`: a parameter's name, `"shuffle"`, `"dropout"`. A pure
    /// function of this one's seed and the name, whatever was drawn before.
    ///
    /// ```
    /// use isobar_array::Generator;
    ///
    /// let generator = Generator::new(5);
    /// let shuffle = generator.fork("shuffle").next_u64();
    /// generator.next_u64();
    /// assert_eq!(generator.fork("shuffle").next_u64(), shuffle);
    /// assert_ne!(generator.fork("dropout").next_u64(), shuffle);
    /// ```
    pub fn fork(&self, stream: &str) -> Self {
        // Absorb the name block by block, its length last, so that "a" + "bc" and "ab" + "c" differ from "abc".
        let key = words(self.seed);
        let mut state = [0; 4];
        for block in stream.as_bytes().chunks(8).chain([&(stream.len() as u64).to_le_bytes()[..]]) {
            for (index, &byte) in block.iter().enumerate() {
                state[index / 4] ^= u32::from(byte) << (8 * (index % 4));
            }
            state = philox4x32(state, key);
        }
        Self::new(u64::from(state[0]) << 32 | u64::from(state[1]))
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the number of draws so far.
    pub fn draws(&self) -> u64 {
        self.draws.load(Ordering::Relaxed)
    }

    /// A uniform 64-bit number.
    pub fn next_u64(&self) -> u64 {
        self.draw().at(0)
    }

    /// A uniform number of [0, 1).
    ///
    /// ```
    /// use isobar_array::Generator;
    ///
    /// let generator = Generator::new(5);
    /// assert!((0.0..1.0).contains(&generator.next_f64()));
    /// assert_eq!(generator.draws(), 1);
    /// ```
    pub fn next_f64(&self) -> f64 {
        unit(self.next_u64())
    }

    /// The numbers 0 … `count` − 1 in random order.
    ///
    /// ```
    /// let mut order = isobar_array::Generator::new(3).permutation(5);
    /// order.sort();
    /// assert_eq!(order, [0, 1, 2, 3, 4]);
    /// ```
    pub fn permutation(&self, count: usize) -> Vec<i64> {
        let draw = self.draw();
        let mut keys = vec![0; count];
        draw.fill(0, &mut keys, |bits| bits);
        let mut keyed: Vec<(u64, i64)> = keys.into_iter().zip(0..).collect();
        keyed.sort_unstable();
        keyed.into_iter().map(|(_, index)| index).collect()
    }

    /// Begins the next draw.
    pub(super) fn draw(&self) -> Draw {
        Draw { key: words(self.seed), count: words(self.draws.fetch_add(1, Ordering::Relaxed)) }
    }
}

impl Clone for Generator {
    /// A generator that goes on with the same draws.
    fn clone(&self) -> Self {
        Self::resume(self.seed, self.draws())
    }
}

/// One draw: 64 random bits for every global element index.
pub(super) struct Draw {
    key: [u32; 2],
    count: [u32; 2],
}

impl Draw {
    fn at(&self, index: u64) -> u64 {
        let [low, high] = words(index);
        let [first, second, ..] = philox4x32([low, high, self.count[0], self.count[1]], self.key);
        join(first, second)
    }

    /// `value` of the bits of the elements `first`, `first` + 1, …
    pub(super) fn fill<T>(&self, first: u64, out: &mut [T], value: impl Fn(u64) -> T) {
        // The widest vector registers that the machine has; the results are the same with any.
        pulp::Arch::new().dispatch(Fill { draw: self, first, out, value });
    }

    #[inline(always)]
    fn block(&self, first: u64) -> [u64; LANES] {
        let mut counter = [[0; LANES], [0; LANES], [self.count[0]; LANES], [self.count[1]; LANES]];
        let [lows, highs, ..] = &mut counter;
        for (lane, (low, high)) in lows.iter_mut().zip(highs).enumerate() {
            [*low, *high] = words(first.wrapping_add(lane as u64));
        }
        let [high, low, ..] = lanes(counter, self.key);
        let mut bits = [0; LANES];
        for lane in 0..LANES {
            bits[lane] = join(high[lane], low[lane]);
        }
        bits
    }
}

struct Fill<'a, T, F> {
    draw: &'a Draw,
    first: u64,
    out: &'a mut [T],
    value: F,
}

impl<T, F: Fn(u64) -> T> pulp::NullaryFnOnce for Fill<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let mut index = self.first;
        for block in self.out.chunks_mut(LANES) {
            for (out, bits) in block.iter_mut().zip(self.draw.block(index)) {
                *out = (self.value)(bits);
            }
            index = index.wrapping_add(LANES as u64);
        }
    }
}

/// The top 53 of 64 random bits as a number of [0, 1).
#[inline(always)]
pub(super) fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

#[inline(always)]
fn words(wide: u64) -> [u32; 2] {
    [wide as u32, (wide >> 32) as u32]
}

#[inline(always)]
fn join(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forks_are_pure_and_differ() {
        let generator = Generator::new(11);
        generator.next_u64();
        assert_eq!(generator.fork("a").next_u64(), Generator::new(11).fork("a").next_u64());
        let names = ["", "a", "b", "ab", "abcdefgh", "abcdefghi", "abcdefg\0"];
        let mut seeds: Vec<u64> = names.iter().map(|name| generator.fork(name).seed()).collect();
        seeds.sort();
        seeds.dedup();
        assert_eq!(seeds.len(), names.len());
        assert_ne!(generator.fork("a").seed(), Generator::new(12).fork("a").seed());
    }

    #[test]
    fn a_saved_generator_goes_on() {
        let generator = Generator::new(5);
        generator.next_u64();
        let resumed = Generator::resume(generator.seed(), generator.draws());
        assert_eq!(generator.next_u64(), resumed.next_u64());
        assert_eq!(generator.draws(), 2);
    }

    #[test]
    fn runs_are_the_single_elements() {
        let draw = Generator::new(1).draw();
        let mut got = [0; 21];
        // Across the border of 32 bits.
        draw.fill(u64::from(u32::MAX) - 5, &mut got, |bits| bits);
        let want: Vec<u64> = (0..21).map(|step| draw.at(u64::from(u32::MAX) - 5 + step)).collect();
        assert_eq!(got[..], want);
    }
}
