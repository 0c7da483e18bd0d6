//! Golden cases: files of tensors with a description in their header.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use safetensors::SafeTensors;
use serde::Deserialize;
use serde_json::Value;
use tch::Tensor;

use super::bytes::unpack;
use isobar_command::exit::{Because, Exit};

/// The header of a case: the JSON text under the key `case`.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Header {
    /// The operator's name.
    pub(crate) op: String,
    /// Its arguments.
    pub(crate) attrs: Value,
    /// Names of the tensors that go in.
    pub(crate) inputs: Vec<String>,
    /// Names of the weights.
    pub(crate) params: Vec<String>,
    /// Names of the results.
    pub(crate) outputs: Vec<String>,
    /// For each input, the dims along which it works sharded.
    pub(crate) shard_dims: BTreeMap<String, Vec<usize>>,
    /// Names stored as real tensors with a trailing dim of (re, im).
    pub(crate) complex: Vec<String>,
    /// Relative tolerance.
    pub(crate) rtol: f64,
    /// Absolute tolerance.
    pub(crate) atol: f64,
}

/// A golden case.
#[derive(Debug)]
pub(crate) struct Case {
    /// The file's name without its ending.
    pub(crate) name: String,
    /// Header of the case.
    pub(crate) header: Header,
    /// The header as it stands in the file.
    pub(crate) text: String,
    tensors: BTreeMap<String, Tensor>,
}

impl Header {
    /// Reads only the header of a case.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        Ok(parse(path, &read(path)?)?.1)
    }

    /// The argument `name` as a number from 0.
    pub(crate) fn number(&self, name: &str) -> Result<usize> {
        let value = self.attrs.get(name).and_then(Value::as_u64);
        value.map(|v| v as usize).with_context(|| format!("`attrs.{name}` is missing or no number"))
    }

    /// The argument `name`, in whatever form the operator takes it.
    pub(crate) fn attr<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<T> {
        let value = self.attrs.get(name).cloned().unwrap_or(Value::Null);
        serde_json::from_value(value).with_context(|| format!("`attrs.{name}` is missing or of another type"))
    }
}

impl Case {
    /// Reads a case with its tensors.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let bytes = read(path)?;
        let (text, header) = parse(path, &bytes)?;
        let tensors = unpack(&bytes, &header.complex).with_context(|| unreadable(path))?;
        Ok(Self { name: name(path), header, text, tensors })
    }

    /// The tensor `name`.
    pub(crate) fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.get(name).with_context(|| format!("the case {} has no tensor {name}", self.name))
    }

    /// The tensor `name`, where the case has one.
    pub(crate) fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// The name under which the tensor `name` is saved: that of another where several names stand for one tensor.
    pub(crate) fn saved<'a>(&'a self, name: &'a str) -> &'a str {
        match self.get(name) {
            Some(_) => name,
            None => self.header.attrs["tied"][name].as_str().unwrap_or(name),
        }
    }

    /// The names of all results: outputs, and gradients of inputs and weights. What a header or a file names beyond what
    /// an operator gives was asked for too.
    pub(crate) fn results(&self) -> BTreeSet<&str> {
        let is_output = |name: &str| {
            name == "output" || name.starts_with("output.") || self.header.outputs.iter().any(|o| o == name)
        };
        let is_result = |name: &&str| name.strip_prefix("grad.").map_or(is_output(name), |of| !is_output(of));
        let named = self.tensors.keys().map(String::as_str).filter(is_result);
        named.chain(self.header.outputs.iter().map(String::as_str)).collect()
    }

    /// The weights by name.
    pub(crate) fn params(&self) -> Result<BTreeMap<String, Tensor>> {
        let params = self.header.params.iter();
        params.map(|name| Ok((name.clone(), self.tensor(name)?.shallow_clone()))).collect()
    }
}

/// The files of cases that `paths` name: files themselves, and what lies in folders, by name.
pub(crate) fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let entries = fs::read_dir(path).with_context(|| unreadable(path))?;
        let mut inside = Vec::new();
        for entry in entries {
            let file = entry.with_context(|| unreadable(path))?.path();
            if file.extension().is_some_and(|ending| ending == "safetensors") {
                inside.push(file);
            }
        }
        if inside.is_empty() {
            bail!(Exit::Data.because(format!("there are no .safetensors files in {}", path.display())));
        }
        inside.sort();
        files.append(&mut inside);
    }
    Ok(files)
}

/// The name of the case in a file.
pub(crate) fn name(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// Bytes of the longest case. Golden cases are small, and are kept in memory.
const LONGEST: u64 = 1 << 30;

fn read(path: &Path) -> Result<Vec<u8>> {
    isobar_files::read(path, LONGEST)
        .map_err(|error| Exit::Data.because(format!("{}: {error}", unreadable(path))).into())
}

fn parse(path: &Path, bytes: &[u8]) -> Result<(String, Header)> {
    let wrong = |what: String| Exit::Data.because(format!("{}: {what}", unreadable(path)));
    let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|error| wrong(error.to_string()))?;
    let text = metadata.metadata().as_ref().and_then(|keys| keys.get("case")).cloned();
    let text = with_words(&text.ok_or_else(|| wrong("its header has no key `case`".to_owned()))?);
    let header: Header = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    ensure!(header.rtol >= 0.0 && header.atol >= 0.0, wrong("expected tolerances of 0 or more".to_owned()));
    Ok((text, header))
}

/// Replaces `Infinity`, `-Infinity` and `NaN`, which Python writes and JSON lacks, by the words that operators read.
fn with_words(text: &str) -> String {
    const WORDS: [(&str, &str); 3] = [("-Infinity", "\"-inf\""), ("Infinity", "\"inf\""), ("NaN", "\"nan\"")];
    let (mut result, mut rest, mut in_string) = (String::with_capacity(text.len()), text, false);
    while let Some(next) = rest.chars().next() {
        let length = match WORDS.iter().find(|(word, _)| !in_string && rest.starts_with(word)) {
            Some((word, name)) => {
                result.push_str(name);
                word.len()
            }
            None => {
                let is_escape = in_string && next == '\\';
                let length = rest.chars().take(if is_escape { 2 } else { 1 }).map(char::len_utf8).sum();
                in_string ^= next == '"';
                result.push_str(&rest[..length]);
                length
            }
        };
        rest = &rest[length..];
    }
    result
}

fn unreadable(path: &Path) -> String {
    format!("cannot read the case {}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_python_that_json_lacks_become_words() {
        let text = r#"{"a": -Infinity, "NaN": ["x\"Infinity", Infinity, NaN], "é": "\\"}"#;
        let read: Value = serde_json::from_str(&with_words(text)).unwrap();
        let expected = serde_json::json!({"a": "-inf", "NaN": ["x\"Infinity", "inf", "nan"], "é": "\\"});
        assert_eq!(read, expected);
    }

    /// Also those whose operator Isobar lacks, which are answered as unsupported.
    #[test]
    fn every_golden_case_can_be_read() {
        let golden = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden"));
        for path in files(&[golden]).unwrap() {
            let case = Case::read(&path).unwrap_or_else(|error| panic!("{}: {error:#}", path.display()));
            let header = &case.header;
            for name in header.inputs.iter().chain(&header.params).chain(&header.outputs) {
                assert!(case.get(case.saved(name)).is_some(), "{}: no {name}", case.name);
            }
        }
    }
}
