//! At which of its addresses a rank is reached by the others.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, ToSocketAddrs, UdpSocket};

use crate::{Error, Result};

/// The addresses of a network interface, at least one, those of IPv4 first.
pub(crate) fn of_interface(name: &str) -> Result<Vec<IpAddr>> {
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
        // Those of the link alone mean nothing without its number.
        let v6 = address.as_sockaddr_in6().map(|v6| v6.ip());
        addresses.extend(v6.filter(|v6| !v6.is_unicast_link_local()).map(IpAddr::V6));
    }
    addresses.sort_by_key(IpAddr::is_ipv6);
    if addresses.is_empty() {
        return Err(unknown(format!("has no address, or is not there; there are {}", names.join(", "))));
    }
    Ok(addresses)
}

/// Returns the addresses on which rank 0 listens, if the other ranks know its host as `addr`: those of the interface if
/// one is given, otherwise those that `addr` resolves to. If `addr` resolves to a loopback address, as a host's own name
/// may, and no interface is given, rank 0 listens on all addresses, since the other ranks may come by any of them.
pub(crate) fn of_rank_zero(addr: &str, interface: Option<&str>) -> Result<Vec<IpAddr>> {
    let unknown = |problem: String| Error::Address { addr: addr.to_owned(), problem };
    let mut named: Vec<IpAddr> = Vec::new();
    for address in (addr, 0).to_socket_addrs().map_err(|error| unknown(error.to_string()))? {
        if !named.contains(&address.ip()) {
            named.push(address.ip());
        }
    }
    let elsewhere = || unknown(format!("is not one of this host's ({})", text(&named)));
    // A socket can be bound to addresses of this machine only.
    let own: Vec<IpAddr> =
        named.iter().copied().filter(|&address| UdpSocket::bind((address, 0)).is_ok()).collect();
    let loopback = || own.iter().copied().filter(IpAddr::is_loopback);
    match interface {
        Some(name) => {
            let mut addresses = of_interface(name)?;
            let others: Vec<IpAddr> = loopback().filter(|address| !addresses.contains(address)).collect();
            addresses.extend(others);
            Ok(addresses)
        }
        None if own.is_empty() => Err(elsewhere()),
        None if own.iter().all(IpAddr::is_loopback) && !is_loopback_word(addr) => {
            let v4 = own.iter().any(IpAddr::is_ipv4);
            Ok(vec![if v4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }])
        }
        None => Ok(own),
    }
}

fn is_loopback_word(addr: &str) -> bool {
    addr == "localhost" || addr.parse::<IpAddr>().is_ok()
}

fn text(addresses: &[IpAddr]) -> String {
    addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ")
}

/// The name of this machine.
pub(crate) fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default()
}

/// Returns an identifier of this machine, from its name and network namespace.
pub(crate) fn machine() -> String {
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {}", host().trim(), network.display())
}

/// The address towards which the others are: this machine's own where all ranks are on it, else that on the way to the first
/// of `others` that can be found.
pub(crate) fn towards<'a>(alone: bool, others: impl IntoIterator<Item = &'a str>) -> Option<IpAddr> {
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
        assert!(of_interface("lo").unwrap()[0].is_loopback());
        let error = of_interface("no-such-interface").unwrap_err().to_string();
        assert!(error.contains("no-such-interface") && error.contains("there are lo"), "{error}");
    }

    #[test]
    fn rank_zero_listens_where_it_is_told() {
        let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let there = IpAddr::V4(Ipv4Addr::new(127, 3, 2, 1));
        assert_eq!(of_rank_zero("127.0.0.1", None).unwrap(), [here]);
        assert_eq!(of_rank_zero("127.3.2.1", None).unwrap(), [there]);
        assert!(of_rank_zero("localhost", None).unwrap().contains(&here));
        let both = of_rank_zero("127.3.2.1", Some("lo")).unwrap();
        assert!(both.contains(&here) && both.contains(&there), "{both:?}");
        // An address of documentation, which no machine has.
        let error = of_rank_zero("192.0.2.1", None).unwrap_err().to_string();
        assert!(error.contains("192.0.2.1") && error.contains("distributed.interface"), "{error}");
        assert!(of_rank_zero("192.0.2.1", Some("lo")).unwrap().contains(&here));
        assert!(of_rank_zero("127.0.0.1", Some("no-such-interface")).is_err());
        assert!(of_rank_zero("no.such.host.invalid", None).is_err());
    }

    #[test]
    fn ranks_of_one_machine_meet_on_it() {
        assert_eq!(towards(true, ["elsewhere"]), Some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        assert_eq!(towards(false, ["127.0.0.1", "no.such.host.invalid"]), None);
    }
}
