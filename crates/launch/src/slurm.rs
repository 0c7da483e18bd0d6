//! SLURM's variables of a step: the only place that reads its number of tasks.

use crate::Environment;

/// SLURM numbers its batch, extern, interactive and pending steps from here up.
const FIRST_SPECIAL_STEP: u64 = 0xFFFF_FFF0;

/// Variables with the number of a step's tasks: the first that is set counts. A step may have fewer tasks than its
/// job; older SLURM sets only the other two, of the step in its tasks and of the job in the job's shell.
const SIZES: [&str; 3] = ["SLURM_STEP_NUM_TASKS", "SLURM_NPROCS", "SLURM_NTASKS"];

/// Variables with the number of a step: the first that is set counts.
const IDS: [&str; 2] = ["SLURM_STEP_ID", "SLURM_STEPID"];

/// Step of SLURM that a process is a task of.
///
/// ```
/// use isobar_launch::{Environment, slurm::Step};
///
/// let variables = [("SLURM_PROCID", "1"), ("SLURM_STEPID", "0"), ("SLURM_NTASKS", "4")];
/// let environment = Environment::from_iter(variables);
/// let step = Step::of(&environment).unwrap();
/// assert_eq!((step.rank, step.tasks, step.id), (Some(1), Some(4), Some("0")));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step<'a> {
    /// Number of this task (`SLURM_PROCID`).
    pub rank: Option<usize>,
    /// Number of tasks of the step.
    pub tasks: Option<usize>,
    /// Variable with the number of tasks: `SLURM_STEP_NUM_TASKS`, `SLURM_NPROCS` or `SLURM_NTASKS`.
    pub size_variable: &'static str,
    /// Number of the step in its job (`SLURM_STEP_ID` or `SLURM_STEPID`).
    pub id: Option<&'a str>,
}

impl<'a> Step<'a> {
    /// Returns the step of this process; `None` outside of srun.
    #[must_use]
    pub fn of(environment: &'a Environment) -> Option<Self> {
        in_slurm_step(environment).then(|| Self::read(environment))
    }

    /// Reads the variables, also those of a process that is in no step.
    pub(crate) fn read(environment: &'a Environment) -> Self {
        let size_variable = SIZES.into_iter().find(|name| environment.has(name)).unwrap_or("SLURM_NPROCS");
        Self {
            rank: number(environment, "SLURM_PROCID"),
            tasks: number(environment, size_variable),
            size_variable,
            id: IDS.into_iter().find_map(|name| environment.get(name)),
        }
    }
}

/// Returns whether srun, or a program that sets srun's variables, started this process.
#[must_use]
pub fn in_slurm_step(environment: &Environment) -> bool {
    let Some(procid) = environment.get("SLURM_PROCID") else { return false };
    let id = Step::read(environment).id;
    if id.and_then(|id| id.parse::<u64>().ok()).is_some_and(|id| id >= FIRST_SPECIAL_STEP) {
        return false;
    }
    let in_step = id.is_some() || environment.has("SLURM_LAUNCH_NODE_IPADDR");
    // The shell of a job has a job's number and is process 0 of no step.
    in_step || !(procid == "0" && environment.has("SLURM_JOB_ID"))
}

/// Returns the number of tasks that a job of SLURM asked for, in its shell.
#[must_use]
pub fn job_tasks(environment: &Environment) -> Option<usize> {
    number(environment, "SLURM_NTASKS").or_else(|| number(environment, "SLURM_NPROCS"))
}

fn number(environment: &Environment, name: &str) -> Option<usize> {
    environment.get(name)?.parse().ok()
}
