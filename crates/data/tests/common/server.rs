//! A server of files on loopback, in this process, over HTTP and TLS.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::signature::Head;

/// Callers that a server answers.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Access {
    All,
    /// Those whose requests are signed for S3.
    Signed {
        key: &'static str,
        secret: &'static str,
    },
    /// Those that send a token.
    Bearer(&'static str),
}

impl Access {
    fn permits(self, head: &Head) -> bool {
        match self {
            Self::All => true,
            Self::Signed { key, secret } => head.is_signed(key, secret),
            Self::Bearer(token) => {
                head.headers.get("authorization").is_some_and(|it| *it == format!("Bearer {token}"))
            }
        }
    }

    /// Status and body for callers that are not permitted.
    fn refusal(self) -> (&'static str, &'static str) {
        match self {
            Self::Signed { .. } => ("403 Forbidden", "<Error><Code>SignatureDoesNotMatch</Code></Error>"),
            Self::All | Self::Bearer(_) => ("401 Unauthorized", "<Error><Code>AccessDenied</Code></Error>"),
        }
    }
}

/// Objects that a server has sent.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    /// Paths of GET requests that found an object.
    pub(crate) paths: Mutex<Vec<String>>,
    pub(crate) bytes: AtomicUsize,
}

/// Serves a folder over HTTP, with ranges; `absent` is the status of paths that are not there. Returns its port.
pub(crate) fn serve(root: PathBuf, absent: &'static str) -> (u16, Arc<Sent>) {
    serve_to(root, absent, Access::All)
}

/// Serves a folder like [`serve`], to some callers.
pub(crate) fn serve_to(root: PathBuf, absent: &'static str, access: Access) -> (u16, Arc<Sent>) {
    listen(root, absent, access, |socket| socket)
}

/// Serves a folder like [`serve`], over TLS; returns the certificate of `localhost`, too.
pub(crate) fn serve_tls(root: PathBuf, absent: &'static str) -> (u16, Arc<Sent>, String) {
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivatePkcs8KeyDer::from(own.signing_key.serialize_der());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_no_client_auth().with_single_cert(vec![own.cert.der().clone()], key.into());
    let config = Arc::new(config.unwrap());
    let (port, sent) = listen(root, absent, Access::All, move |socket| {
        StreamOwned::new(ServerConnection::new(Arc::clone(&config)).unwrap(), socket)
    });
    (port, sent, own.cert.pem())
}

fn listen<S: Read + Write>(
    root: PathBuf,
    absent: &'static str,
    access: Access,
    wrap: impl Fn(TcpStream) -> S + Send + Sync + 'static,
) -> (u16, Arc<Sent>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let sent = Arc::new(Sent::default());
    let (counted, wrap) = (Arc::clone(&sent), Arc::new(wrap));
    std::thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            let (root, counted, wrap) = (root.clone(), Arc::clone(&counted), Arc::clone(&wrap));
            std::thread::spawn(move || answer(wrap(socket), &root, absent, access, &counted));
        }
    });
    (port, sent)
}

/// Reads the next line, without its end.
fn line(stream: &mut impl BufRead) -> Option<String> {
    let mut text = String::new();
    (stream.read_line(&mut text).ok()? > 0).then(|| text.trim_end().to_owned())
}

/// Answers the requests of a connection, until the client closes it.
fn answer(stream: impl Read + Write, root: &Path, absent: &str, access: Access, sent: &Sent) -> Option<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let first = line(&mut stream)?;
        let (method, target) = first.split_once(' ')?;
        let target = target.split(' ').next()?;
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let [method, path, query] = [method, path, query].map(str::to_owned);
        let mut head = Head { method, path, query, ..Head::default() };
        while let Some((name, value)) = line(&mut stream)?.split_once(':') {
            head.headers.insert(name.to_lowercase(), value.trim().to_owned());
        }
        let socket = stream.get_mut();
        if !access.permits(&head) {
            let (status, body) = access.refusal();
            let text = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len());
            let body = if head.method == "HEAD" { "" } else { body };
            socket.write_all(format!("{text}{body}").as_bytes()).ok()?;
            continue;
        }
        let range = head.headers.get("range").and_then(|range| range.strip_prefix("bytes="));
        let (method, path) =
            (&*head.method, object_store::path::Path::from_url_path(&head.path).ok()?.to_string());
        let Ok(all) = fs::read(root.join(&path)) else {
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
        let about = "last-modified: Tue, 24 Nov 2026 12:00:00 GMT\r\netag: \"1\"";
        let head = format!("HTTP/1.1 {head}\r\n{about}\r\ncontent-length: {}\r\n\r\n", body.len());
        socket.write_all(head.as_bytes()).ok()?;
        if method == "GET" {
            sent.paths.lock().unwrap().push(path);
            sent.bytes.fetch_add(body.len(), Ordering::SeqCst);
            socket.write_all(body).ok()?;
        }
        socket.flush().ok()?;
    }
}
