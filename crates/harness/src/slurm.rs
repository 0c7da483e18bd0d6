//! A SLURM of one machine, or of two hosts on it: munge, controller and node daemons with a configuration, state and ports of
//! their own.

use std::{
    ffi::OsString,
    fmt,
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    io::Read,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use isobar_rendezvous::FreePort;
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, Uid, User, gethostname},
};

use crate::{
    hosts::Hosts,
    process::{on_path, output_within},
    workspace,
};

const DAEMONS: [&str; 3] = ["munged", "slurmctld", "slurmd"];

/// The ports of a SLURM of two hosts, whose network is its own.
const PORTS: [u16; 2] = [6817, 6818];

const STEP: Duration = Duration::from_secs(20);

/// A SLURM of this machine, or of two hosts on it, by the folder that holds its configuration, state and logs.
///
/// It uses nothing of a SLURM that the machine may have already, needs no systemd, and runs as whoever starts it.
#[derive(Clone, Debug)]
pub struct Slurm {
    folder: PathBuf,
    /// Apart from the folder, whose path may be too long for a socket or closed to others, which munge refuses.
    sockets: PathBuf,
    nodes: Vec<Node>,
    credentials_s: u32,
    kill_wait_s: Option<u32>,
}

/// Default lifetime of credentials in seconds, as in SLURM.
const CREDENTIALS_S: u32 = 120;

/// Node that runs jobs.
#[derive(Clone, Debug)]
struct Node {
    /// Up to the first dot of the host's name.
    name: String,
    host: String,
    address: String,
    cpus: usize,
    /// The words before a command that make it one of this host.
    words: Vec<OsString>,
}

impl Node {
    /// The command on this host.
    fn command(&self, program: impl Into<OsString>) -> Command {
        let mut words = self.words.iter().cloned().chain([program.into()]);
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words);
        command
    }
}

/// State of this machine's SLURM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlurmState {
    /// It takes jobs.
    Up,
    /// Some daemon is not running, or the node takes no jobs.
    Down(String),
}

impl Slurm {
    /// The one in `target/slurm` of this workspace.
    pub fn of_workspace() -> Self {
        Self::in_folder(workspace().join("target/slurm"))
    }

    /// One in another folder.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        let folder = folder.into();
        let mut hasher = DefaultHasher::new();
        folder.hash(&mut hasher);
        let sockets = PathBuf::from(format!("/tmp/isobar-slurm-{}-{:x}", Uid::current(), hasher.finish()));
        let host = gethostname().map(|host| host.to_string_lossy().into_owned()).unwrap_or_default();
        let node = Node {
            name: host.split('.').next().unwrap_or(&host).to_owned(),
            host,
            address: "127.0.0.1".to_owned(),
            cpus: thread::available_parallelism().map_or(1, usize::from),
            words: Vec::new(),
        };
        Self { folder, sockets, nodes: vec![node], credentials_s: CREDENTIALS_S, kill_wait_s: None }
    }

    /// Sets the seconds within which started jobs must run. A job that is queued again waits for as long.
    #[must_use]
    pub fn with_credentials_for(self, seconds: u32) -> Self {
        Self { credentials_s: seconds, ..self }
    }

    /// Gives processes this many seconds between SIGTERM and SIGKILL (`KillWait`) when their job is cancelled or at its limit.
    #[must_use]
    pub fn with_kill_wait(self, seconds: u32) -> Self {
        Self { kill_wait_s: Some(seconds), ..self }
    }

    /// One of two hosts, its controller on the first. It ends with them.
    pub fn of_hosts(hosts: &Hosts) -> Self {
        let node = |host: usize| Node {
            name: hosts.name(host).to_owned(),
            host: hosts.name(host).to_owned(),
            address: hosts.address(host).to_owned(),
            cpus: 2,
            words: hosts.words(host),
        };
        let folder = hosts.folder().join("slurm");
        let sockets = folder.join("sockets");
        Self {
            folder,
            sockets,
            nodes: (0..Hosts::COUNT).map(node).collect(),
            credentials_s: CREDENTIALS_S,
            kill_wait_s: None,
        }
    }

    /// The file that `SLURM_CONF` names for `srun`, `sinfo` and the rest.
    pub fn configuration(&self) -> PathBuf {
        self.folder.join("slurm.conf")
    }

    /// A command of SLURM that speaks to this one, on its first host.
    pub fn command(&self, program: &str) -> Command {
        let mut command = self.nodes[0].command(program);
        command.env("SLURM_CONF", self.configuration());
        command
    }

    /// Starts what is not running. Several processes may call it at once.
    ///
    /// # Errors
    ///
    /// If SLURM is not installed, or a daemon does not come up; the error has the end of its log.
    pub fn start(&self) -> Result<()> {
        for daemon in DAEMONS {
            ensure!(
                on_path(daemon).is_some(),
                "{daemon} is not installed; `cargo xtask setup` installs slurm-wlm and munge where it may"
            );
        }
        fs::create_dir_all(&self.folder)?;
        let lock = File::create(self.folder.join("lock"))?;
        lock.lock().context("failed to lock the folder of SLURM")?;
        if self.state() == SlurmState::Up {
            return Ok(());
        }
        // Nothing of the last run is worth keeping, and half of it is what makes daemons refuse to start.
        self.stop_daemons()?;
        self.write_files()?;
        self.start_daemons()?;
        self.wait_until_up()
    }

    /// Stops the daemons, and the jobs that run.
    ///
    /// # Errors
    ///
    /// If a daemon does not end.
    pub fn stop(&self) -> Result<()> {
        if !self.folder.exists() {
            return Ok(());
        }
        let lock = File::create(self.folder.join("lock"))?;
        lock.lock().context("failed to lock the folder of SLURM")?;
        self.stop_daemons()
    }

    /// Returns whether it accepts jobs.
    pub fn state(&self) -> SlurmState {
        let down: Vec<String> =
            self.daemons().into_iter().filter(|daemon| self.running(daemon).is_none()).collect();
        if !down.is_empty() {
            return SlurmState::Down(format!("not running: {}", down.join(", ")));
        }
        let asked = output_within(self.command("sinfo").args(["--noheader", "--Node", "--format=%T"]), STEP);
        match asked {
            Ok(Some(output)) if output.status.success() => {
                let states = String::from_utf8_lossy(&output.stdout).into_owned();
                // A trailing mark (`idle*`, `down~`) is a node that does not answer, or is powered down.
                let takes = |state: &str| ["idle", "mixed", "allocated", "completing"].contains(&state);
                match states.lines().map(str::trim).find(|state| !takes(state)) {
                    None if states.lines().count() == self.nodes.len() => SlurmState::Up,
                    None => SlurmState::Down("it does not know all of its nodes".to_owned()),
                    Some(state) => SlurmState::Down(format!("a node is {state}")),
                }
            }
            Ok(Some(output)) => SlurmState::Down(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Ok(None) => SlurmState::Down("the controller does not answer".to_owned()),
            Err(error) => SlurmState::Down(format!("sinfo: {error}")),
        }
    }

    /// Starts the daemon of a node whose processes were killed.
    ///
    /// # Errors
    ///
    /// If it does not start.
    pub fn start_node(&self, node: usize) -> Result<()> {
        let node = self.nodes.get(node).context("no such node")?;
        // Sockets and folders of PMIx servers that were killed would keep new ones from starting. A machine whose spool
        // folder is in memory has none of them after its start.
        let configuration = self.configuration_of(node);
        let spool = self.folder.join("spool").join(&node.name);
        for folder in configuration.parent().into_iter().chain([&*spool]) {
            for entry in fs::read_dir(folder)?.flatten() {
                let path = entry.path();
                if !entry.file_name().to_string_lossy().contains("pmix") {
                    continue;
                }
                if path.is_dir() {
                    fs::remove_dir_all(path)?;
                } else {
                    fs::remove_file(path)?;
                }
            }
        }
        self.start_slurmd(node)
    }

    /// Ends all jobs of this name.
    ///
    /// # Errors
    ///
    /// If `scancel` can't be run.
    pub fn cancel(&self, job: &str) -> Result<()> {
        for signal in ["--signal=KILL", "--quiet"] {
            output_within(self.command("scancel").args([signal, &format!("--name={job}")]), STEP)?;
        }
        Ok(())
    }

    /// That of the daemon of a node, beside which it finds what is its own.
    fn configuration_of(&self, node: &Node) -> PathBuf {
        self.folder.join("nodes").join(&node.name).join("slurm.conf")
    }

    fn write_files(&self) -> Result<()> {
        for folder in ["state", "spool"] {
            let folder = self.folder.join(folder);
            if folder.exists() {
                fs::remove_dir_all(&folder)?;
            }
            fs::create_dir_all(&folder)?;
        }
        for node in &self.nodes {
            fs::create_dir(self.folder.join("spool").join(&node.name))?;
        }
        fs::create_dir_all(&self.sockets)?;
        fs::set_permissions(&self.sockets, fs::Permissions::from_mode(0o755))?;
        let key = self.folder.join("munge.key");
        if !key.exists() {
            let mut bytes = [0; 1024];
            File::open("/dev/urandom")?.read_exact(&mut bytes)?;
            fs::write(&key, bytes)?;
            fs::set_permissions(&key, fs::Permissions::from_mode(0o600))?;
        }
        let text = self.configuration_text()?;
        for node in &self.nodes {
            let file = self.configuration_of(node);
            let folder = file.parent().unwrap_or(&self.folder);
            fs::create_dir_all(folder)?;
            fs::write(&file, &text)?;
            if self.nodes.len() > 1 {
                // Hosts that share a `/tmp` would take each other's files for their own.
                fs::write(folder.join("mpi.conf"), format!("PMIxCliTmpDirBase={}\n", folder.display()))?;
            }
        }
        fs::write(self.configuration(), text)?;
        Ok(())
    }

    fn configuration_text(&self) -> Result<String> {
        let user = User::from_uid(Uid::current())?.context("this user has no name")?.name;
        let [controller, node] = match &self.nodes[..] {
            [_] => {
                // Held together, so that they differ.
                let ports = [FreePort::hold()?, FreePort::hold()?];
                [ports[0].port(), ports[1].port()]
            }
            _ => PORTS,
        };
        let (folder, sockets, first) = (self.folder.display(), self.sockets.display(), &self.nodes[0]);
        let mut text = format!(
            "ClusterName=isobar
SlurmctldHost={}({})
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={sockets}/munge,cred_expire={}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
",
            first.name, first.address, self.credentials_s
        );
        // If hosts may be lost, SLURM should notice as soon as its ranks do.
        text += match &self.nodes[..] {
            [_] => "",
            _ => "MessageTimeout=3\nTCPTimeout=1\nSlurmdTimeout=4\n",
        };
        let kill_wait = self.kill_wait_s.unwrap_or(if self.nodes.len() > 1 { 1 } else { 5 });
        text += &format!("KillWait={kill_wait}\n");
        for Node { name, host, address, cpus, .. } in &self.nodes {
            let node = format!("NodeName={name} NodeHostname={host} NodeAddr={address} CPUs={cpus}");
            text += &format!("{node} State=UNKNOWN\n");
        }
        Ok(text)
    }

    /// The names of the daemons' files.
    fn daemons(&self) -> Vec<String> {
        let nodes = self.nodes.iter().map(|node| format!("slurmd.{}", node.name));
        ["munged", "slurmctld"].map(str::to_owned).into_iter().chain(nodes).collect()
    }

    fn start_daemons(&self) -> Result<()> {
        let munged = |flag: &str, value: PathBuf| format!("--{flag}={}", value.display());
        let daemon = |node: &Node, name: &str| node.command(on_path(name).unwrap_or_else(|| name.into()));
        let (folder, first) = (&self.folder, &self.nodes[0]);
        self.start_daemon(
            "munged",
            // munge wants every folder above its files to be another's to read only; this key guards nothing.
            daemon(first, "munged").args([
                "--force".to_owned(),
                munged("key-file", folder.join("munge.key")),
                munged("socket", self.sockets.join("munge")),
                munged("pid-file", folder.join("munged.pid")),
                munged("log-file", folder.join("munged.log")),
                munged("seed-file", folder.join("munged.seed")),
            ]),
        )?;
        let configuration = self.configuration();
        self.start_daemon("slurmctld", daemon(first, "slurmctld").arg("-c").arg("-f").arg(&configuration))?;
        self.nodes.iter().try_for_each(|node| self.start_slurmd(node))
    }

    fn start_slurmd(&self, node: &Node) -> Result<()> {
        let name = format!("slurmd.{}", node.name);
        let program = on_path("slurmd").unwrap_or_else(|| "slurmd".into());
        self.start_daemon(&name, node.command(program).arg("-f").arg(self.configuration_of(node)))?;
        // The daemons append to their logs; the start is what matters after a failure.
        ensure!(self.folder.join(format!("{name}.log")).exists(), "slurmd wrote no log");
        Ok(())
    }

    fn start_daemon(&self, name: &str, command: &mut Command) -> Result<()> {
        // A daemon leaves its terminal, but would keep a pipe open: its output goes to a file.
        let out = File::create(self.folder.join(format!("{name}.out")))?;
        let mut child = command
            .stdin(std::process::Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            .spawn()
            .with_context(|| format!("failed to start {name}"))?;
        match crate::process::wait_within(&mut child, STEP)? {
            Some(status) if status.success() => Ok(()),
            Some(_) => bail!("{name} did not start: {}", self.tail(name)),
            None => bail!("{name} did not start within {} s: {}", STEP.as_secs(), self.tail(name)),
        }
    }

    fn wait_until_up(&self) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            match self.state() {
                SlurmState::Up => return Ok(()),
                SlurmState::Down(why) if Instant::now() >= end => {
                    let logs: Vec<_> = self.daemons().iter().map(|daemon| self.tail(daemon)).collect();
                    bail!("SLURM did not come up ({why})\n{}", logs.join("\n"))
                }
                SlurmState::Down(_) => thread::sleep(Duration::from_millis(200)),
            }
        }
    }

    fn stop_daemons(&self) -> Result<()> {
        for daemon in self.daemons().iter().rev() {
            let Some(pid) = self.running(daemon) else { continue };
            let end = Instant::now() + STEP;
            kill(pid, Signal::SIGTERM).with_context(|| format!("failed to stop {daemon}"))?;
            while self.running(daemon) == Some(pid) {
                if Instant::now() >= end {
                    kill(pid, Signal::SIGKILL).with_context(|| format!("failed to kill {daemon}"))?;
                    break;
                }
                thread::sleep(Duration::from_millis(50));
            }
        }
        if self.sockets.exists() {
            fs::remove_dir_all(&self.sockets)?;
        }
        Ok(())
    }

    /// The process of one of our daemons, by its file, unless that is left over from before a restart.
    fn running(&self, daemon: &str) -> Option<Pid> {
        let pid = fs::read_to_string(self.folder.join(format!("{daemon}.pid"))).ok()?;
        let pid: i32 = pid.trim().parse().ok()?;
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        let words = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let ours = String::from_utf8_lossy(&words).contains(&*self.folder.to_string_lossy());
        let program = daemon.split('.').next().unwrap_or(daemon);
        (name.trim() == program && ours).then(|| Pid::from_raw(pid))
    }

    fn tail(&self, daemon: &str) -> String {
        let read = |ending: &str| {
            let bytes = fs::read(self.folder.join(format!("{daemon}.{ending}"))).unwrap_or_default();
            let text = String::from_utf8_lossy(&bytes).into_owned();
            let lines: Vec<_> = text.lines().collect();
            lines[lines.len().saturating_sub(10)..].join("\n")
        };
        format!("{daemon}: {} {}", read("out"), read("log"))
    }
}

impl fmt::Display for SlurmState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Up => f.write_str("up"),
            Self::Down(why) => write!(f, "down ({why})"),
        }
    }
}
