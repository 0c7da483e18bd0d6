//! Windows with a halo, against the whole field.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use isobar_data::{DataVariable, Dataset, Dim, HaloWindow, Result, Window, check_window};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

const SAMPLES: usize = 2;
const FRAMES: usize = 2;

/// A data set that counts the values which are read.
#[derive(Debug)]
struct Counted {
    dims: Vec<Dim>,
    times: Vec<f64>,
    variables: Vec<DataVariable>,
    shape: Vec<i64>,
    read: AtomicUsize,
}

impl Counted {
    fn new(dims: &[(usize, bool)]) -> Self {
        let shape: Vec<i64> = [SAMPLES, FRAMES, 1]
            .iter()
            .chain(dims.iter().map(|(extent, _)| extent))
            .map(|&extent| extent as i64)
            .collect();
        let dim = |&(extent, periodic): &(usize, bool)| Dim {
            name: "x".to_owned(),
            unit: None,
            coordinates: (0..extent).map(|at| at as f64).collect(),
            periodic,
        };
        Self {
            dims: dims.iter().map(dim).collect(),
            times: vec![0.0, 1.0],
            variables: vec![DataVariable::scalar("u")],
            shape,
            read: AtomicUsize::new(0),
        }
    }

    fn all(&self) -> Tensor {
        Tensor::arange(self.shape.iter().product::<i64>(), (Kind::Float, Device::Cpu)).view(&self.shape[..])
    }
}

impl Dataset for Counted {
    fn path(&self) -> &Path {
        Path::new("counted")
    }

    fn samples(&self) -> usize {
        SAMPLES
    }

    fn dims(&self) -> &[Dim] {
        &self.dims
    }

    fn times(&self) -> Option<&[f64]> {
        Some(&self.times)
    }

    fn variables(&self) -> &[DataVariable] {
        &self.variables
    }

    fn read(&self, window: &Window, samples: &[usize], _variables: &[&str]) -> Result<Tensor> {
        check_window(self, window, samples)?;
        let rows: Vec<i64> = samples.iter().map(|&sample| sample as i64).collect();
        let cut = |values: Tensor, dim: usize, range: &Range<usize>| {
            values.narrow(dim as i64, range.start as i64, range.len() as i64)
        };
        let values = cut(self.all().index_select(0, &Tensor::from_slice(&rows)), 1, &window.frames);
        let values =
            window.points.iter().enumerate().fold(values, |values, (dim, range)| cut(values, dim + 3, range));
        let _ = self.read.fetch_add(values.numel(), Ordering::Relaxed);
        Ok(values.contiguous())
    }
}

/// A dim's extent, whether it is periodic, a range of its points, and a halo.
fn dim() -> impl Strategy<Value = (usize, bool, Range<usize>, usize)> {
    (1_usize..9, any::<bool>(), 0_usize..12).prop_flat_map(|(extent, periodic, halo)| {
        (0..=extent, 0..=extent).prop_map(move |(a, b)| (extent, periodic, a.min(b)..a.max(b), halo))
    })
}

proptest! {
    #[test]
    fn a_window_and_its_halo_are_read_once(dims in proptest::collection::vec(dim(), 1..4)) {
        let data = Counted::new(&dims.iter().map(|dim| (dim.0, dim.1)).collect::<Vec<_>>());
        let points: Vec<Range<usize>> = dims.iter().map(|dim| dim.2.clone()).collect();
        let halo: Vec<usize> = dims.iter().map(|dim| dim.3).collect();
        let window = HaloWindow::new(&data, &Window { frames: 1..2, points: points.clone() }, &halo).unwrap();
        let found = window.read(&data, &[1, 0], &["u"]).unwrap();

        // The rows of the whole field.
        let mut expected = data.all().index_select(0, &Tensor::from_slice(&[1_i64, 0])).narrow(1, 1, 1);
        let mut distinct = SAMPLES;
        for (at, (extent, periodic, own, halo)) in dims.iter().enumerate() {
            let (extent, halo) = (*extent as i64, *halo as i64);
            let rows = if own.is_empty() { 0..0 } else { own.start as i64 - halo..own.end as i64 + halo };
            let mut rows: Vec<i64> = match periodic {
                true => rows.map(|row| row.rem_euclid(extent)).collect(),
                false => rows.filter(|row| (0..extent).contains(row)).collect(),
            };
            expected = expected.index_select(at as i64 + 3, &Tensor::from_slice(&rows));
            rows.sort_unstable();
            rows.dedup();
            distinct *= rows.len();
        }
        prop_assert_eq!(&found, &expected);
        prop_assert_eq!(data.read.load(Ordering::Relaxed), distinct);
        let extents: Vec<i64> = window.extents().into_iter().map(|extent| extent as i64).collect();
        prop_assert_eq!(&found.size()[3..], &extents[..]);

        // The window alone.
        let cut = |values: Tensor, (dim, range): (usize, &Range<usize>)| {
            values.narrow(dim as i64 + 3, range.start as i64, range.len() as i64)
        };
        let own = data.read(&Window { frames: 1..2, points }, &[1, 0], &["u"]).unwrap();
        prop_assert_eq!(window.inner().iter().enumerate().fold(found, cut), own);
    }
}

#[test]
fn halos_that_do_not_fit_are_errors() {
    let data = Counted::new(&[(4, true), (3, false)]);
    let window = |points: &[Range<usize>]| Window { frames: 0..1, points: points.to_vec() };
    let error = HaloWindow::new(&data, &window(&[0..2, 0..3]), &[1]).unwrap_err().to_string();
    assert!(error.contains("expected one for each"), "{error}");
    let error = HaloWindow::new(&data, &window(&[0..5, 0..3]), &[1, 0]).unwrap_err().to_string();
    assert!(error.contains("0..5"), "{error}");
}
