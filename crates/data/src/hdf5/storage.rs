//! Checks of how an HDF5 file stores its datasets: in the file itself, and packed by filters with bounded output.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use hdf5_metno::dataset::Layout;
use hdf5_metno::filters::Filter;
use hdf5_metno::plist::DatasetCreate;
use hdf5_metno::{Dataset, Group, IndexType, IterationOrder, LinkType};

use crate::{Error, Result};

/// Largest size of a chunk that is read, in bytes.
pub(crate) const LARGEST_CHUNK: u64 = 1 << 30;

/// Largest number of bytes that one byte of deflate expands to.
pub(crate) const DEFLATED: u64 = 1032;

/// Largest number of links in a file.
const MOST_LINKS: usize = 1 << 17;

/// Rejects a file with links to other files, since opening their target would open that file. Without such
/// links, soft links stay within the file.
pub(crate) fn check_links(path: &Path, root: &Group) -> Result<()> {
    let mut left = MOST_LINKS;
    let mut seen = HashSet::new();
    let mut groups = vec![(String::new(), root.clone())];
    while let Some((name, group)) = groups.pop() {
        let failed = |error| Error::hdf5(path, format!("list the links of `/{name}`"), error);
        let mut hard = Vec::new();
        for (link, info) in group.links(IndexType::Name, IterationOrder::Native).map_err(failed)? {
            let full = if name.is_empty() { link.clone() } else { format!("{name}/{link}") };
            if info.link_type == LinkType::External {
                let expected =
                    "a dataset or group of the file itself; copy what it leads to into the file (h5copy)";
                return Err(misfit(path, full, "a link to another file", expected));
            }
            // A name with a slash would be looked up as a path.
            if link.is_empty() || link == "." || link.contains('/') {
                return Err(misfit(path, full, "the name of a link", "a name without slashes"));
            }
            left = left.checked_sub(1).ok_or_else(|| {
                misfit(path, "/".to_owned(), format!("of more than {MOST_LINKS} links"), "fewer")
            })?;
            if info.link_type == LinkType::Hard {
                hard.push((link, full));
            }
        }
        for (link, full) in hard {
            let info = group.loc_info_by_name(&link).map_err(failed)?;
            if info.loc_type == hdf5_metno::LocationType::Group && seen.insert(format!("{:?}", info.token)) {
                groups.push((full, group.group(&link).map_err(failed)?));
            }
        }
    }
    Ok(())
}

/// Rejects a dataset whose values are in other files, or compressed by filters with unbounded output. Runs
/// before the shape is read, since HDF5 may open the sources of a virtual dataset for it.
pub(crate) fn check_place(path: &Path, dataset: &Dataset, name: &str) -> Result<()> {
    let failed = |error| Error::hdf5(path, format!("read the properties of dataset `{name}`"), error);
    let properties = dataset.dcpl().map_err(failed)?;
    let inside = "values in the file itself; copy the dataset with h5repack";
    let layout = properties.get_layout().map_err(failed)?;
    if layout == Layout::Virtual {
        let found = "a virtual dataset, whose values lie in others";
        return Err(misfit(path, name.to_owned(), found, inside));
    }
    if let Some(other) = properties.get_external().map_err(failed)?.first() {
        let found = format!("stored in another file, {:?}", other.name);
        return Err(misfit(path, name.to_owned(), found, inside));
    }
    if layout == Layout::Compact {
        // The library does not compare these sizes.
        let bytes = dataset.dtype().map_err(failed)?.size().saturating_mul(dataset.size()) as u64;
        let size = dataset.storage_size();
        if size < bytes {
            let found = format!("of {bytes} bytes by its shape, but stored in {size}");
            return Err(misfit(path, name.to_owned(), found, "storage for all values"));
        }
    }
    if layout != Layout::Chunked {
        return Ok(());
    }
    let filters = filters(&properties).map_err(failed)?;
    let mut packed = false;
    for filter in &filters {
        let bounded = match filter {
            Filter::Shuffle => !packed,
            Filter::Deflate(_) => !std::mem::replace(&mut packed, true),
            Filter::Fletcher32 => true,
            _ => false,
        };
        if !bounded {
            let names: Vec<String> = filters.iter().map(name_of).collect();
            let found = format!("packed by the filters {}", names.join(", "));
            let expected = "shuffle, gzip and Fletcher32 in this order; repack the file (h5repack -f GZIP=6)";
            return Err(misfit(path, name.to_owned(), found, expected));
        }
    }
    Ok(())
}

/// Returns the name of a filter, for errors; of registered ones by their number.
fn name_of(filter: &Filter) -> String {
    const REGISTERED: [(i32, &str); 9] = [
        (307, "bzip2"),
        (32000, "lzf"),
        (32001, "blosc"),
        (32004, "lz4"),
        (32008, "bitshuffle"),
        (32013, "zfp"),
        (32015, "zstd"),
        (32024, "sz3"),
        (32026, "blosc2"),
    ];
    match filter {
        Filter::User(id, _) => match REGISTERED.iter().find(|(known, _)| known == id) {
            Some((_, name)) => (*name).to_owned(),
            None => format!("number {id}"),
        },
        other => format!("{other:?}").to_lowercase(),
    }
}

/// Returns the filters of the chunks of a dataset.
pub(super) fn filters(properties: &DatasetCreate) -> hdf5_metno::Result<Vec<Filter>> {
    // The crate reads 32 parameters of a filter and panics if the file has more.
    catch_unwind(AssertUnwindSafe(|| properties.get_filters()))
        .unwrap_or_else(|_| Err("a filter has too many parameters".into()))
}

/// Returns the error of a file with another layout.
pub(crate) fn misfit(
    path: &Path,
    name: String,
    found: impl Into<String>,
    expected: impl Into<String>,
) -> Error {
    Error::Layout { path: path.to_owned(), name, found: found.into(), expected: expected.into() }
}
