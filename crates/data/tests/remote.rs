//! Zarr at URLs against the folder of the same store: servers on loopback, in this process. `s3s-fs` is one of S3 by others.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;

use isobar_data::{DataConfig, Dataset, Error, Result, Window};
use serde_json::json;
use tempfile::NamedTempFile;

use crate::common::{
    s3,
    server::{Access, serve, serve_tls, serve_to},
};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/formats/zarr")
}

fn open(path: &str, field: &str) -> Result<Box<dyn Dataset>> {
    let config = json!({ "path": path, "format": "zarr", "fields": [field] });
    serde_json::from_value::<DataConfig>(config).map_err(|error| Error::Config(error.to_string()))?.open()
}

/// Asserts that windows are the folder's, to the last bit.
fn same(remote: &dyn Dataset, folder: &dyn Dataset, field: &str) {
    assert_eq!((remote.dims(), remote.times()), (folder.dims(), folder.times()));
    for frames in [0..5, 0..1, 2..4] {
        for points in [[0..6, 0..7], [1..3, 3..5], [5..6, 6..7]] {
            let window = Window { frames: frames.clone(), points: points.to_vec() };
            let read = |data: &dyn Dataset| data.read(&window, &[0], &[field]).unwrap();
            assert!(read(remote).equal(&read(folder)), "{field} {window:?}");
        }
    }
}

#[test]
fn windows_over_http_are_the_folders() {
    // The second server denies what is not there, as S3 does to callers that may not list.
    for absent in ["404 Not Found", "403 Forbidden"] {
        let (port, sent) = serve(fixtures(), absent);
        for store in ["xarray_v2.zarr", "xarray_v3.zarr"] {
            let remote = open(&format!("http://127.0.0.1:{port}/{store}"), "u").unwrap();
            let folder = open(fixtures().join(store).to_str().unwrap(), "u").unwrap();
            same(&*remote, &*folder, "u");
            sent.paths.lock().unwrap().clear();
            let window = Window { frames: 0..1, points: vec![0..1, 0..1] };
            let _ = remote.read(&window, &[0], &["u"]).unwrap();
            let paths = sent.paths.lock().unwrap().clone();
            assert_eq!(paths.len(), 1, "one chunk: {paths:?}");
        }
        assert!(sent.bytes.load(Ordering::SeqCst) > 0);
    }
}

#[test]
fn stores_that_are_not_there_are_errors() {
    let refused = |url: &str, field: &str, expected: &str| {
        let error = open(url, field).map(drop).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(url), "{error}");
    };
    let (port, _) = serve(fixtures(), "404 Not Found");
    refused(&format!("http://127.0.0.1:{port}/none.zarr"), "u", "neither zarr.json, .zmetadata");
    refused(&format!("http://127.0.0.1:{port}/v2.zarr"), "big", "no consolidated metadata");
    let (port, _) = serve(fixtures(), "403 Forbidden");
    refused(&format!("http://127.0.0.1:{port}/none.zarr"), "u", "or the server wants a login");
    refused("ftp://host/a.zarr", "u", "its scheme is `ftp`");
}

#[test]
fn a_stamp_is_of_the_metadata() {
    let (port, _) = serve(fixtures(), "404 Not Found");
    let stamp = |name: &str| isobar_data::remote_stamp(format!("http://127.0.0.1:{port}/{name}").as_ref());
    let size = fs::metadata(fixtures().join("xarray_v2.zarr/.zmetadata")).unwrap().len();
    assert!(stamp("xarray_v2.zarr").unwrap().starts_with(&format!(".zmetadata {size} 2026-11-24")));
    assert_eq!(stamp("none.zarr"), None);
}

/// Reads the store at `url` in a process of its own, with these environment variables; returns whether that passed, and its output.
fn read_as_a_process(url: &str, variables: &[(&str, &str)]) -> (bool, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let ours = |name: &str| ["AWS_", "GOOGLE_", "SSL_CERT_"].iter().any(|prefix| name.starts_with(prefix));
    for (name, _) in std::env::vars_os().filter(|(name, _)| ours(&name.to_string_lossy())) {
        command.env_remove(name);
    }
    command
        .args(["remote::as_a_reader", "--exact"])
        .env("ISOBAR_TEST_URL", url)
        .env("NO_PROXY", "127.0.0.1,localhost");
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    (output.status.success() && said.contains("1 passed"), said)
}

/// The part of the tests below that reads.
#[test]
fn as_a_reader() {
    let Ok(url) = std::env::var("ISOBAR_TEST_URL") else { return };
    // A server that lists serves stores without consolidated metadata too.
    let listed = std::env::var("ISOBAR_TEST_LISTS").is_ok();
    let others = [("v2.zarr", "big"), ("v3.zarr", "sharded"), ("v3.zarr", "deep/er/zstd")];
    for &(store, field) in [("xarray_v3.zarr", "u")].iter().chain(others.iter().filter(|_| listed)) {
        let folder = open(fixtures().join(store).to_str().unwrap(), field).unwrap();
        let remote = open(&format!("{url}/{store}"), field).unwrap_or_else(|error| panic!("{error}"));
        same(&*remote, &*folder, field);
    }
    let absent = open(&format!("{url}/none.zarr"), "u").map(drop).unwrap_err().to_string();
    let expected = std::env::var("ISOBAR_TEST_ABSENT").unwrap_or_else(|_| "neither zarr.json".to_owned());
    assert!(absent.contains(&expected), "{absent}");
}

/// Variables by which a client of S3 finds a server on loopback.
fn endpoint(port: u16) -> [(&'static str, String); 2] {
    [("AWS_ENDPOINT", format!("http://127.0.0.1:{port}")), ("AWS_ALLOW_HTTP", "true".to_owned())]
}

/// Reads `s3://zarr` from a server at `port`.
fn read_s3(port: u16, variables: &[(&str, &str)]) -> (bool, String) {
    let endpoint = endpoint(port);
    let own = endpoint.iter().map(|(name, value)| (*name, value.as_str()));
    read_as_a_process("s3://zarr", &own.chain(variables.iter().copied()).collect::<Vec<_>>())
}

/// Asserts that a wrong secret, another key and none at all are one error that says what to set, and that the secret is not in it.
fn refuses_other_keys(port: u16) {
    let own = |key, secret| [("AWS_ACCESS_KEY_ID", key), ("AWS_SECRET_ACCESS_KEY", secret)];
    for keys in [&own("key", "wrong")[..], &own("other", "a secret"), &[]] {
        let (passed, output) = read_s3(port, keys);
        assert!(!passed, "{output}");
        assert!(output.contains("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"), "{output}");
        assert!(output.contains("s3://zarr/xarray_v3.zarr") && !output.contains("a secret"), "{output}");
    }
}

const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "a secret")];

/// A server of S3 by others: reads, ranges, lists and signatures.
#[test]
fn windows_from_s3s_are_the_folders() {
    let server = s3::serve(fixtures().parent().unwrap(), "key", "a secret");
    let (passed, output) = read_s3(server.port, &[&KEYS[..], &[("ISOBAR_TEST_LISTS", "1")]].concat());
    assert!(passed, "{output}");
    refuses_other_keys(server.port);
}

/// This server checks signatures by code of its own, and counts what it sends.
#[test]
fn requests_to_s3_are_signed() {
    let root = fixtures().parent().unwrap().to_owned();
    let access = Access::Signed { key: "key", secret: "a secret" };
    let (port, sent) = serve_to(root, "404 Not Found", access);
    let (passed, output) = read_s3(port, &KEYS);
    assert!(passed && sent.paths.lock().unwrap().len() > 3, "{output}");
    sent.paths.lock().unwrap().clear();
    refuses_other_keys(port);
    assert_eq!(sent.paths.lock().unwrap().len(), 0);
}

/// This server does not check signatures, and denies what is absent. With keys and without any, which makes requests unsigned.
#[test]
fn windows_over_s3_are_the_folders() {
    let (port, sent) = serve(fixtures().parent().unwrap().to_owned(), "403 Forbidden");
    for keys in [&KEYS[..], &[]] {
        sent.paths.lock().unwrap().clear();
        let denied = [("ISOBAR_TEST_ABSENT", "set AWS_ACCESS_KEY_ID")];
        let (passed, output) = read_s3(port, &[keys, &denied].concat());
        assert!(passed, "{output}");
        assert!(sent.paths.lock().unwrap().iter().any(|path| path == "zarr/xarray_v3.zarr/zarr.json"));
    }
}

/// Google's storage, for anybody and for those with a token; without it, one error says what to set.
#[test]
fn windows_from_googles_storage_are_the_folders() {
    let root = fixtures().parent().unwrap().to_owned();
    let token = [("GOOGLE_BEARER_TOKEN", "a token")];
    for (access, own) in [(Access::All, &[][..]), (Access::Bearer("a token"), &token)] {
        let (port, sent) = serve_to(root.clone(), "404 Not Found", access);
        let base = format!("http://127.0.0.1:{port}");
        let read = |own: &[(&str, &str)]| {
            read_as_a_process("gs://zarr", &[&[("GOOGLE_BASE_URL", base.as_str())], own].concat())
        };
        let (passed, output) = read(own);
        assert!(passed && sent.paths.lock().unwrap().len() > 3, "{output}");
        for wrong in [&[][..], &[("GOOGLE_BEARER_TOKEN", "another")]].iter().filter(|_| !own.is_empty()) {
            let (passed, output) = read(wrong);
            assert!(!passed && output.contains("set GOOGLE_SERVICE_ACCOUNT"), "{output}");
            assert!(!output.contains("a token"), "{output}");
        }
    }
}

/// A server whose certificate the machine does not know is an error.
#[test]
fn windows_over_https_are_the_folders() {
    let (port, sent, certificate) = serve_tls(fixtures(), "404 Not Found");
    let known = NamedTempFile::new().unwrap();
    fs::write(known.path(), certificate).unwrap();
    let url = format!("https://localhost:{port}");
    let (passed, output) = read_as_a_process(&url, &[("SSL_CERT_FILE", known.path().to_str().unwrap())]);
    assert!(passed && sent.paths.lock().unwrap().len() > 3, "{output}");
    let (passed, output) = read_as_a_process(&url, &[]);
    assert!(!passed && output.contains("certificate") && output.contains(&url), "{output}");
}
