//! Choice of the process that prints an error of the launcher's variables.

use crate::Environment;
use crate::LaunchError;
use crate::slurm::Step;

/// Returns whether this process prints an error of its launcher's variables: the one that they call rank 0, if
/// rank 0 has the same error, and each that has an error of its own.
#[must_use]
pub fn reports(environment: &Environment, error: &LaunchError) -> bool {
    match error {
        // Rank 0 does not fail.
        LaunchError::RankOutOfRange { .. } => true,
        LaunchError::NotANumber { variable, .. } if is_of_one_rank(variable) => true,
        // Where all processes have the same `RANK`, the one that the launcher gave that number does not fail.
        LaunchError::Disagreement { variable: "RANK", value, other_value, .. } => {
            other_value == "0" || (value == "0" && other_value == "1")
        }
        _ => rank(environment).is_none_or(|rank| rank == 0),
    }
}

/// Returns whether the value of a variable differs between the ranks of a launch.
fn is_of_one_rank(variable: &str) -> bool {
    ["RANK", "RANKID", "PROCID", "LOCALID"].iter().any(|end| variable.ends_with(end))
}

/// Returns the rank by the launcher that sets its variables for each process, else by the variables that a user
/// may have set. A launch of one process, around the launch of the ranks or left over, does not count.
fn rank(environment: &Environment) -> Option<usize> {
    let number = |name: &str| environment.get(name)?.parse::<usize>().ok();
    let slurm = Step::of(environment);
    [
        (number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_SIZE")),
        (number("PMI_RANK"), number("PMI_SIZE")),
        (slurm.and_then(|step| step.rank), slurm.and_then(|step| step.tasks)),
        (number("RANK"), number("WORLD_SIZE")),
        (number("PMIX_RANK"), None),
        (number("LOCAL_RANK"), number("LOCAL_WORLD_SIZE")),
    ]
    .into_iter()
    .find_map(|(rank, size)| rank.filter(|_| size != Some(1)))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{detect, forced_method};

    /// The ranks whose processes print their error; `None` for processes without an error.
    fn reporting(processes: &[String]) -> Vec<Option<bool>> {
        let reports = |variables: &String| {
            let pairs = variables.split_whitespace().filter_map(|pair| pair.split_once('='));
            let environment: Environment = pairs.collect();
            let launch = forced_method(&environment).and_then(|forced| detect(&environment, forced));
            launch.err().map(|error| super::reports(&environment, &error))
        };
        processes.iter().map(reports).collect()
    }

    #[rstest]
    #[case::size_left_over("WORLD_SIZE=1 RANK=0 OMPI_COMM_WORLD_RANK=@ OMPI_COMM_WORLD_SIZE=3", &[Some(true), Some(false), Some(false)])]
    #[case::no_size("RANK=@ MASTER_ADDR=localhost MASTER_PORT=1234", &[Some(true), Some(false), Some(false)])]
    #[case::no_port("RANK=@ WORLD_SIZE=3 MASTER_ADDR=localhost", &[Some(true), Some(false), Some(false)])]
    #[case::no_rank("WORLD_SIZE=3 OMPI_COMM_WORLD_RANK=@ OMPI_COMM_WORLD_SIZE=3", &[Some(true), Some(false), Some(false)])]
    #[case::nobody_knows("WORLD_SIZE=3", &[Some(true); 3])]
    #[case::local("LOCAL_RANK=@", &[Some(true), Some(false), Some(false)])]
    #[case::around("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 RANK=@", &[Some(true), Some(false), Some(false)])]
    #[case::method("RANK=@ WORLD_SIZE=3 ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD=magic", &[Some(true), Some(false), Some(false)])]
    #[case::srun("SLURM_STEPID=0 SLURM_PROCID=@ SLURM_NTASKS=3 RANK=@", &[Some(true), Some(false), Some(false)])]
    #[case::one_rank_for_all("RANK=0 WORLD_SIZE=3 MASTER_ADDR=a MASTER_PORT=1 OMPI_COMM_WORLD_RANK=@ OMPI_COMM_WORLD_SIZE=3", &[None, Some(true), Some(false)])]
    #[case::too_few("RANK=@ WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", &[None, None, Some(true)])]
    #[case::no_number("RANK=x@ WORLD_SIZE=2", &[Some(true); 3])]
    fn one_process_prints(#[case] variables: &str, #[case] prints: &[Option<bool>]) {
        let processes: Vec<String> = (0..3).map(|rank| variables.replace('@', &rank.to_string())).collect();
        assert_eq!(reporting(&processes), prints);
    }
}
