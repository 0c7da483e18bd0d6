//! Zarr at URLs against the folder of the same store: servers on loopback, in this process.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use isobar_data::{DataConfig, Dataset, Error, Result, Window};
use serde_json::json;

use crate::common::signature::Head;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/formats/zarr")
}

fn open(path: &str, field: &str) -> Result<Box<dyn Dataset>> {
    let config = json!({ "path": path, "format": "zarr", "fields": [field] });
    serde_json::from_value::<DataConfig>(config).map_err(|error| Error::Config(error.to_string()))?.open()
}

/// Request that a server got, and its answer.
#[derive(Debug, Default)]
struct Sent {
    /// Paths of GET requests that found an object.
    paths: Mutex<Vec<String>>,
    bytes: AtomicUsize,
}

/// Access key and its secret.
type Keys = (&'static str, &'static str);

/// Serves a folder over HTTP, with ranges; `absent` is the status of paths that are not there.
fn serve(root: PathBuf, absent: &'static str) -> (u16, Arc<Sent>) {
    serve_to(root, absent, None)
}

/// Like [`serve`], but answers only requests to S3 that are signed with the keys, if there are some.
fn serve_to(root: PathBuf, absent: &'static str, keys: Option<Keys>) -> (u16, Arc<Sent>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let sent = Arc::new(Sent::default());
    let counted = Arc::clone(&sent);
    std::thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            let (root, counted) = (root.clone(), Arc::clone(&counted));
            std::thread::spawn(move || answer(socket, &root, (absent, keys), &counted));
        }
    });
    (port, sent)
}

/// Answers the requests of a connection, until the client closes it.
fn answer(
    mut socket: TcpStream,
    root: &Path,
    (absent, keys): (&str, Option<Keys>),
    sent: &Sent,
) -> Option<()> {
    let mut lines = BufReader::new(socket.try_clone().ok()?).lines();
    loop {
        let first = lines.next()?.ok()?;
        let (method, target) = first.split_once(' ')?;
        let target = target.split(' ').next()?;
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let [method, path, query] = [method, path, query].map(str::to_owned);
        let mut head = Head { method, path, query, ..Head::default() };
        for line in lines.by_ref() {
            let line = line.ok()?;
            let Some((name, value)) = line.split_once(':') else { break };
            head.headers.insert(name.to_lowercase(), value.trim().to_owned());
        }
        if keys.is_some_and(|(key, secret)| !head.is_signed(key, secret)) {
            let body = "<Error><Code>SignatureDoesNotMatch</Code></Error>";
            let text = format!("HTTP/1.1 403 Forbidden\r\ncontent-length: {}\r\n\r\n", body.len());
            let body = if head.method == "HEAD" { "" } else { body };
            socket.write_all(format!("{text}{body}").as_bytes()).ok()?;
            continue;
        }
        let range = head.headers.get("range").and_then(|range| range.strip_prefix("bytes="));
        let (method, path) = (&*head.method, head.path.trim_start_matches('/'));
        let Ok(all) = fs::read(root.join(path)) else {
            socket.write_all(format!("HTTP/1.1 {absent}\r\ncontent-length: 0\r\n\r\n").as_bytes()).ok()?;
            continue;
        };
        let (head, body) = match range {
            None => ("200 OK".to_owned(), &all[..]),
            Some(range) => {
                let (first, last) = range.split_once('-')?;
                let (first, last) = match first {
                    "" => (all.len().saturating_sub(last.parse().ok()?), all.len() - 1),
                    first => (first.parse().ok()?, last.parse::<usize>().ok()?.min(all.len() - 1)),
                };
                let range = format!("content-range: bytes {first}-{last}/{}", all.len());
                (format!("206 Partial Content\r\n{range}"), &all[first..=last])
            }
        };
        let date = "last-modified: Tue, 24 Nov 2026 12:00:00 GMT";
        let head = format!("HTTP/1.1 {head}\r\n{date}\r\ncontent-length: {}\r\n\r\n", body.len());
        socket.write_all(head.as_bytes()).ok()?;
        if method == "GET" {
            sent.paths.lock().unwrap().push(path.to_owned());
            sent.bytes.fetch_add(body.len(), Ordering::SeqCst);
            socket.write_all(body).ok()?;
        }
    }
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

/// Starts the test `name` of this program in a process of its own, for its environment; returns whether it passed, and its output.
fn as_a_process(name: &str, port: u16, url: &str, variables: &[(&str, &str)]) -> (bool, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("AWS_")) {
        command.env_remove(name);
    }
    command.args([name, "--exact"]).env("ISOBAR_TEST_S3", url);
    command.env("AWS_ENDPOINT", format!("http://127.0.0.1:{port}")).env("AWS_ALLOW_HTTP", "true");
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

/// The part of the test below that reads: a process of its own, for its environment.
#[test]
fn as_a_caller_of_s3() {
    let Ok(url) = std::env::var("ISOBAR_TEST_S3") else { return };
    let folder = open(fixtures().join("xarray_v3.zarr").to_str().unwrap(), "u").unwrap();
    let remote = open(&format!("{url}/xarray_v3.zarr"), "u").unwrap_or_else(|error| panic!("{error}"));
    same(&*remote, &*folder, "u");
    let denied = open(&format!("{url}/none.zarr"), "u").map(drop).unwrap_err().to_string();
    let expected = std::env::var("ISOBAR_TEST_ABSENT").unwrap_or_else(|_| "set AWS_ACCESS_KEY_ID".to_owned());
    assert!(denied.contains(&expected), "{denied}");
}

/// The server checks signatures. A wrong secret, another key and none at all are one error that says what to set, and the secret is
/// not in it.
#[test]
fn requests_to_s3_are_signed() {
    let root = fixtures().parent().unwrap().to_owned();
    let (port, sent) = serve_to(root, "404 Not Found", Some(("key", "a secret")));
    let attempt = |keys: &[(&str, &str)]| {
        sent.paths.lock().unwrap().clear();
        let (passed, output) = as_a_process("remote::as_a_caller_of_s3", port, "s3://zarr", keys);
        (passed && output.contains("1 passed"), output, sent.paths.lock().unwrap().len())
    };
    let own = |key, secret| [("AWS_ACCESS_KEY_ID", key), ("AWS_SECRET_ACCESS_KEY", secret)];
    // The store that is not there is an error of another kind here, since this caller may know.
    let expect = [("ISOBAR_TEST_ABSENT", "neither zarr.json")];
    let (passed, output, read) = attempt(&[&own("key", "a secret")[..], &expect].concat());
    assert!(passed && read > 3, "{output}");
    for keys in [&own("key", "wrong")[..], &own("other", "a secret"), &[]] {
        let (passed, output, read) = attempt(keys);
        assert!(!passed && read == 0, "{output}");
        assert!(output.contains("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"), "{output}");
        assert!(output.contains("s3://zarr/xarray_v3.zarr") && !output.contains("a secret"), "{output}");
    }
}

/// This server does not check signatures. With keys and without any, which makes requests unsigned.
#[test]
fn windows_over_s3_are_the_folders() {
    let (port, sent) = serve(fixtures().parent().unwrap().to_owned(), "403 Forbidden");
    for keys in [&[("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")][..], &[]] {
        sent.paths.lock().unwrap().clear();
        let (passed, output) = as_a_process("remote::as_a_caller_of_s3", port, "s3://zarr", keys);
        assert!(passed && output.contains("1 passed"), "{output}");
        assert!(sent.paths.lock().unwrap().iter().any(|path| path == "zarr/xarray_v3.zarr/zarr.json"));
    }
}
