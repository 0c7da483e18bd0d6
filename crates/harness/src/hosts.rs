//! Two hosts on one machine: network namespaces, each with its own name and address, on a switch whose ports can be pulled.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::process::{on_path, output_within};

/// Timeout of one call of `ip`.
const STEP: Duration = Duration::from_secs(20);

/// The network interface of each host.
const INTERFACE: &str = "eth0";

/// Under this name both hosts know the first; the first itself by a loopback address, as Debian has it.
const FIRST: &str = "isobar-first";

/// Two hosts, `host-a` and `host-b`, that share this machine's files, and nothing of its network.
///
/// They are taken away with all their processes when this is dropped. Needs root, `ip` of the package iproute2, and
/// `nsenter` and `unshare` of util-linux.
///
/// # Examples
///
/// ```
/// use isobar_harness::Hosts;
///
/// // Where namespaces may be made.
/// if let Ok(hosts) = Hosts::new() {
///     let name = hosts.command(1, "cat").arg("/proc/sys/kernel/hostname").output()?;
///     assert_eq!(name.stdout, b"host-b\n");
/// }
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug)]
pub struct Hosts {
    /// The namespaces of the hosts.
    spaces: [String; 2],
    switch: String,
    folder: tempfile::TempDir,
}

impl Hosts {
    /// Number of hosts.
    pub const COUNT: usize = 2;

    /// Makes them.
    ///
    /// # Errors
    ///
    /// The user lacks permission, or `ip` is missing; tests are then skipped.
    pub fn new() -> Result<Self> {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        on_path("ip").context("no `ip`")?;
        let id = format!("isobar-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let folder = tempfile::tempdir().context("failed to make a folder for the hosts")?;
        let spaces = ["a", "b"].map(|host| format!("{id}-{host}"));
        // From here on what was made is taken away.
        let hosts = Self { spaces, switch: format!("{id}-switch"), folder };
        hosts.make().context("failed to make network namespaces")?;
        Ok(hosts)
    }

    /// The address of a host.
    #[must_use]
    pub fn address(&self, host: usize) -> &'static str {
        ["10.211.0.1", "10.211.0.2"][host]
    }

    /// The name of a host, which both can look up.
    #[must_use]
    pub fn name(&self, host: usize) -> &'static str {
        ["host-a", "host-b"][host]
    }

    /// A name that each host knows the first by: the first itself as a loopback address, the other as its address.
    #[must_use]
    pub fn name_of_first(&self) -> &'static str {
        FIRST
    }

    /// The network interface of each host.
    #[must_use]
    pub fn interface(&self) -> &'static str {
        INTERFACE
    }

    /// A command on a host.
    pub fn command(&self, host: usize, program: impl AsRef<OsStr>) -> Command {
        let words = self.words(host);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg(program);
        command
    }

    /// The words before a command that make it one of a host.
    #[must_use]
    pub fn words(&self, host: usize) -> Vec<OsString> {
        // (`ip netns exec` would hide the control groups, which SLURM does not start without.)
        const NAMED: &str =
            "printf %s \"$1\" >/proc/sys/kernel/hostname && mount --bind \"$2\" /etc/hosts || exit
            shift 2; exec \"$@\"";
        let space = &self.spaces[host];
        let (net, known) = (format!("--net=/var/run/netns/{space}"), self.known(host));
        let words =
            ["nsenter", &net, "unshare", "--uts", "--mount", "sh", "-c", NAMED, "sh", self.name(host)];
        words.map(OsString::from).into_iter().chain([known.into()]).collect()
    }

    /// A line for a shell, on any host, that pulls a host's cable: the host goes on, and nothing reaches it, nor leaves it.
    #[must_use]
    pub fn cut(&self, host: usize) -> String {
        format!("ip -n {} link set {} down", self.switch, port(host))
    }

    /// A line for a shell that sends this signal to all processes of a host but the shell itself.
    #[must_use]
    pub fn signal(&self, host: usize, signal: &str) -> String {
        let space = &self.spaces[host];
        format!(
            "for pid in $(ip netns pids {space}); do [ $pid = $$ ] || kill -{signal} $pid 2>/dev/null; done"
        )
    }

    /// Returns a line for a shell that kills all processes of a host, as where its machine fails, but those of SLURM's
    /// controller and the shell itself.
    #[must_use]
    pub fn fail(&self, host: usize) -> String {
        let space = &self.spaces[host];
        format!(
            "for pid in $(ip netns pids {space}); do case $(cat /proc/$pid/comm) in slurmctld|munged) ;; *) [ $pid = $$ ] || \
             kill -KILL $pid 2>/dev/null;; esac; done"
        )
    }

    /// Returns the file that replaces `/etc/hosts`.
    fn known(&self, host: usize) -> PathBuf {
        self.folder().join(format!("hosts-of-{}", self.name(host)))
    }

    /// A folder that goes with the hosts.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A program that starts a command on a host as `ssh` would: `AGENT HOST COMMAND…`.
    #[must_use]
    pub fn agent(&self) -> PathBuf {
        self.folder.path().join("agent")
    }

    fn make(&self) -> Result<()> {
        ip(&["netns", "add", &self.switch])?;
        ip(&["-n", &self.switch, "link", "add", "switch", "type", "bridge"])?;
        ip(&["-n", &self.switch, "link", "set", "switch", "up"])?;
        let mut agent = "#!/bin/sh\nhost=$1; shift\ncase $host in\n".to_owned();
        for host in 0..Self::COUNT {
            let (space, address) = (self.spaces[host].as_str(), format!("{}/24", self.address(host)));
            ip(&["netns", "add", space])?;
            let (link, port) = (["link", "add", INTERFACE, "netns", space, "type", "veth"], port(host));
            ip(&[&link[..], &["peer", "name", port, "netns", &self.switch]].concat())?;
            ip(&["-n", &self.switch, "link", "set", port, "master", "switch", "up"])?;
            ip(&["-n", space, "addr", "add", &address, "dev", INTERFACE])?;
            ip(&["-n", space, "link", "set", INTERFACE, "up"])?;
            ip(&["-n", space, "link", "set", "lo", "up"])?;
            let first = ["127.0.1.1", self.address(0)][host];
            let known = (0..Self::COUNT).map(|host| format!("{} {}\n", self.address(host), self.name(host)));
            let known: String = known.collect();
            fs::write(self.known(host), format!("127.0.0.1 localhost\n{first} {FIRST}\n{known}"))?;
            let words: Vec<String> =
                self.words(host).iter().map(|word| format!("'{}'", word.display())).collect();
            agent += &format!("{}) exec {} sh -c \"$*\";;\n", self.name(host), words.join(" "));
        }
        fs::write(self.agent(), agent + "esac\nexit 1\n")?;
        fs::set_permissions(self.agent(), fs::Permissions::from_mode(0o755))?;
        Ok(())
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in 0..Self::COUNT {
            let _ = output_within(Command::new("sh").arg("-c").arg(self.signal(host, "KILL")), STEP);
        }
        for space in self.spaces.iter().chain([&self.switch]) {
            ip(&["netns", "delete", space]).unwrap_or(());
        }
    }
}

/// The switch's end of a host's cable.
fn port(host: usize) -> &'static str {
    ["port-a", "port-b"][host]
}

fn ip(args: &[&str]) -> Result<()> {
    match output_within(Command::new("ip").args(args), STEP)? {
        Some(output) if output.status.success() => Ok(()),
        Some(output) => bail!("`ip {}`: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim()),
        None => bail!("`ip {}` did not end", args.join(" ")),
    }
}
