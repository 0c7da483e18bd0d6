//! `s3s-fs` on loopback, in this process: a server of S3 whose buckets are the folders of a root.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};

/// A server, until this is dropped.
pub(crate) struct Server {
    pub(crate) port: u16,
    _runtime: Runtime,
}

/// Serves the folders of `root` to callers with this key.
pub(crate) fn serve(root: &Path, key: &str, secret: &str) -> Server {
    let mut service = S3ServiceBuilder::new(FileSystem::new(root).unwrap());
    service.set_auth(SimpleAuth::from_single(key, secret));
    let service = service.build();
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let port = listener.local_addr().unwrap().port();
    let _accepting = runtime.spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            // An error is a client that has gone.
            let connection = http1::Builder::new().serve_connection(TokioIo::new(socket), service.clone());
            let _serving = tokio::spawn(connection);
        }
    });
    Server { port, _runtime: runtime }
}
