//! Dimension scales, by which netCDF and xarray know the dims of a dataset.
//!
//! HDF5's high-level library, which has functions for them, is not linked. They are attributes: `CLASS` and `NAME` of the scale,
//! and `DIMENSION_LIST` of a dataset, with a reference to the scale of each dim.
#![expect(unsafe_code, reason = "calls the HDF5 library; each block says why it is sound")]

use std::ffi::{CString, c_char, c_int, c_void};

use hdf5_metno::types::VarLenArray;
use hdf5_metno::{Dataset, Error, Group, Location, ObjectReference1, Result, sync::sync};

unsafe extern "C" {
    static H5T_C_S1_g: i64;
    fn H5Tcopy(kind: i64) -> i64;
    fn H5Tset_size(kind: i64, size: usize) -> c_int;
    fn H5Tclose(kind: i64) -> c_int;
    fn H5Screate(class: c_int) -> i64;
    fn H5Sclose(space: i64) -> c_int;
    fn H5Acreate2(location: i64, name: *const c_char, kind: i64, space: i64, create: i64, access: i64)
    -> i64;
    fn H5Awrite(attribute: i64, kind: i64, values: *const c_void) -> c_int;
    fn H5Aclose(attribute: i64) -> c_int;
}

/// Makes a dataset the scale of a dim.
pub(crate) fn make_scale(dataset: &Dataset, dim: &str) -> Result<()> {
    terminated(dataset, "CLASS", "DIMENSION_SCALE")?;
    terminated(dataset, "NAME", dim)
}

/// Names the scales of a dataset's dims, datasets at the root.
pub(crate) fn attach_scales<'a>(
    root: &Group,
    dataset: &Dataset,
    dims: impl Iterator<Item = &'a str>,
) -> Result<()> {
    let reference = |dim: &str| -> Result<VarLenArray<ObjectReference1>> {
        Ok(VarLenArray::from_slice(&[root.reference::<ObjectReference1>(dim)?]))
    };
    let lists = dims.map(reference).collect::<Result<Vec<_>>>()?;
    let attribute =
        dataset.new_attr::<VarLenArray<ObjectReference1>>().shape(lists.len()).create("DIMENSION_LIST")?;
    attribute.write_raw(&lists)
}

/// Writes a text of fixed length that ends with a zero byte, the only one in which the library looks for scales.
fn terminated(location: &Location, name: &str, value: &str) -> Result<()> {
    let failed = || Error::from(format!("could not write the attribute `{name}`"));
    let (name_c, value_c) =
        (CString::new(name).map_err(|_| failed())?, CString::new(value).map_err(|_| failed())?);
    // SAFETY: `location` is open during the call, texts end with a zero byte and live as long, the type has the value's size with
    // that byte, each handle is closed once, and the lock of the library is held. 0 stands for the default property lists and
    // for the class of scalars. The static is set when the library is initialised, as it is once something is open.
    let written = sync(|| unsafe {
        let kind = H5Tcopy(H5T_C_S1_g);
        let sized = H5Tset_size(kind, value_c.as_bytes_with_nul().len());
        let space = H5Screate(0);
        let attribute = H5Acreate2(location.id(), name_c.as_ptr(), kind, space, 0, 0);
        let written = H5Awrite(attribute, kind, value_c.as_ptr().cast());
        let closed = [H5Aclose(attribute), H5Sclose(space), H5Tclose(kind)];
        sized >= 0 && written >= 0 && closed.iter().all(|status| *status >= 0)
    });
    if written { Ok(()) } else { Err(failed()) }
}
