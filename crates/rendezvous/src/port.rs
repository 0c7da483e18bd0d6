//! A port that no other process gets until rank 0 listens on it.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, bind, setsockopt, socket, sockopt::ReuseAddr,
};

/// A free port of this host, reserved until dropped. Only a process that binds this port by number can use it, as rank 0 does with
/// its launcher's `MASTER_PORT`.
///
/// The port is from 15000 to 29999, below those that systems give to connections.
///
/// ```
/// use std::net::TcpListener;
/// use isobar_rendezvous::FreePort;
///
/// let held = FreePort::hold()?;
/// let listener = TcpListener::bind(("127.0.0.1", held.port()))?;
/// assert_eq!(listener.local_addr()?.port(), held.port());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct FreePort {
    port: u16,
    _socket: OwnedFd,
}

impl FreePort {
    /// Holds a port that is free on all addresses of this host.
    ///
    /// # Errors
    ///
    /// No port is free in 100 tries, or the process has too many open files.
    pub fn hold() -> io::Result<Self> {
        let random = RandomState::new();
        let tries =
            (0..100_u32).map(|attempt| Self::held(15_000 + (random.hash_one(attempt) % 15_000) as u16));
        let mut last = None;
        for held in tries {
            match held {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => last = Some(error),
                done => return done,
            }
        }
        Err(last.unwrap_or_else(|| io::ErrorKind::AddrInUse.into()))
    }

    fn held(port: u16) -> io::Result<Self> {
        let socket = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        bind(socket.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port)))?;
        // Set after `bind`, so that two processes cannot reserve one port. A listener with SO_REUSEADDR, such as `TcpListener`, may
        // still bind it, since this socket does not listen.
        setsockopt(&socket, ReuseAddr, &true)?;
        Ok(Self { port, _socket: socket })
    }

    /// Returns the port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_held_port_is_given_to_nobody_else() {
        let held: Vec<FreePort> = (0..500).map(|_| FreePort::hold().unwrap()).collect();
        let ports: BTreeSet<u16> = held.iter().map(FreePort::port).collect();
        assert_eq!(ports.len(), held.len());
        let port = held[0].port();
        let in_use =
            |result: io::Result<()>| result.is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse);
        assert!(in_use(FreePort::held(port).map(drop)));
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        assert!(in_use(TcpListener::bind(("127.0.0.1", port)).map(drop)));
        drop(listener);
        assert!(TcpListener::bind(("0.0.0.0", port)).is_ok());
    }
}
