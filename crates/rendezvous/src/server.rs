//! The process that keeps the store: a thread for each of its addresses, and one for each connection.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::table::Table;
use crate::token::Token;
use crate::wire::{self, LONGEST, Message, Met, Until};

/// Timeout of a new connection's introduction.
const INTRODUCTION: Duration = Duration::from_secs(5);

/// Largest number of connections that have not introduced themselves. One more closes the oldest: a rank
/// introduces itself within milliseconds, so that a flood of silent connections does not keep it out.
const STRANGERS: usize = 256;

/// Small stack, since there is one thread per connection, that is, per rank.
const STACK: usize = 256 << 10;

/// Serves a store until it is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    shared: Arc<Shared>,
    listeners: Vec<(Arc<TcpListener>, Option<JoinHandle<()>>)>,
    pub(crate) port: u16,
}

#[derive(Debug)]
struct Shared {
    table: Table,
    token: Token,
    closed: AtomicBool,
    /// Connections that have not introduced themselves, oldest first.
    strangers: Mutex<VecDeque<Arc<TcpStream>>>,
    /// To be closed at the end.
    connections: Mutex<Vec<Weak<TcpStream>>>,
}

impl Server {
    /// Listens on these addresses only; port 0 is any free one.
    pub(crate) fn listen(addresses: &[IpAddr], mut port: u16, token: &Token) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            table: Table::default(),
            token: token.clone(),
            closed: AtomicBool::new(false),
            strangers: Mutex::default(),
            connections: Mutex::new(Vec::new()),
        });
        let mut server = Self { shared, listeners: Vec::new(), port };
        for &address in addresses {
            let failed = |error: io::Error| {
                io::Error::new(error.kind(), format!("{}: {error}", SocketAddr::new(address, port)))
            };
            let listener = Arc::new(TcpListener::bind((address, port)).map_err(failed)?);
            port = listener.local_addr()?.port();
            let (shared, accepting) = (server.shared.clone(), listener.clone());
            let thread = thread::Builder::new().name("isobar-store".to_owned()).stack_size(STACK);
            let thread = thread.spawn(move || shared.accept(&accepting))?;
            server.listeners.push((listener, Some(thread)));
        }
        server.port = port;
        Ok(server)
    }

    /// Answers a request of the process that keeps the store.
    pub(crate) fn answer(&self, request: &Message) -> Message {
        self.shared.table.answer(request)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        for (listener, thread) in &mut self.listeners {
            // On Linux, this ends the thread's `accept`. It cannot fail on an open listener.
            let _ = nix::sys::socket::shutdown(listener.as_raw_fd(), nix::sys::socket::Shutdown::Both);
            // The thread runs no code that can panic.
            let _ = thread.take().map(JoinHandle::join);
        }
        self.shared.table.close();
        let connections = self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner);
        for connection in connections.iter().filter_map(Weak::upgrade) {
            // It is closed already where this fails.
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn accept(self: Arc<Self>, listener: &TcpListener) {
        while !self.closed.load(Ordering::SeqCst) {
            match listener.accept() {
                Ok((stream, _)) => {
                    let (shared, stream) = (self.clone(), Arc::new(stream));
                    self.keep(&stream);
                    self.admit(&stream);
                    let thread = thread::Builder::new().name("isobar-store".to_owned()).stack_size(STACK);
                    let attended = stream.clone();
                    if thread.spawn(move || shared.attend(&attended)).is_err() {
                        self.dismiss(&stream);
                    }
                }
                // Closed, or no descriptors for now.
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Adds a stranger. If there are too many, closes the oldest, whose thread then ends.
    fn admit(&self, stream: &Arc<TcpStream>) {
        let mut strangers = self.strangers();
        strangers.push_back(stream.clone());
        if strangers.len() > STRANGERS
            && let Some(oldest) = strangers.pop_front()
        {
            // It may have closed by itself.
            let _ = oldest.shutdown(Shutdown::Both);
        }
    }

    /// Removes a stranger; false if it was closed in favour of a newer one.
    fn dismiss(&self, stream: &Arc<TcpStream>) -> bool {
        let mut strangers = self.strangers();
        let at = strangers.iter().position(|other| Arc::ptr_eq(other, stream));
        at.and_then(|at| strangers.remove(at)).is_some()
    }

    fn strangers(&self) -> MutexGuard<'_, VecDeque<Arc<TcpStream>>> {
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, stream: &Arc<TcpStream>) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.retain(|connection| connection.strong_count() > 0);
        connections.push(Arc::downgrade(stream));
    }

    fn attend(&self, stream: &Arc<TcpStream>) {
        let line = Until { stream, end: Instant::now() + INTRODUCTION };
        let met = stream.set_nodelay(true).and_then(|()| wire::receive(line, &self.token));
        let stays = self.dismiss(stream);
        if stays && matches!(met, Ok(Met::Friend)) && !self.closed.load(Ordering::SeqCst) {
            // The end of a connection is no error of the store.
            let _ = self.serve(stream);
        }
        let _ = stream.shutdown(Shutdown::Both);
    }

    fn serve(&self, mut stream: &TcpStream) -> io::Result<()> {
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(None)?;
        loop {
            let mut head = [0; 4];
            stream.read_exact(&mut head)?;
            let length = u32::from_le_bytes(head) as usize;
            if length > LONGEST {
                return Ok(());
            }
            // Memory for what has come, not for what was announced.
            let mut bytes = Vec::new();
            stream.take(length as u64).read_to_end(&mut bytes)?;
            let Some(request) = Message::decode(&bytes).filter(|_| bytes.len() == length) else {
                return Ok(());
            };
            let Some(answer) = self.table.answer(&request).encode() else { return Ok(()) };
            stream.write_all(&answer)?;
        }
    }
}
