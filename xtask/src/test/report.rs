//! Report at the end beside the counts: times, and the processor.

use std::{
    fmt, fs,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use isobar_harness::output_within;

/// Duration of each step, in the order of the first of each name. Steps may run side by side.
pub(super) struct Times {
    begun: Instant,
    steps: Vec<(String, Duration)>,
}

impl Times {
    pub(super) fn start() -> Self {
        Self { begun: Instant::now(), steps: Vec::new() }
    }

    /// Adds to the time of a step.
    pub(super) fn add(&mut self, name: &str, took: Duration) {
        match self.steps.iter_mut().find(|(known, _)| known == name) {
            Some((_, total)) => *total += took,
            None => self.steps.push((name.to_owned(), took)),
        }
    }
}

/// Time from which a part of a report has a line of its own.
const SHORT: Duration = Duration::from_secs(1);

impl fmt::Display for Times {
    /// The longest last, where a terminal and the end of a log show them; the short ones as one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (short, mut long): (Vec<_>, Vec<_>) = self.steps.iter().partition(|(_, took)| *took < SHORT);
        long.sort_by_key(|(_, took)| *took);
        let shorts = short.iter().map(|(_, took)| took).sum::<Duration>().as_secs_f64();
        writeln!(f, "where the time went, in seconds:")?;
        writeln!(f, "{shorts:9.1}  {} parts of less than {} s", short.len(), SHORT.as_secs())?;
        long.iter().try_for_each(|(name, took)| writeln!(f, "{:9.1}  {name}", took.as_secs_f64()))?;
        writeln!(f, "{:9.1}  in all, some steps side by side", self.begun.elapsed().as_secs_f64())
    }
}

/// Describes the processor, and which of its instruction sets libtorch uses, by the `isobar` program.
pub(super) fn processor(isobar: Option<&Path>) -> Vec<String> {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let (model, sets) = describe(&text);
    let mut lines = vec![format!("processor: {model}, {cores} cores, {sets}")];
    lines.extend(isobar.and_then(|program| libtorch(program, &[])));
    lines
}

/// Returns the line of `isobar check` about libtorch with these environment variables.
pub(super) fn libtorch(isobar: &Path, variables: &[(&str, String)]) -> Option<String> {
    let mut check = Command::new(isobar);
    check.arg("check").env("ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD", "SINGLE");
    check.envs(variables.iter().map(|(key, value)| (key, value)));
    let output = output_within(&mut check, Duration::from_secs(60)).ok()??;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().find_map(|line| line.strip_prefix("torch ")).map(|line| line.trim().to_owned())
}

/// Instruction sets by which numeric libraries choose their kernels.
const SETS: [&str; 14] = [
    "sse4_1",
    "sse4_2",
    "avx",
    "fma",
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_bf16",
    "amx_bf16",
    "asimd",
    "sve",
    "bf16",
];

/// The model and the instruction sets of the first processor in the text of `/proc/cpuinfo`.
pub(super) fn describe(cpuinfo: &str) -> (String, String) {
    let field = |names: &[&str]| {
        let mut pairs = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        pairs.find(|(name, _)| names.contains(&name.trim())).map(|(_, value)| value.trim())
    };
    let model = field(&["model name", "CPU part"]).unwrap_or(std::env::consts::ARCH).to_owned();
    let flags: Vec<_> = field(&["flags", "Features"]).unwrap_or_default().split_whitespace().collect();
    let sets: Vec<_> = SETS.into_iter().filter(|set| flags.contains(set)).collect();
    (model, if sets.is_empty() { "unknown instruction sets".to_owned() } else { sets.join(" ") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_a_name_are_added_and_the_longest_come_last() {
        let mut times = Times::start();
        for (name, took) in
            [("build", 20_000), ("c", 500), ("a", 15_000), ("b", 3_000), ("d", 200), ("a", 10_000)]
        {
            times.add(name, Duration::from_millis(took));
        }
        let names: Vec<_> = times.to_string().lines().skip(1).map(|line| line.trim().to_owned()).collect();
        assert_eq!(names[..4], ["0.7  2 parts of less than 1 s", "3.0  b", "20.0  build", "25.0  a"]);
        assert!(names[4].ends_with("in all, some steps side by side"));
    }

    #[test]
    fn processors_are_described() {
        let text =
            "processor\t: 0\nmodel name\t: A Processor\nflags\t\t: fpu sse4_2 avx avx2\n\nmodel name\t: B\n";
        assert_eq!(describe(text), ("A Processor".to_owned(), "sse4_2 avx avx2".to_owned()));
        assert_eq!(describe("").1, "unknown instruction sets");
    }
}
