//! Stores at URLs: `s3://bucket/prefix`, `gs://bucket/prefix`, `http://` and `https://host/path`.

use std::error::Error as _;
use std::io::{Error, ErrorKind, Result};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{
    ClientOptions, Error as Failure, GetOptions, GetRange, ObjectStore, ObjectStoreExt, RetryConfig,
};
use tokio::runtime::{Builder, Runtime};
use url::Url;

use super::store::{Span, Store, short};

/// Number of times that a request is sent again.
const RETRIES: usize = 3;
/// Time after which a request is not sent again.
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest time of one read, with all retries.
const DEADLINE: Duration = Duration::from_secs(120);
/// Message of S3 and Google's storage for a bucket that does not exist.
const NO_BUCKET: &str = "NoSuchBucket";
/// Settings without credentials: with no others, requests are unsigned.
const ADDRESS: [&str; 7] = [
    "aws_endpoint",
    "aws_endpoint_url",
    "aws_endpoint_url_s3",
    "aws_allow_http",
    "aws_timeout",
    "google_base_url",
    "google_timeout",
];
/// Longest text of an error, in characters.
const LONGEST_CAUSE: usize = 600;
/// Number of chunks to read at a time.
const TOGETHER: usize = 8;

/// Kind of a store: errors say other ways to mend them for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    S3,
    Google,
    Http,
}

/// A store at a URL.
#[derive(Debug)]
pub(super) struct Remote {
    kind: Kind,
    /// Bucket or host.
    host: String,
    prefix: Path,
    objects: Box<dyn ObjectStore>,
    runtime: Arc<Runtime>,
    deadline: Duration,
}

impl Remote {
    /// Opens the store of a URL, without a request. `variables` are the environment's: `AWS_…` and `GOOGLE_…` name credentials and
    /// endpoints. With no other variable of these than [`ADDRESS`], requests are unsigned.
    ///
    /// # Errors
    /// No URL, one with a login or a query, another scheme, variables that the client refuses.
    pub(super) fn open(url: &str, variables: impl Iterator<Item = (String, String)>) -> Result<Self> {
        let wrong = |found: String| Error::new(ErrorKind::InvalidInput, found);
        let parsed = Url::parse(url).map_err(|error| wrong(format!("it is no URL: {error}")))?;
        let host = parsed.host_str().filter(|host| !host.is_empty());
        let host = host.ok_or_else(|| wrong("it has no bucket or host".to_owned()))?.to_owned();
        if !parsed.username().is_empty() || parsed.password().is_some() {
            return Err(wrong("it has a login, expected credentials in environment variables".to_owned()));
        }
        if parsed.query().is_some() || parsed.fragment().is_some() {
            return Err(wrong("it has a query, expected a path only".to_owned()));
        }
        let own = |prefix: &'static str| {
            variables.filter_map(move |(name, value)| {
                let name = name.to_ascii_lowercase();
                name.starts_with(prefix).then_some((name, value))
            })
        };
        // An error if the process has one already, which then serves.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let refused = |error: Failure| wrong(format!("its settings are refused: {}", causes(&error)));
        let prefix = || {
            let path = Path::from_url_path(parsed.path());
            path.map_err(|error| wrong(format!("its path is refused: {error}")))
        };
        let retry =
            RetryConfig { max_retries: RETRIES, retry_timeout: RETRY_TIMEOUT, ..RetryConfig::default() };
        let (kind, prefix, objects): (_, _, Box<dyn ObjectStore>) = match parsed.scheme() {
            "s3" => {
                let (mut builder, mut signs) = (AmazonS3Builder::new(), false);
                for (name, value) in own("aws_") {
                    if let Ok(key) = name.parse::<AmazonS3ConfigKey>() {
                        signs |= !ADDRESS.contains(&name.as_str());
                        builder = builder.with_config(key, value);
                    }
                }
                if !signs {
                    builder = builder.with_skip_signature(true);
                }
                let built = builder.with_bucket_name(&host).with_retry(retry).build();
                (Kind::S3, prefix()?, Box::new(built.map_err(refused)?))
            }
            "gs" => {
                let (mut builder, mut signs) = (GoogleCloudStorageBuilder::new(), false);
                for (name, value) in own("google_") {
                    if let Ok(key) = name.parse::<GoogleConfigKey>() {
                        signs |= !ADDRESS.contains(&name.as_str());
                        builder = builder.with_config(key, value);
                    }
                }
                if !signs {
                    builder = builder.with_skip_signature(true);
                }
                let built = builder.with_bucket_name(&host).with_retry(retry).build();
                (Kind::Google, prefix()?, Box::new(built.map_err(refused)?))
            }
            "http" | "https" => {
                let options = ClientOptions::new().with_allow_http(true);
                // Keys are joined to it by slashes.
                let url = url.trim_end_matches('/');
                let builder = HttpBuilder::new().with_url(url).with_client_options(options).with_retry(retry);
                (Kind::Http, Path::default(), Box::new(builder.build().map_err(refused)?))
            }
            other => {
                return Err(wrong(format!("its scheme is `{other}`, expected s3, gs, http or https")));
            }
        };
        Ok(Self { kind, host, prefix, objects, runtime: runtime()?, deadline: DEADLINE })
    }

    /// Describes the root metadata; `None` if the store has none, or its server tells neither ETag nor time.
    pub(super) fn stamp(&self) -> Option<String> {
        let about = |key: &str| {
            let path = self.path(key).ok()?;
            self.wait(self.objects.head(&path)).ok().flatten()
        };
        let (key, about) = ["zarr.json", ".zmetadata", ".zarray", ".zgroup"]
            .into_iter()
            .find_map(|key| Some((key, about(key)?)))?;
        // Where a server tells no time, it is that of 1970.
        if about.e_tag.is_none() && about.last_modified.timestamp() == 0 {
            return None;
        }
        let tag = about.e_tag.unwrap_or_default();
        Some(format!("{key} {} {} {tag}", about.size, about.last_modified))
    }

    /// The store with another longest time of a read.
    #[cfg(test)]
    fn within(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// The object of a key.
    fn path(&self, key: &str) -> Result<Path> {
        let wrong = |error| Error::new(ErrorKind::InvalidInput, format!("its name is refused: {error}"));
        // Refuses `.`, `..` and empty parts.
        let own = Path::parse(key).map_err(wrong)?;
        Ok(self.prefix.parts().chain(own.parts()).collect())
    }

    /// Waits for an answer; `None` if there is no such object.
    fn wait<T: Send>(
        &self,
        answer: impl Future<Output = object_store::Result<T>> + Send,
    ) -> Result<Option<T>> {
        let late = || {
            let seconds = self.deadline.as_secs();
            Error::new(ErrorKind::TimedOut, format!("{} did not answer within {seconds} s", self.host))
        };
        let bounded = async { tokio::time::timeout(self.deadline, answer).await };
        // A thread that serves a runtime may not wait for another; one of its own may.
        let answer = match tokio::runtime::Handle::try_current() {
            Ok(_) => std::thread::scope(|scope| scope.spawn(|| self.runtime.block_on(bounded)).join()),
            Err(_) => Ok(self.runtime.block_on(bounded)),
        };
        let answer = answer.map_err(|_| Error::other("the client of the store panicked"))?;
        match answer.map_err(|_| late())? {
            Ok(value) => Ok(Some(value)),
            Err(error @ Failure::NotFound { .. }) if !causes(&error).contains(NO_BUCKET) => Ok(None),
            Err(error) => Err(self.explain(&error)),
        }
    }

    /// Says how to mend a failure.
    fn explain(&self, error: &Failure) -> Error {
        let cause = causes(error);
        if cause.contains(NO_BUCKET) {
            let bucket = &self.host;
            let (address, owner) = match self.kind {
                Kind::Google => ("GOOGLE_BASE_URL", "Google"),
                Kind::S3 | Kind::Http => ("AWS_ENDPOINT", "Amazon"),
            };
            let mend = format!("check data.path, and {address} if the store is not {owner}'s");
            return Error::new(ErrorKind::NotFound, format!("there is no bucket `{bucket}`; {mend}"));
        }
        if cause.contains("416 Range Not Satisfiable") {
            return Error::new(ErrorKind::UnexpectedEof, "it is shorter than the bytes to read of it");
        }
        // Amazon answers 400 to some wrong keys, and credentials that are not set are sought at the address of a cloud's machine.
        let signs =
            ["InvalidAccessKeyId", "SignatureDoesNotMatch", "169.254.169.254", "metadata.google.internal"];
        let denied = matches!(error, Failure::Unauthenticated { .. } | Failure::PermissionDenied { .. })
            || signs.iter().any(|sign| cause.contains(sign));
        let (kind, mend) = match (denied, self.kind) {
            (true, Kind::S3) => (
                ErrorKind::PermissionDenied,
                "check data.path; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
            ),
            (true, Kind::Google) => (
                ErrorKind::PermissionDenied,
                "check data.path; set GOOGLE_SERVICE_ACCOUNT to the file of a key, or GOOGLE_BEARER_TOKEN, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
            ),
            (true, Kind::Http) => (
                ErrorKind::PermissionDenied,
                "the store does not exist, or the server wants a login, which is not supported",
            ),
            (false, Kind::S3) => (
                ErrorKind::Other,
                "check the network, AWS_ENDPOINT and AWS_REGION, and AWS_ALLOW_HTTP=true for an endpoint without TLS",
            ),
            (false, Kind::Google) => {
                (ErrorKind::Other, "check the network, and GOOGLE_BASE_URL if the store is not Google's")
            }
            (false, Kind::Http) => {
                (ErrorKind::Other, "check the URL, the network, and that the server supports ranges")
            }
        };
        Error::new(kind, format!("{cause}; {mend}"))
    }
}

impl Store for Remote {
    fn read(&self, key: &str, span: Span) -> Result<Option<Vec<u8>>> {
        let path = self.path(key)?;
        let range = match span {
            Span::All(_) => None,
            Span::Some(_, 0) | Span::Last(0) => return Ok(self.length(key)?.map(|_| Vec::new())),
            Span::Some(start, length) => {
                let end = start.checked_add(length).ok_or_else(|| short(u64::MAX, u64::MAX))?;
                Some(GetRange::Bounded(start..end))
            }
            Span::Last(length) => Some(GetRange::Suffix(length)),
        };
        let options = GetOptions { range, ..GetOptions::default() };
        let answer = async {
            let found = self.objects.get_opts(&path, options).await?;
            let (all, sent) = (found.meta.size, found.range.end.saturating_sub(found.range.start));
            // Sizes are checked before the body is read.
            let wrong = match span {
                Span::All(limit) if all > limit => {
                    let text = format!("it has {all} bytes, expected at most {limit}");
                    Some(Error::new(ErrorKind::FileTooLarge, text))
                }
                Span::Some(start, length) if sent != length => Some(short(all, start.saturating_add(length))),
                Span::Last(length) if sent != length => Some(short(all, length)),
                _ => None,
            };
            match wrong {
                Some(error) => Ok(Err(error)),
                None => Ok(Ok(found.bytes().await?.to_vec())),
            }
        };
        self.wait(answer)?.transpose()
    }

    fn length(&self, key: &str) -> Result<Option<u64>> {
        let path = self.path(key)?;
        Ok(self.wait(self.objects.head(&path))?.map(|about| about.size))
    }

    fn folders(&self, folder: &str) -> Result<Vec<String>> {
        if self.kind == Kind::Http {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "a store at http:// cannot be listed and has no consolidated metadata; write them with \
                 zarr.consolidate_metadata, or use s3:// or gs://",
            ));
        }
        let path = if folder.is_empty() { self.prefix.clone() } else { self.path(folder)? };
        let found = self.wait(self.objects.list_with_delimiter(Some(&path)))?;
        let folders = found.map(|found| found.common_prefixes).unwrap_or_default();
        let mut names: Vec<String> =
            folders.iter().filter_map(|folder| folder.filename().map(str::to_owned)).collect();
        names.sort();
        Ok(names)
    }

    fn together(&self) -> usize {
        TOGETHER
    }
}

/// A URL without the login before its host.
pub(super) fn without_login(url: &str) -> String {
    match url.split_once("://") {
        Some((scheme, rest)) => {
            let (host, path) = rest.split_once('/').map_or((rest, ""), |(host, path)| (host, path));
            let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
            format!("{scheme}://{host}/{path}")
        }
        None => url.to_owned(),
    }
}

/// An error and its causes in one line, each once.
fn causes(error: &Failure) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let own = cause.to_string();
        if !text.contains(&own) {
            text = format!("{text}: {own}");
        }
        next = cause.source();
    }
    // A server may answer with a page, or with the request that it refuses.
    text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(LONGEST_CAUSE).collect()
}

/// The runtime of all stores of the process: one thread, which serves the connections.
fn runtime() -> Result<Arc<Runtime>> {
    static SHARED: Mutex<Option<Arc<Runtime>>> = Mutex::new(None);
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(runtime) = &*shared {
        return Ok(Arc::clone(runtime));
    }
    let runtime =
        Builder::new_multi_thread().worker_threads(1).thread_name("isobar-objects").enable_all().build()?;
    Ok(Arc::clone(shared.insert(Arc::new(runtime))))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn open(url: &str, port: u16) -> Result<Remote> {
        let own = [
            ("AWS_ACCESS_KEY_ID", "key".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "secret".to_owned()),
            ("AWS_ENDPOINT", format!("http://127.0.0.1:{port}")),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
        ];
        Remote::open(url, own.into_iter().map(|(name, value)| (name.to_owned(), value)))
    }

    #[test]
    fn a_server_that_is_silent_or_away_is_an_error() {
        // Connections wait in the listener's queue and are never answered.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = silent.local_addr().unwrap().port();
        for url in ["s3://bucket/a".to_owned(), format!("http://127.0.0.1:{port}/a")] {
            let store = open(&url, port).unwrap().within(Duration::from_millis(300));
            let error = store.read("zarr.json", Span::All(9)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
            assert_eq!(store.stamp(), None);
        }
        let away = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let error = open("s3://bucket/a", away).unwrap().read("zarr.json", Span::All(9)).unwrap_err();
        assert!(error.to_string().contains("check the network, AWS_ENDPOINT"), "{error}");
    }

    #[test]
    fn urls_that_name_no_store_are_errors() {
        for (url, expected) in [
            ("ftp://a/b", "scheme is `ftp`"),
            ("s3:///b", "no bucket"),
            ("://b", "no URL"),
            ("s3://key:secret@bucket/a", "login"),
            ("https://host/a?token=1", "query"),
        ] {
            let error = open(url, 1).unwrap_err().to_string();
            assert!(error.contains(expected), "{url}: {error}");
        }
        let store = open("s3://bucket/a", 1).unwrap();
        assert_eq!(store.read("../b", Span::All(9)).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn logins_are_not_shown() {
        assert_eq!(without_login("s3://key:secret@bucket/a/b@c"), "s3://bucket/a/b@c");
        assert_eq!(without_login("https://host/a"), "https://host/a");
    }

    #[test]
    fn a_thread_of_a_runtime_may_read() {
        let away = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let store = open("s3://bucket/a", away).unwrap();
        let outer = Builder::new_current_thread().build().unwrap();
        assert!(outer.block_on(async { store.read("zarr.json", Span::All(9)) }).is_err());
    }

    #[test]
    fn missing_credentials_are_anonymous() {
        for url in ["s3://bucket/a", "gs://bucket/a"] {
            let store = Remote::open(url, std::iter::empty()).unwrap();
            let text = format!("{:?}", store.objects);
            assert!(text.contains("skip_signature: true"), "{text}");
        }
    }
}
