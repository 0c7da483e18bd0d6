//! The registry of models: configurations by name, and the declared split of parameters over a mesh.

use std::time::Duration;

use isobar_array::{Array, Generator, Window};
use isobar_collectives::threads;
use isobar_mesh::DeviceMesh;
use isobar_models::{
    AfnoConfig, Architecture, Batch, DitConfig, EmbeddingType, FieldSpec, FnoConfig, GridPositions, GridType,
    ModAfnoConfig, Mode, Model, ModelConfig, PerDim, Result, SongUNetConfig, SongUNetPosEmbdConfig,
    SrResNetConfig, VitConfig, registered,
};
use isobar_shard::{Init, MeshParams, ParamCount, ParamStore, Params, Placement, Scope, ShardTensor};
use rstest::rstest;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tch::{Device, Kind, Tensor};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

/// A model of a program's own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GainConfig {
    /// Channels of the fields.
    channels: usize,
}

struct Gain<A>(A);

impl<A: Array> Model<A> for Gain<A> {
    fn forward(&self, batch: &Batch<A>, _mode: Mode<'_>) -> Result<Batch<A>> {
        Ok(Batch::of_fields(batch.require(GainConfig::NAME, Batch::<A>::FIELDS)?.mul(&self.0)?))
    }
}

impl Architecture for GainConfig {
    const NAME: &'static str = "gain";

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        let shape = [self.channels as i64, 1, 1];
        Ok(Box::new(Gain(params.param("weight", &shape, Init::Constant(2.0), Placement::Replicate)?)))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_channels(Self::NAME, ("channels", self.channels), ("channels", self.channels))
    }
}

isobar_models::register!(GainConfig);

#[test]
fn all_models_are_registered_once() {
    let names: Vec<&str> = registered().iter().map(|entry| entry.name()).collect();
    let built_in = [
        "afno",
        "aurora",
        "cnext_unet",
        "conv_net",
        "dhariwal_unet",
        "distributed_afno",
        "dit",
        "dlwp",
        "edm_precond",
        "edm_precond_super_resolution",
        "edm_preconditioner",
        "fengwu",
        "flare",
        "fno",
        "fully_connected",
        "geo_transolver",
        "healpix_unet",
        "mod_afno",
        "pangu",
        "pix2pix",
        "song_unet",
        "song_unet_pos_embd",
        "song_unet_pos_lt_embd",
        "sr_res_net",
        "swin_rnn",
        "transolver",
        "unet",
        "vit",
    ];
    let page = include_str!("../../../docs/models.md");
    for name in built_in {
        assert!(page.contains(&format!("`{name}`")), "docs/models.md lacks {name}");
    }
    for name in built_in.into_iter().chain(["gain"]) {
        assert_eq!(names.iter().filter(|other| **other == name).count(), 1, "{name} in {names:?}");
    }
    isobar_models::register::<GainConfig>();
    assert_eq!(registered().len(), names.len());
}

#[test]
fn a_programs_own_model_is_named_in_a_table() {
    let config: ModelConfig = serde_json::from_value(json!({ "type": "gain", "channels": 2 })).unwrap();
    assert_eq!(serde_json::to_value(&config).unwrap(), json!({ "type": "gain", "channels": 2 }));
    assert_eq!(config, ModelConfig::new(GainConfig { channels: 2 }));
    assert_eq!(config.count(&ParamCount::default).unwrap().trained, 2);
    let model = config.build::<Tensor>(&mut ParamStore::new(Generator::new(1))).unwrap();
    let x = Tensor::ones([1, 2, 3, 3], (Kind::Float, Device::Cpu));
    let y = model.forward(&Batch::of_fields(x.shallow_clone()), Mode::Eval).unwrap();
    assert_eq!(y.get("fields").unwrap(), &(x * 2.0));
    let error = model.forward(&Batch::default(), Mode::Eval).err().unwrap().to_string();
    assert!(error.contains("no array \"fields\""), "{error}");
    let schema = schemars::schema_for!(ModelConfig).to_value().to_string();
    assert!(schema.contains("Channels of the fields.") && schema.contains("\"const\":\"gain\""), "{schema}");
}

#[rstest]
#[case(json!({ "type": "afnoo" }), "did you mean \"afno\"?")]
#[case(json!({ "type": "transformer" }), "the registered models are afno, aurora, cnext_unet, conv_net, ")]
#[case(json!({ "channels": 2 }), "missing field `type`")]
#[case(json!({ "type": "gain" }), "missing field `channels`")]
#[case(json!({ "type": "gain", "channels": 2, "width": 3 }), "unknown field `width`")]
fn a_wrong_table_is_an_error(#[case] table: serde_json::Value, #[case] words: &str) {
    let error = serde_json::from_value::<ModelConfig>(table).unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
}

/// Tables that earlier versions wrote, with and without keys that have defaults.
#[test]
fn earlier_tables_load() {
    let default = serde_json::to_value(ModelConfig::default()).unwrap();
    assert_eq!(default["type"], "afno");
    let fno = json!({ "type": "fno", "in_channels": 1, "out_channels": 1, "num_fno_modes": [4, 4] });
    let config: ModelConfig = serde_json::from_value(fno).unwrap();
    let modes = PerDim::Each(vec![4, 4]);
    assert_eq!(config, ModelConfig::new(FnoConfig { num_fno_modes: modes, ..FnoConfig::new(1, 1) }));
    let unet = json!({ "type": "unet", "in_channels": 1, "out_channels": 1, "conv_activation": null });
    assert_eq!(serde_json::from_value::<ModelConfig>(unet).unwrap().name(), "unet");
}

/// Keys that the model accepts for configurations of the original one, and does not read.
#[test]
fn a_model_names_the_keys_that_it_does_not_read() {
    let unread = |table| serde_json::from_value::<ModelConfig>(table).unwrap().unread();
    let unet = json!({ "type": "song_unet_pos_embd", "img_resolution": 8, "in_channels": 5, "out_channels": 1,
        "amp_mode": true, "profile_mode": false });
    assert_eq!(unread(unet), ["amp_mode"]);
    let dit = json!({ "type": "dit", "input_size": 16, "in_channels": 1, "layernorm_backend": "apex",
        "block_kwargs": { "intermediate_dropout": true } });
    assert_eq!(unread(dit), ["layernorm_backend", "block_kwargs.intermediate_dropout"]);
    assert_eq!(afno().unread(), [""; 0]);
}

#[test]
fn a_check_names_the_setting_that_mends_it() {
    let fields =
        FieldSpec { source: "data.h5".into(), extents: vec![8, 8, 8], in_channels: 1, ..Default::default() };
    let fields = FieldSpec { out_channels: 1, ..fields };
    let error = |config: ModelConfig, fields: &FieldSpec| config.check(fields).unwrap_err().to_string();
    let super_resolution = SrResNetConfig::new(1, 1);
    ModelConfig::new(super_resolution.clone()).check(&fields).unwrap();
    let odd = FieldSpec { extents: vec![8, 12, 4], ..fields.clone() };
    let said = error(ModelConfig::new(super_resolution), &odd);
    assert!(said.contains("--set model.scaling_factor=4"), "{said}");
    let plane = FieldSpec { extents: vec![8, 8], ..fields };
    let modulated = ModAfnoConfig { in_channels: 1, out_channels: 1, ..ModAfnoConfig::new([8, 8]) };
    let said = error(ModelConfig::new(modulated.clone()), &plane);
    assert!(said.contains("reads the array \"time\""), "{said}");
    let plane = FieldSpec { arrays: vec!["time".into()], ..plane };
    ModelConfig::new(modulated).check(&plane).unwrap();
    let said = error(ModelConfig::new(AfnoConfig::new([16, 16], 2, 1)), &plane);
    assert!(said.contains("--set 'model.inp_shape=[8, 8]'"), "{said}");
}

fn afno() -> ModelConfig {
    ModelConfig::new(AfnoConfig {
        patch_size: [2, 2],
        embed_dim: 8,
        depth: 1,
        num_blocks: 2,
        ..AfnoConfig::new([12, 8], 2, 2)
    })
}

fn fno() -> ModelConfig {
    ModelConfig::new(FnoConfig {
        num_fno_modes: PerDim::All(4),
        latent_channels: 4,
        num_fno_layers: 2,
        ..FnoConfig::new(2, 2)
    })
}

fn dit() -> ModelConfig {
    let positions = DitConfig {
        patch_size: PerDim::All(2),
        hidden_size: 8,
        depth: 1,
        num_heads: 2,
        dit_initialization: false,
        ..DitConfig::new([12, 8], 2)
    };
    ModelConfig::new(positions)
}

fn vit() -> ModelConfig {
    let positions = VitConfig { embed_dim: 8, depth: 1, num_heads: 2, ..VitConfig::new([12, 8], 2, 2) };
    ModelConfig::new(VitConfig { patch_size: PerDim::All(2), ..positions })
}

fn song_unet_pos_embd() -> ModelConfig {
    let network = SongUNetConfig {
        model_channels: 4,
        channel_mult: vec![1, 1],
        num_blocks: 1,
        embedding_type: EmbeddingType::Zero,
        attn_resolutions: Vec::new(),
        ..SongUNetConfig::new([12, 8], 5, 2)
    };
    let positions = GridPositions { gridtype: GridType::Learnable, n_grid_channels: 3 };
    ModelConfig::new(SongUNetPosEmbdConfig { positions, network })
}

/// Bytes of the parameters on this rank whose names contain `part`.
fn bytes(store: &ParamStore, part: &str) -> usize {
    let named = store.trainable().filter(|parameter| parameter.name.contains(part));
    named.map(|p| p.tensor.numel() * p.tensor.kind().elt_size_in_bytes()).sum()
}

/// Each of two ranks holds half of what the declaration splits, and outputs and gradients are those of one rank.
#[rstest]
#[case::afno(afno(), "pos_embed")]
#[case::fno(fno(), ".weights")]
#[case::dit(dit(), "pos_embed")]
#[case::vit(vit(), "pos_embed")]
#[case::song_unet_pos_embd(song_unet_pos_embd(), "pos_embd")]
fn two_ranks_hold_half_of_each(
    #[case] config: ModelConfig,
    #[case] split: &str,
    #[values(2, 3)] ranks: usize,
) {
    let parts = threads::run(ranks, Duration::from_secs(60), |group| {
        let input = || Generator::new(7).normal(&Window::whole(&[2, 2, 12, 8]), 0.0, 1.0, DOUBLE).unwrap();
        let mut whole = ParamStore::new(Generator::new(1)).with_options(DOUBLE.0, DOUBLE.1);
        let model = config.build::<Tensor>(&mut whole).unwrap();
        let mut want = model.forward(&Batch::of_fields(input()), Mode::Eval).unwrap();
        let want = want.take("fields").unwrap();
        want.square().sum(DOUBLE.0).backward();

        let mesh = DeviceMesh::new(&group, &[ranks as i64], &["domain"]).unwrap();
        let mut store = ParamStore::new(Generator::new(1)).with_options(DOUBLE.0, DOUBLE.1);
        let sharding = config.sharding();
        let mut params = MeshParams::new(&mut store, &mesh).laid_out(sharding.parameter_layouts()).pending();
        let model = config.build::<ShardTensor>(&mut params).unwrap();
        assert!(params.unmatched().is_empty());
        let x = ShardTensor::distribute(&input(), &mesh, &[Placement::Shard(2)]).unwrap();
        let mut output = model.forward(&Batch::of_fields(x), Mode::Eval).unwrap();
        let output = output.take("fields").unwrap();
        output.mul(&output).unwrap().sum().unwrap().backward().unwrap();
        for own in store.trainable().filter(|own| own.shard.is_some()) {
            let full = whole.get(&own.name).unwrap();
            let start = &own.shard.as_ref().unwrap().start;
            let cut = |x: &Tensor| {
                let dims = start.iter().zip(own.tensor.size()).enumerate();
                dims.fold(x.shallow_clone(), |x, (dim, (&start, extent))| x.narrow(dim as i64, start, extent))
            };
            assert_eq!(own.tensor.detach(), cut(&full.tensor.detach()), "{}", own.name);
            // No rank has contributions to another's box: the gradient is complete.
            let difference = (own.tensor.grad() - cut(&full.tensor.grad())).abs();
            let far = if difference.numel() == 0 { 0.0 } else { difference.max().double_value(&[]) };
            assert!(far < 1e-9, "{}: {far}", own.name);
        }
        let far = (output.full_tensor(None).unwrap().detach() - want.detach()).abs().max().double_value(&[]);
        assert!(far < 1e-10, "{far}");
        (bytes(&store, split), bytes(&whole, split))
    });
    let all = parts[0].1;
    let parts: Vec<usize> = parts.into_iter().map(|(own, _)| own).collect();
    assert!(all > 0 && parts.iter().sum::<usize>() == all, "{parts:?} of {all}");
    if ranks == 2 {
        assert_eq!(parts, [all / 2; 2]);
    }
}
