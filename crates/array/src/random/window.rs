//! The part of a global tensor that a rank holds.

use crate::error::{Error, Result};

/// The intervals of global indices, one a dim, that a rank holds of a tensor.
///
/// ```
/// use isobar_array::Window;
///
/// // Rows 2 and 3 of a global [4, 6] tensor.
/// let window = Window::whole(&[4, 6]).narrow(0, 2, 2).unwrap();
/// assert_eq!((window.shape(), window.offset()), (&[2, 6][..], &[2, 0][..]));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    global: Vec<i64>,
    offset: Vec<i64>,
    shape: Vec<i64>,
}

impl Window {
    /// The whole tensor.
    pub fn whole(global: &[i64]) -> Self {
        Self { global: global.to_vec(), offset: vec![0; global.len()], shape: global.to_vec() }
    }

    /// Returns the window of a tensor of this shape. `batch` gives the offset of its first sample and the size of the global batch;
    /// `None` if dim 0 is the global batch.
    ///
    /// # Errors
    ///
    /// The part leaves the batch.
    ///
    /// ```
    /// use isobar_array::Window;
    ///
    /// let part = Window::of_batch(&[2, 5], Some((6, 8)))?;
    /// assert_eq!((part.global(), part.offset()), (&[8, 5][..], &[6, 0][..]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    pub fn of_batch(shape: &[i64], batch: Option<(i64, i64)>) -> Result<Self> {
        let (Some((offset, total)), [samples, rest @ ..]) = (batch, shape) else {
            return Ok(Self::whole(shape));
        };
        Self::whole(&[&[total], rest].concat()).narrow(0, offset, *samples)
    }

    /// The part of this window that starts `offset` further along `dim` and is `extent` long.
    ///
    /// # Errors
    ///
    /// `dim` does not exist, or the interval leaves the window.
    ///
    /// ```
    /// use isobar_array::Window;
    ///
    /// // The lower right quarter of a [4, 6] tensor.
    /// let quarter = Window::whole(&[4, 6]).narrow(0, 2, 2)?.narrow(1, 3, 3)?;
    /// assert_eq!(quarter.offset(), [2, 3]);
    /// assert_eq!(quarter.numel(), 6);
    /// assert!(quarter.narrow(0, 1, 2).is_err());
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    pub fn narrow(mut self, dim: usize, offset: i64, extent: i64) -> Result<Self> {
        let bad = |reason| Error::Random { what: "window", reason };
        let Some(&size) = self.shape.get(dim) else {
            return Err(bad(format!("dim {dim} of a tensor with {} dims", self.shape.len())));
        };
        if offset < 0 || extent < 0 || offset.checked_add(extent).is_none_or(|end| end > size) {
            return Err(bad(format!("{extent} elements from {offset} along dim {dim}, which has {size}")));
        }
        self.offset[dim] += offset;
        self.shape[dim] = extent;
        Ok(self)
    }

    /// Shape of the global tensor.
    pub fn global(&self) -> &[i64] {
        &self.global
    }

    /// Global index of the window's first element, along each dim.
    pub fn offset(&self) -> &[i64] {
        &self.offset
    }

    /// Shape of the part.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Number of elements of the part.
    pub fn numel(&self) -> usize {
        self.shape.iter().product::<i64>().max(0) as usize
    }

    /// Calls `run(first, count)` for the runs of consecutive global element indices (row-major), in order.
    pub(super) fn for_each_run(&self, mut run: impl FnMut(u64, usize)) {
        if self.numel() == 0 {
            return;
        }
        // Trailing dims that are whole join the run of the first dim that is not.
        let mut split = self.shape.len();
        let mut inner = 1;
        while split > 0 {
            split -= 1;
            inner *= self.shape[split];
            if self.shape[split] != self.global[split] {
                break;
            }
        }
        let mut stride = vec![1i64; self.global.len()];
        for dim in (1..self.global.len()).rev() {
            stride[dim - 1] = stride[dim] * self.global[dim];
        }
        let start: i64 = self.offset.iter().zip(&stride).map(|(offset, stride)| offset * stride).sum();
        let mut index = vec![0i64; split];
        loop {
            let outer: i64 = index.iter().zip(&stride).map(|(index, stride)| index * stride).sum();
            run((start + outer) as u64, inner as usize);
            let Some(dim) = (0..split).rev().find(|&dim| index[dim] + 1 < self.shape[dim]) else { return };
            index[dim] += 1;
            index[dim + 1..].fill(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(window: &Window) -> Vec<(u64, usize)> {
        let mut runs = Vec::new();
        window.for_each_run(|first, count| runs.push((first, count)));
        runs
    }

    #[test]
    fn runs_are_as_long_as_they_can_be() {
        assert_eq!(runs(&Window::whole(&[2, 3, 4])), [(0, 24)]);
        assert_eq!(runs(&Window::whole(&[])), [(0, 1)]);
        assert_eq!(runs(&Window::whole(&[4, 6]).narrow(0, 2, 2).unwrap()), [(12, 12)]);
        assert_eq!(runs(&Window::whole(&[2, 3, 4]).narrow(1, 1, 2).unwrap()), [(4, 8), (16, 8)]);
        assert_eq!(
            runs(&Window::whole(&[2, 2, 4]).narrow(2, 3, 1).unwrap()),
            [(3, 1), (7, 1), (11, 1), (15, 1)]
        );
        assert_eq!(runs(&Window::whole(&[2, 3]).narrow(1, 3, 0).unwrap()), []);
    }

    #[test]
    fn a_window_stays_inside() {
        for (dim, offset, extent) in [(2, 0, 1), (0, 3, 2), (0, -1, 1), (1, 0, 7), (1, i64::MAX, 1)] {
            assert!(Window::whole(&[4, 6]).narrow(dim, offset, extent).is_err());
        }
    }
}
