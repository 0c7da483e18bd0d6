//! At which of its addresses a rank is reached by the others.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use crate::{Error, Result};

/// The address of a network interface, IPv4 where it has one.
pub(super) fn of_interface(name: &str) -> Result<IpAddr> {
    let unknown = |problem: String| Error::Interface { name: name.to_owned(), problem };
    let all = nix::ifaddrs::getifaddrs().map_err(|error| unknown(error.to_string()))?;
    let mut addresses: Vec<IpAddr> = Vec::new();
    let mut names: Vec<String> = Vec::new();
    for interface in all {
        if !names.contains(&interface.interface_name) {
            names.push(interface.interface_name.clone());
        }
        let Some(address) = interface.address.filter(|_| interface.interface_name == name) else { continue };
        addresses.extend(address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip())));
        addresses.extend(address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())));
    }
    addresses.sort_by_key(IpAddr::is_ipv6);
    addresses
        .first()
        .copied()
        .ok_or_else(|| unknown(format!("has no address, or is not there; there are {}", names.join(", "))))
}

/// What tells machines apart: name and network.
pub(super) fn machine() -> String {
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {}", crate::start::host().trim(), network.display())
}

/// The address towards which the others are: this machine's own where all ranks are on it, else that on the way to the first
/// of `others` that can be found.
pub(super) fn towards<'a>(alone: bool, others: impl IntoIterator<Item = &'a str>) -> Option<IpAddr> {
    if alone {
        return Some(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    let route = |local: &str, host: &str| {
        // Connecting a datagram socket sends nothing: it only chooses the route.
        let socket = UdpSocket::bind((local, 0)).ok()?;
        socket.connect((host, 9)).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    others
        .into_iter()
        .filter_map(|host| route("0.0.0.0", host).or_else(|| route("::", host)))
        .find(|address| !address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_has_its_address() {
        assert!(of_interface("lo").unwrap().is_loopback());
        let error = of_interface("no-such-interface").unwrap_err().to_string();
        assert!(error.contains("no-such-interface") && error.contains("there are lo"), "{error}");
    }

    #[test]
    fn ranks_of_one_machine_meet_on_it() {
        assert_eq!(towards(true, ["elsewhere"]), Some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        assert_eq!(towards(false, ["127.0.0.1", "no.such.host.invalid"]), None);
    }
}
