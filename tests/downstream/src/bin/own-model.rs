//! The command `isobar` with a model of the program's own: `[model] type = "local_mix"`.

use isobar::models::{Architecture, FieldSpec, Result};
use isobar::prelude::*;
use isobar::schemars::JsonSchema;
use isobar::serde::{Deserialize, Serialize};

/// Two convolutions of three points with a GELU between, added to the input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(crate = "isobar::serde", deny_unknown_fields)]
#[schemars(crate = "isobar::schemars")]
struct LocalMixConfig {
    /// Channels of the fields.
    channels: usize,
    /// Channels between the convolutions.
    #[serde(default = "width")]
    width: usize,
}

fn width() -> usize {
    8
}

struct LocalMix<A>([A; 2]);

impl<A: Array> Model<A> for LocalMix<A> {
    fn forward(&self, batch: &Batch<A>, _mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(LocalMixConfig::NAME, Batch::<A>::FIELDS)?;
        let same = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
        let hidden = x.conv(&self.0[0], None, &same)?.gelu()?;
        Ok(Batch::of_fields(hidden.conv(&self.0[1], None, &same)?.add(x)?))
    }
}

impl Architecture for LocalMixConfig {
    const NAME: &'static str = "local_mix";

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        let [channels, width] = [self.channels as i64, self.width as i64];
        let mut weight = |name, outputs, inputs| {
            let start = Init::FanIn(9 * inputs);
            params.param(name, &[outputs, inputs, 3, 3], start, Placement::Replicate)
        };
        Ok(Box::new(LocalMix([weight("first", width, channels)?, weight("second", channels, width)?])))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_channels(Self::NAME, ("channels", self.channels), ("channels", self.channels))
    }
}

fn main() -> std::process::ExitCode {
    isobar::App::new().model::<LocalMixConfig>().main()
}
