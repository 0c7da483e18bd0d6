//! Attributes of groups and datasets, checked.

use std::path::Path;

use hdf5_metno::types::{
    FixedAscii, FixedUnicode, Reference, TypeDescriptor, VarLenArray, VarLenAscii, VarLenUnicode,
};
use hdf5_metno::{
    Attribute, Dataset, Group, H5Type, Location, MinorErrorCode, ObjectReference1, ReferencedObject,
};

use crate::attributes::LONGEST;
use crate::hdf5::layout::{Node, shape_text};
use crate::hdf5::storage::misfit;
use crate::{Error, Result};

/// The attributes of one group or dataset. In errors they are called `owner@attribute`, those of the root by their name.
pub(crate) struct Attributes<'a> {
    path: &'a Path,
    location: &'a Location,
    owner: String,
}

impl<'a> Attributes<'a> {
    pub(crate) fn of_group(node: &'a Node<'_>) -> Self {
        Self { path: node.path, location: &node.group, owner: node.name().to_owned() }
    }

    /// Those of a dataset of a group.
    pub(crate) fn of_dataset(node: &'a Node<'_>, dataset: &'a Dataset, name: &str) -> Self {
        Self { path: node.path, location: dataset, owner: node.full(name) }
    }

    /// One finite number.
    pub(crate) fn number(&self, name: &str) -> Result<f64> {
        let (attribute, kind) = self.find(name)?;
        let values = match kind {
            TypeDescriptor::Float(_) => self.values::<f64>(&attribute, name)?,
            TypeDescriptor::Integer(_) | TypeDescriptor::Unsigned(_) => {
                self.values::<i64>(&attribute, name)?.into_iter().map(|value| value as f64).collect()
            }
            other => return Err(self.misfit(name, format!("of dtype {other}"), "a number")),
        };
        match values.as_slice() {
            [value] if value.is_finite() => Ok(*value),
            [value] => Err(self.misfit(name, value.to_string(), "a finite number")),
            _ => Err(self.misfit(name, format!("{} numbers", values.len()), "one number")),
        }
    }

    /// Numbers, of any count.
    pub(crate) fn numbers(&self, name: &str) -> Result<Vec<f64>> {
        let (attribute, kind) = self.find(name)?;
        match kind {
            TypeDescriptor::Float(_) => self.values::<f64>(&attribute, name),
            TypeDescriptor::Integer(_) | TypeDescriptor::Unsigned(_) => {
                Ok(self.values::<i64>(&attribute, name)?.into_iter().map(|value| value as f64).collect())
            }
            other => Err(self.misfit(name, format!("of dtype {other}"), "numbers")),
        }
    }

    /// Names of the datasets that are the scales of each dim of a dataset, without their groups; empty where one has none.
    pub(crate) fn dimension_scales(&self, root: &Group) -> Result<Vec<String>> {
        let (attribute, kind) = self.find(DIMENSION_LIST)?;
        let object = Box::new(TypeDescriptor::Reference(Reference::Object));
        if kind != TypeDescriptor::VarLenArray(object) {
            return Err(self.misfit(DIMENSION_LIST, format!("of dtype {kind}"), "lists of references"));
        }
        let lists = self.values::<VarLenArray<ObjectReference1>>(&attribute, DIMENSION_LIST)?;
        let name = |list: &VarLenArray<ObjectReference1>| {
            let scale = list.first().map(|reference| root.dereference(reference));
            let Some(Ok(ReferencedObject::Dataset(dataset))) = scale else { return String::new() };
            dataset.name().rsplit('/').next().unwrap_or_default().to_owned()
        };
        Ok(lists.iter().map(name).collect())
    }

    /// One whole number in a range.
    pub(crate) fn count(&self, name: &str, smallest: usize, largest: usize) -> Result<usize> {
        let value = self.number(name)?;
        if value.fract() != 0.0 || value < smallest as f64 || value > largest as f64 {
            let expected = if largest == usize::MAX {
                format!("a whole number from {smallest} on")
            } else {
                format!("a whole number from {smallest} to {largest}")
            };
            return Err(self.misfit(name, value.to_string(), expected));
        }
        Ok(value as usize)
    }

    pub(crate) fn flag(&self, name: &str) -> Result<bool> {
        match self.flags(name)?.as_slice() {
            [flag] => Ok(*flag),
            flags => Err(self.misfit(name, format!("{} booleans", flags.len()), "one boolean")),
        }
    }

    pub(crate) fn flags(&self, name: &str) -> Result<Vec<bool>> {
        let (attribute, kind) = self.find(name)?;
        if !matches!(kind, TypeDescriptor::Boolean | TypeDescriptor::Integer(_) | TypeDescriptor::Unsigned(_))
        {
            return Err(self.misfit(name, format!("of dtype {kind}"), "booleans"));
        }
        // As numbers: a damaged file may hold others than 0 and 1.
        let values = self.values::<i8>(&attribute, name)?;
        let flag = |value: i8| match value {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.misfit(name, other.to_string(), "FALSE (0) or TRUE (1)")),
        };
        values.into_iter().map(flag).collect()
    }

    pub(crate) fn text(&self, name: &str) -> Result<String> {
        let mut texts = self.texts(name)?;
        match (texts.pop(), texts.len()) {
            (Some(text), 0) => Ok(text),
            (last, others) => {
                let found = format!("{} strings", others + usize::from(last.is_some()));
                Err(self.misfit(name, found, "one string"))
            }
        }
    }

    /// Strings of variable or fixed length.
    pub(crate) fn texts(&self, name: &str) -> Result<Vec<String>> {
        let (attribute, kind) = self.find(name)?;
        if attribute.size() == 0 {
            // An empty list has no strings to tell its kind by: numpy makes it one of numbers.
            return Ok(Vec::new());
        }
        let bytes: Vec<Vec<u8>> = match kind {
            TypeDescriptor::VarLenUnicode => {
                texts(self.values::<VarLenUnicode>(&attribute, name)?, |text| text.as_bytes())
            }
            TypeDescriptor::VarLenAscii => {
                texts(self.values::<VarLenAscii>(&attribute, name)?, |text| text.as_bytes())
            }
            TypeDescriptor::FixedUnicode(length) if length <= LONGEST_TEXT => {
                let values = self.values::<FixedUnicode<LONGEST_TEXT>>(&attribute, name)?;
                texts(values, |text| text.as_bytes())
            }
            TypeDescriptor::FixedAscii(length) if length <= LONGEST_TEXT => {
                let values = self.values::<FixedAscii<LONGEST_TEXT>>(&attribute, name)?;
                texts(values, |text| text.as_bytes())
            }
            // As netCDF writes a `history`.
            TypeDescriptor::FixedUnicode(length) if length <= LONGEST && attribute.size() == 1 => {
                let values = self.values::<FixedUnicode<LONGEST>>(&attribute, name)?;
                texts(values, |text| text.as_bytes())
            }
            TypeDescriptor::FixedAscii(length) if length <= LONGEST && attribute.size() == 1 => {
                let values = self.values::<FixedAscii<LONGEST>>(&attribute, name)?;
                texts(values, |text| text.as_bytes())
            }
            other => return Err(self.misfit(name, format!("of dtype {other}"), "strings")),
        };
        bytes
            .into_iter()
            .map(|text| {
                String::from_utf8(text)
                    .map_err(|error| self.misfit(name, format!("not text: {error}"), "UTF-8 strings"))
            })
            .collect()
    }

    pub(crate) fn misfit(&self, name: &str, found: impl Into<String>, expected: impl Into<String>) -> Error {
        misfit(self.path, self.full(name), found, expected)
    }

    fn full(&self, name: &str) -> String {
        if self.owner.is_empty() { name.to_owned() } else { format!("{}@{name}", self.owner) }
    }

    fn find(&self, name: &str) -> Result<(Attribute, TypeDescriptor)> {
        // Opened rather than looked for in a list: the crate's listing takes each name's encoding from the file as it stands,
        // and a damaged one is no value of its enum.
        let attribute = self.location.attr(name).map_err(|error| match is_missing(&error) {
            true => Error::MissingAttribute { path: self.path.to_owned(), attribute: self.full(name) },
            false => self.unreadable(name, error),
        })?;
        let kind = attribute
            .dtype()
            .and_then(|kind| kind.to_descriptor())
            .map_err(|error| self.unreadable(name, error))?;
        // Checked before memory is allocated: each string may refer to the same text, as long as the file
        // itself.
        let values = attribute.shape().iter().try_fold(1_usize, |values, &extent| values.checked_mul(extent));
        if values.is_none_or(|values| values > MOST_VALUES) {
            let expected = format!("at most {MOST_VALUES} values");
            return Err(self.misfit(name, shape_text(&attribute.shape()), expected));
        }
        Ok((attribute, kind))
    }

    fn values<T: H5Type>(&self, attribute: &Attribute, name: &str) -> Result<Vec<T>> {
        attribute.read_raw::<T>().map_err(|error| self.unreadable(name, error))
    }

    fn unreadable(&self, name: &str, error: hdf5_metno::Error) -> Error {
        Error::hdf5(self.path, format!("read attribute `{}`", self.full(name)), error)
    }
}

/// Returns whether the error says that an attribute does not exist; a failed search has another cause.
fn is_missing(error: &hdf5_metno::Error) -> bool {
    error.stack().is_some_and(|stack| stack.minor_codes().next_back() == Some(MinorErrorCode::NotFound))
}

/// HDF5's attribute of a dataset whose dims have scales.
const DIMENSION_LIST: &str = "DIMENSION_LIST";

/// Largest number of values of an attribute.
const MOST_VALUES: usize = 1024;

/// Bytes of the longest string of fixed length that is read in a list; a single one may have [`LONGEST`].
const LONGEST_TEXT: usize = 256;

fn texts<T>(values: Vec<T>, bytes: impl Fn(&T) -> &[u8]) -> Vec<Vec<u8>> {
    values.iter().map(|value| bytes(value).to_vec()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More attributes than an object's header holds have an index of their own, with sums of its bytes.
    #[test]
    fn a_damaged_index_of_attributes_is_not_taken_for_one_without_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("attributes.h5");
        let options = hdf5_metno::File::with_options().with_fapl(|access| access.libver_latest()).clone();
        let file = options.create(&path).unwrap();
        for at in 0..20 {
            let attribute = file.new_attr::<f64>().create(format!("a{at}").as_str()).unwrap();
            attribute.write_scalar(&f64::from(at)).unwrap();
        }
        drop(file);
        let number = |name: &str| {
            let node = Node::open_directly(&path).unwrap();
            Attributes::of_group(&node).number(name)
        };
        assert_eq!(number("a7").unwrap(), 7.0);
        assert!(matches!(number("a20"), Err(Error::MissingAttribute { .. })));

        let mut bytes = std::fs::read(&path).unwrap();
        let leaf = bytes.windows(4).position(|window| window == b"BTLF").unwrap();
        bytes[leaf + 8] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let error = number("a7").unwrap_err();
        assert!(!matches!(error, Error::MissingAttribute { .. }), "{error}");
        assert!(error.to_string().contains("read attribute `a7`"), "{error}");
    }
}
