//! Detection of mixed-up launchers, from the environment variables of one process.

use isobar_launch::slurm::{Step, job_tasks};
use isobar_launch::{Environment, Method};

use super::Finding;

/// Launchers that do not fit together, by the variables that they left: of a process that takes itself for one of `world_size`
/// ranks, since it learnt so by `method`, which was `forced` or found.
///
/// Variables that contradict each other, and ranks of srun without a PMIx server, are errors before it comes to this: see
/// [`detect`](isobar_launch::detect) and [`transport`](isobar_launch::transport).
///
/// ```
/// use isobar_manager::{Environment, checks, launch::Method};
///
/// // A job of SLURM with four tasks, in which a program was started without srun.
/// let variables = Environment::from_iter([("SLURM_JOB_ID", "7"), ("SLURM_NTASKS", "4")]);
/// let found = checks::environment(&variables, Method::Single, false, 1);
/// assert!(found[0].text.contains("start it by `srun`"));
/// ```
#[must_use]
pub fn environment(
    environment: &Environment,
    method: Method,
    forced: bool,
    world_size: usize,
) -> Vec<Finding> {
    let number = |name| environment.get(name).and_then(|value| value.parse::<usize>().ok());
    let step = Step::of(environment);
    let mut found = Vec::new();
    if matches!(method, Method::Explicit | Method::Threads) {
        // The program knows better.
        return found;
    }
    let launchers = [
        ("srun", step.map_or("", |step| step.size_variable), step.and_then(|step| step.tasks)),
        ("mpirun", "OMPI_COMM_WORLD_SIZE", number("OMPI_COMM_WORLD_SIZE")),
        ("mpiexec", "PMI_SIZE", number("PMI_SIZE")),
    ];
    let torchruns = environment.has("TORCHELASTIC_RUN_ID") && number("GROUP_WORLD_SIZE") == Some(1);
    let several = launchers.into_iter().find_map(|(by, variable, ranks)| {
        ranks.filter(|&ranks| ranks > 1).map(|ranks| (by, variable, ranks))
    });
    // A launcher of PyTorch's kind, whose variables a method that was chosen leaves aside.
    let several = several.or_else(|| {
        let ranks = number("WORLD_SIZE").filter(|&ranks| ranks > 1 && world_size == 1 && !torchruns)?;
        Some(("a launcher", "WORLD_SIZE", ranks))
    });
    match several {
        Some((by, variable, ranks)) if torchruns => found.push(Finding::error(format!(
            "{by} started {ranks} processes ({variable}), and torchrun in each a job of its own of {world_size} ranks, which all \
             write to the same folder; give torchrun --nnodes={ranks} and a rendezvous, or start the ranks by {by} alone"
        ))),
        Some((by, variable, ranks)) if world_size == 1 => {
            let text = format!(
                "{by} started {ranks} processes ({variable}), and each takes itself for the only rank, by the method {method}: all \
                 train alone, and write to the same folder"
            );
            found.push(if forced {
                Finding::warning(format!(
                    "{text}; if they are one job, --set distributed.method=auto and unset ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD"
                ))
            } else {
                Finding::error(format!("{text}; start them by one launcher, or one of them alone"))
            });
        }
        _ => {}
    }
    if let (Method::Single, false, Some(tasks), true) =
        (method, forced || step.is_some(), job_tasks(environment), environment.has("SLURM_JOB_ID"))
        && tasks > 1
    {
        found.push(Finding::warning(format!(
            "this job of SLURM has {tasks} tasks, and this is one process outside of srun; start it by `srun` or `mpirun`, or ask \
             for one task"
        )));
    }
    found
}
