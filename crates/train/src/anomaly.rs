//! Search for the origin of values that are not finite: repeats a step under observation.

use isobar_collectives::Group;
use isobar_collectives::trace::Label;
use isobar_torch::observe::{NonFinite, first_non_finite};
use tch::Tensor;

use crate::error::Result;
use crate::params::Parameters;

/// Runs `again`, which computes what gave values that are not finite, and says on which ranks which operators made them. Every
/// rank calls, whether it has such values or not. None where nothing is seen this time.
pub(crate) fn origin(
    params: &Parameters,
    world: &Group,
    again: impl FnOnce() -> Result<()>,
) -> Option<String> {
    let marked: Vec<&Tensor> = params.iter().map(|param| &param.tensor).collect();
    let flight = world.flight();
    let label = || match Label::current().name() {
        Some(module) => format!("{}, in {module}", flight.phase().0),
        None => flight.phase().0.to_string(),
    };
    let seen = first_non_finite(&marked, label, again);
    // Others wait for a rank that fails alone.
    let (done, found) = match seen {
        Ok(seen) => seen,
        Err(error) => {
            world.leave(&error.to_string());
            return None;
        }
    };
    if let Err(error) = done {
        if !error.is_shared() {
            world.leave(&error.to_string());
        }
        return None;
    }
    let own = finding(&found, params);
    let all = world.all_gather_bytes(&own.encode()).ok()?;
    let all: Vec<(usize, Finding)> =
        all.iter().enumerate().filter_map(|(rank, bytes)| Some((rank, Finding::decode(bytes)?))).collect();
    // The error names the ranks that produced them, not those that received them.
    let makers = all.iter().filter(|(_, finding)| finding.made).collect::<Vec<_>>();
    let mut chosen = if makers.is_empty() { all.iter().collect() } else { makers };
    // Infinities may be meant.
    chosen.sort_by_key(|(_, finding)| !finding.nan);
    let mut text: Vec<String> =
        chosen.iter().take(SHOWN).map(|(rank, finding)| format!("rank {rank}: {}", finding.text)).collect();
    if chosen.len() > SHOWN {
        text.push(format!("and {} ranks more", chosen.len() - SHOWN));
    }
    (!text.is_empty()).then(|| text.join("; "))
}

/// Number of ranks that are named.
const SHOWN: usize = 4;

/// Findings of a rank.
struct Finding {
    /// True if an operator produced them from finite values.
    made: bool,
    /// True if some are NaN, not only infinities.
    nan: bool,
    text: String,
}

impl Finding {
    fn encode(&self) -> Vec<u8> {
        [&[u8::from(self.made), u8::from(self.nan)], self.text.as_bytes()].concat()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let ([made, nan], text) = bytes.split_first_chunk()?;
        let text = String::from_utf8_lossy(text).into_owned();
        (!text.is_empty()).then_some(Self { made: *made != 0, nan: *nan != 0, text })
    }
}

fn finding(found: &[NonFinite], params: &Parameters) -> Finding {
    let text: Vec<String> = found.iter().map(|found| line(found, params)).collect();
    let (made, nan) = (found.iter().any(|found| found.inputs_finite), found.iter().any(|found| found.nan));
    Finding { made, nan, text: text.join(", then ") }
}

fn line(found: &NonFinite, params: &Parameters) -> String {
    let NonFinite { operator, shape, count, nan, inputs_finite, marked, label } = found;
    let what = if *nan { "NaN" } else { "infinities" };
    let elements: i64 = shape.iter().product();
    let from = if *inputs_finite { "of finite values" } else { "of values that are not finite already" };
    let place = match marked.and_then(|at| params.iter().nth(at)) {
        Some(param) => format!("at parameter {:?}", param.name),
        None => "before any parameter".to_owned(),
    };
    format!("{operator} ({label}, {place}) made {what} {from}: {count} of {elements} elements {shape:?}")
}
