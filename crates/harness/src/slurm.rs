//! A SLURM of one machine: munge, controller and node daemon with a configuration, state and ports of their own.

use std::{
    fmt,
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    io::Read,
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, Uid, User, gethostname},
};

use crate::{
    process::{on_path, output_within},
    workspace,
};

const DAEMONS: [&str; 3] = ["munged", "slurmctld", "slurmd"];
const STEP: Duration = Duration::from_secs(20);

/// The SLURM of one machine, by the folder that holds its configuration, state and logs.
///
/// It uses nothing of a SLURM that the machine may have already, needs no systemd, and runs as whoever starts it.
#[derive(Clone, Debug)]
pub struct Slurm {
    folder: PathBuf,
    /// Apart from the folder, whose path may be too long for a socket or closed to others, which munge refuses.
    sockets: PathBuf,
}

/// Whether the SLURM of this machine takes jobs.
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
        Self { folder, sockets }
    }

    /// The file that `SLURM_CONF` names for `srun`, `sinfo` and the rest.
    pub fn configuration(&self) -> PathBuf {
        self.folder.join("slurm.conf")
    }

    /// A command of SLURM that speaks to this one.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("SLURM_CONF", self.configuration());
        command
    }

    /// Starts what is not running. Several processes may call it at once.
    ///
    /// # Errors
    ///
    /// When SLURM is not installed, or a daemon does not come up; the error has the end of its log.
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
    /// When a daemon does not end.
    pub fn stop(&self) -> Result<()> {
        if !self.folder.exists() {
            return Ok(());
        }
        let lock = File::create(self.folder.join("lock"))?;
        lock.lock().context("failed to lock the folder of SLURM")?;
        self.stop_daemons()
    }

    /// Whether it takes jobs.
    pub fn state(&self) -> SlurmState {
        let down: Vec<_> = DAEMONS.into_iter().filter(|daemon| self.running(daemon).is_none()).collect();
        if !down.is_empty() {
            return SlurmState::Down(format!("not running: {}", down.join(", ")));
        }
        let asked = output_within(self.command("sinfo").args(["--noheader", "--format=%T"]), STEP);
        match asked {
            Ok(Some(output)) if output.status.success() => {
                let state = String::from_utf8_lossy(&output.stdout).trim().to_owned();
                // A trailing mark (`idle*`, `down~`) is a node that does not answer, or is powered down.
                if ["idle", "mixed", "allocated", "completing"].contains(&state.as_str()) {
                    SlurmState::Up
                } else {
                    SlurmState::Down(format!("the node is {state}"))
                }
            }
            Ok(Some(output)) => SlurmState::Down(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Ok(None) => SlurmState::Down("the controller does not answer".to_owned()),
            Err(error) => SlurmState::Down(format!("sinfo: {error}")),
        }
    }

    /// Ends all jobs of this name.
    ///
    /// # Errors
    ///
    /// When `scancel` can't be run.
    pub fn cancel(&self, job: &str) -> Result<()> {
        for signal in ["--signal=KILL", "--quiet"] {
            output_within(self.command("scancel").args([signal, &format!("--name={job}")]), STEP)?;
        }
        Ok(())
    }

    fn write_files(&self) -> Result<()> {
        for folder in ["state", "spool"] {
            let folder = self.folder.join(folder);
            if folder.exists() {
                fs::remove_dir_all(&folder)?;
            }
            fs::create_dir_all(&folder)?;
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
        fs::write(self.configuration(), self.configuration_text()?)?;
        Ok(())
    }

    fn configuration_text(&self) -> Result<String> {
        let host = gethostname()?.to_string_lossy().into_owned();
        let short = host.split('.').next().unwrap_or(&host);
        let user = User::from_uid(Uid::current())?.context("this user has no name")?.name;
        let cpus = thread::available_parallelism()?;
        // Bound together, so that they differ.
        let ports = [TcpListener::bind(("127.0.0.1", 0))?, TcpListener::bind(("127.0.0.1", 0))?];
        let [controller, node] = [ports[0].local_addr()?.port(), ports[1].local_addr()?.port()];
        let (folder, sockets) = (self.folder.display(), self.sockets.display());
        Ok(format!(
            "ClusterName=isobar
SlurmctldHost={short}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={sockets}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
KillWait=5
NodeName={short} NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"
        ))
    }

    fn start_daemons(&self) -> Result<()> {
        let file = |name: &str| self.folder.join(name).into_os_string();
        let munged = |flag: &str, value: PathBuf| format!("--{flag}={}", value.display());
        let daemon = |name: &str| Command::new(on_path(name).unwrap_or_else(|| name.into()));
        let folder = &self.folder;
        self.start_daemon(
            "munged",
            // munge wants every folder above its files to be another's to read only; this key guards nothing.
            daemon("munged").args([
                "--force".to_owned(),
                munged("key-file", folder.join("munge.key")),
                munged("socket", self.sockets.join("munge")),
                munged("pid-file", folder.join("munged.pid")),
                munged("log-file", folder.join("munged.log")),
                munged("seed-file", folder.join("munged.seed")),
            ]),
        )?;
        let configuration = self.configuration();
        self.start_daemon("slurmctld", daemon("slurmctld").arg("-c").arg("-f").arg(&configuration))?;
        self.start_daemon("slurmd", daemon("slurmd").arg("-f").arg(&configuration))?;
        // The daemons append to their logs; the start is what matters after a failure.
        ensure!(Path::new(&file("slurmd.log")).exists(), "slurmd wrote no log");
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
                    let logs: Vec<_> = DAEMONS.into_iter().map(|daemon| self.tail(daemon)).collect();
                    bail!("SLURM did not come up ({why})\n{}", logs.join("\n"))
                }
                SlurmState::Down(_) => thread::sleep(Duration::from_millis(200)),
            }
        }
    }

    fn stop_daemons(&self) -> Result<()> {
        for daemon in DAEMONS.into_iter().rev() {
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
        (name.trim() == daemon && ours).then(|| Pid::from_raw(pid))
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
