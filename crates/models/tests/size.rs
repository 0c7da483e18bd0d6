//! Models counted from their configurations: as many parameters as are made, at once for any number of layers.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_array::Generator;
use isobar_models::{
    Activation, Afno, AfnoConfig, Architecture, Aurora, AuroraConfig, CNextUNet, CNextUNetConfig, ConvNet,
    ConvNetConfig, DecoderType, DetokenizerKind, DistributedAfno, DistributedAfnoConfig, Dit, DitConfig,
    Dlwp, DlwpConfig, EdmPrecond, EdmPrecondConfig, EdmPrecondSuperResolution,
    EdmPrecondSuperResolutionConfig, EdmPreconditioner, EdmPreconditionerConfig, EncoderType, Factorization,
    Fengwu, FengwuConfig, FieldSpec, Flare, FlareConfig, Fno, FnoConfig, FullyConnected,
    FullyConnectedConfig, GeoAttention, GeoTransolver, GeoTransolverConfig, ModAfno, ModAfnoConfig,
    ModelConfig, Pangu, PanguConfig, PerDim, Pix2Pix, Pix2PixConfig, SongUNet, SongUNetConfig,
    SongUNetPosEmbd, SongUNetPosEmbdConfig, SongUNetPosLtEmbd, SongUNetPosLtEmbdConfig, SrResNet,
    SrResNetConfig, SwinRnn, SwinRnnConfig, Transolver, TransolverConfig, UNet, UNetConfig, Upsampling, Vit,
    VitConfig,
};
use isobar_shard::{ModelSize, ParamCount, ParamStore};
use rstest::rstest;

/// Counts the parameters of a store.
fn made(store: &ParamStore) -> ModelSize {
    let elements = |trainable: bool| {
        let of = store.parameters().iter().filter(|p| p.trainable == trainable);
        of.map(|p| p.tensor.numel() as u128).sum()
    };
    let tensors = store.parameters().len() as u128;
    ModelSize { trained: elements(true), buffers: elements(false), tensors }
}

fn store() -> ParamStore {
    ParamStore::new(Generator::new(1))
}

#[track_caller]
fn counts(config: &impl Architecture, build: impl FnOnce(&mut ParamStore)) {
    let mut store = store();
    build(&mut store);
    assert_eq!(config.count(&ParamCount::default).unwrap(), made(&store));
}

/// Numbers of layers: fewer and more than are built to count them.
#[rstest]
fn a_model_has_as_many_parameters_as_were_counted(#[values(0, 1, 2, 3, 7)] layers: usize) {
    let small = |inp_shape| AfnoConfig {
        patch_size: [4, 4],
        embed_dim: 8,
        num_blocks: 2,
        depth: layers,
        ..AfnoConfig::new(inp_shape, 2, 3)
    };
    let config = small([8, 12]);
    counts(&config, |store| drop(Afno::new(&config, store).unwrap()));

    let config = DistributedAfnoConfig {
        patch_size: 4,
        embed_dim: 8,
        num_blocks: 2,
        depth: layers,
        ..DistributedAfnoConfig::new([8, 12], 2)
    };
    counts(&config, |store| drop(DistributedAfno::new(&config, store).unwrap()));

    let mut config = ModAfnoConfig {
        in_channels: 2,
        out_channels: 3,
        patch_size: [4, 4],
        embed_dim: 8,
        mod_dim: 6,
        depth: layers,
        ..ModAfnoConfig::new([8, 12])
    };
    (config.embed_model.dim, config.embed_model.depth) = (6, layers + 1);
    counts(&config, |store| drop(ModAfno::new(&config, store).unwrap()));

    let config = SrResNetConfig { n_resid_blocks: layers, conv_layer_size: 4, ..SrResNetConfig::new(1, 2) };
    counts(&config, |store| drop(SrResNet::new(&config, store).unwrap()));

    let config = Pix2PixConfig {
        n_blocks: layers,
        conv_layer_size: 4,
        batch_norm: true,
        ..Pix2PixConfig::new(1, 2, 2)
    };
    counts(&config, |store| drop(Pix2Pix::new(&config, store).unwrap()));

    let config = CNextUNetConfig {
        blocks_per_stage: layers,
        blocks_at_neck: 2 * layers,
        stages: 2,
        init_features: 4,
        ..CNextUNetConfig::new(2, 3, &[8, 12])
    };
    counts(&config, |store| drop(CNextUNet::new(&config, store).unwrap()));

    let config = ConvNetConfig { hidden_channels: 3, depth: layers.max(1), ..ConvNetConfig::new(2, 3, 2) };
    counts(&config, |store| drop(ConvNet::new(&config, store).unwrap()));

    let song = SongUNetConfig {
        model_channels: 4,
        channel_mult: vec![1, 2, 3],
        num_blocks: layers,
        attn_resolutions: vec![8, 2],
        encoder_type: EncoderType::Residual,
        decoder_type: DecoderType::Skip,
        ..SongUNetConfig::new([8, 16], 3, 1)
    };
    counts(&song, |store| drop(SongUNet::new(&song, store).unwrap()));
    let config = SongUNetPosEmbdConfig::new(SongUNetConfig { in_channels: 5, ..song.clone() });
    counts(&config, |store| drop(SongUNetPosEmbd::new(&config, store).unwrap()));
    let config = SongUNetPosLtEmbdConfig::new(2, SongUNetConfig { in_channels: 7, ..song.clone() });
    counts(&config, |store| drop(SongUNetPosLtEmbd::new(&config, store).unwrap()));
    let config = EdmPrecondSuperResolutionConfig::new(song.clone());
    counts(&config, |store| drop(EdmPrecondSuperResolution::new(&config, store).unwrap()));
    let config = EdmPrecondConfig::new(1, song.clone());
    counts(&config, |store| drop(EdmPrecond::new(&config, store).unwrap()));
    let config = EdmPreconditionerConfig::new(ModelConfig::new(song));
    counts(&config, |store| drop(EdmPreconditioner::new(&config, store).unwrap()));
    let config = DlwpConfig { nr_initial_channels: 2, depth: layers + 1, ..DlwpConfig::new(2, 3) };
    counts(&config, |store| drop(Dlwp::new(&config, store).unwrap()));
    let transolver = TransolverConfig {
        n_layers: layers + 1,
        n_hidden: 8,
        n_head: 2,
        unified_pos: true,
        reference: 3,
        structured_shape: Some(vec![4, 5]),
        time_input: true,
        ..TransolverConfig::new(2, 3)
    };
    counts(&transolver, |store| drop(Transolver::new(&transolver, store).unwrap()));

    let config = FlareConfig { n_layers: layers + 1, n_hidden: 8, n_head: 2, ..FlareConfig::new(2, 3) };
    counts(&config, |store| drop(Flare::new(&config, store).unwrap()));

    for (geometry_dim, attention_type) in [(None, GeoAttention::Gale), (Some(2), GeoAttention::GaleFa)] {
        let config = GeoTransolverConfig {
            n_layers: layers + 1,
            n_hidden: 8,
            n_head: 2,
            geometry_dim,
            attention_type,
            structured_shape: Some(vec![4, 5]),
            ..GeoTransolverConfig::new(2, 3)
        };
        counts(&config, |store| drop(GeoTransolver::new(&config, store).unwrap()));
    }
    let mut config = DitConfig {
        hidden_size: 8,
        num_heads: 2,
        depth: layers,
        condition_dim: Some(3),
        drop_path_rates: Some(vec![0.1; layers]),
        detokenizer: DetokenizerKind::ProjReshape2dConv,
        ..DitConfig::new([16, 8], 2)
    };
    config.detokenizer_kwargs.conv_layers = Some(layers + 1);
    counts(&config, |store| drop(Dit::new(&config, store).unwrap()));

    let config = VitConfig { embed_dim: 8, num_heads: 2, depth: layers, ..VitConfig::new([16, 8], 1, 2) };
    counts(&config, |store| drop(Vit::new(&config, store).unwrap()));

    // These have a layer at least.
    for (dimension, factorization) in
        [(1, Factorization::None), (2, Factorization::Tucker), (4, Factorization::Cp)]
    {
        let config = FnoConfig {
            dimension,
            factorization,
            rank: 0.5,
            latent_channels: 4,
            num_fno_layers: layers + 1,
            decoder_layers: layers + 2,
            num_fno_modes: PerDim::All(3),
            ..FnoConfig::new(1, 2)
        };
        counts(&config, |store| drop(Fno::new(&config, store).unwrap()));
    }
    for (weight_norm, weight_fact) in [(false, false), (true, false), (false, true)] {
        let config = FullyConnectedConfig {
            in_features: 2,
            layer_size: 5,
            out_features: 3,
            num_layers: layers + 1,
            // Two of them have a parameter.
            activation_fn: vec![Activation::Prelu, Activation::Relu, Activation::Prelu],
            adaptive_activations: true,
            weight_norm,
            weight_fact,
            ..FullyConnectedConfig::default()
        };
        counts(&config, |store| drop(FullyConnected::new(&config, store).unwrap()));
    }
    let upsampling = if layers.is_multiple_of(2) { Upsampling::Transposed } else { Upsampling::Linear };
    let config = UNetConfig {
        dimension: 2,
        model_depth: layers + 1,
        feature_map_channels: [vec![4; 2 * layers], vec![8; 2]].concat(),
        use_attn_gate: true,
        attn_intermediate_channels: Some(3),
        upsampling,
        ..UNetConfig::new(1, 2)
    };
    counts(&config, |store| drop(UNet::new(&config, store).unwrap()));
}

#[test]
fn windows_have_as_many_parameters_as_were_counted() {
    let (img_size, window_size, num_heads) = ([9, 14], [2, 3, 4], [1, 2, 1, 2]);
    let config = PanguConfig { img_size, window_size, num_heads, embed_dim: 4, ..PanguConfig::default() };
    counts(&config, |store| drop(Pangu::new(&config, store).unwrap()));
    let config = PanguConfig { pressure_levels: 0, window_size: [1, 3, 4], ..config };
    counts(&config, |store| drop(Pangu::new(&config, store).unwrap()));
    let config = FengwuConfig { img_size, window_size, num_heads, embed_dim: 4, ..FengwuConfig::default() };
    counts(&config, |store| drop(Fengwu::new(&config, store).unwrap()));
    let config = AuroraConfig { img_size: [32, 48], embed_dim: 32, num_heads: 4, ..AuroraConfig::default() };
    let config = AuroraConfig { encoder_depths: vec![1, 2, 1], decoder_depths: vec![1, 1, 2], ..config };
    counts(&config, |store| drop(Aurora::new(&config, store).unwrap()));
    let config = SwinRnnConfig {
        embed_dim: 4,
        num_heads: 2,
        num_groups: 2,
        window_size: 4,
        ..SwinRnnConfig::new(2, [16, 8], 3)
    };
    counts(&config, |store| drop(SwinRnn::new(&config, store).unwrap()));
}

fn size(config: &impl Architecture) -> u128 {
    config.count(&ParamCount::default).unwrap().trained
}

#[test]
fn absurd_models_are_counted_at_once() {
    let deep = AfnoConfig { depth: 1_000_000_000, ..AfnoConfig::new([64, 64], 1, 1) };
    assert!(size(&deep) > 500_000_000_000_000);
    let deep = SongUNetConfig { num_blocks: 1_000_000_000, ..SongUNetConfig::new([64, 64], 1, 1) };
    assert!(size(&deep) > 5_000_000_000_000_000);
    let wide = SongUNetConfig { model_channels: 1 << 24, ..SongUNetConfig::new([64, 64], 1, 1) };
    assert!(size(&wide) > 1 << 50);
    let most = i32::MAX as usize;
    let mut deep = DitConfig {
        depth: 1_000_000_000,
        hidden_size: 1 << 28,
        detokenizer: DetokenizerKind::ProjReshape2dConv,
        ..DitConfig::new([most - 7, most - 7], most)
    };
    deep.detokenizer_kwargs.conv_layers = Some(most);
    assert!(size(&deep) > 1 << 90);
    let deep =
        VitConfig { depth: most, patch_size: PerDim::All(most), ..VitConfig::new([most, most], most, most) };
    assert!(size(&deep) > 1 << 90);
    let wide =
        FnoConfig { num_fno_modes: PerDim::All(i32::MAX as usize), dimension: 4, ..FnoConfig::new(1, 1) };
    assert!(size(&wide) > 1 << 100);
    let both = FullyConnectedConfig {
        num_layers: i32::MAX as usize,
        layer_size: i32::MAX as usize,
        ..FullyConnectedConfig::default()
    };
    assert!(size(&both) > 1 << 90);
    let kernel = UNetConfig {
        kernel_size: PerDim::All(i32::MAX as usize),
        padding: PerDim::All(i32::MAX as usize / 2).into(),
        ..UNetConfig::new(1, 1)
    };
    assert!(size(&kernel) > 1 << 90);
}

#[test]
fn fields_are_compared_with_the_configuration_alone() {
    let fno = FnoConfig { num_fno_modes: PerDim::All(100), ..FnoConfig::new(1, 1) };
    let error = fno.check_extents(&[64, 64]).unwrap_err().to_string();
    assert!(
        error.starts_with("fno: num_fno_modes is 100 along dim 0, but a field of 64 points there"),
        "{error}"
    );
    assert!(error.ends_with("--set model.num_fno_modes=37"), "{error}");
    let mended = FnoConfig { num_fno_modes: PerDim::All(37), ..fno };
    mended.check_extents(&[64, 64]).unwrap();
    let listed = FnoConfig { num_fno_modes: PerDim::Each(vec![72, 38]), ..mended };
    let error = listed.check_extents(&[64, 64]).unwrap_err().to_string();
    assert!(error.ends_with("--set 'model.num_fno_modes=[72, 37]'"), "{error}");
    let error = listed.check_extents(&[64]).unwrap_err().to_string();
    assert!(error.ends_with("--set model.dimension=1"), "{error}");

    let fields = FieldSpec { extents: vec![64, 32], ..FieldSpec::default() };
    let wide = FnoConfig { padding: PerDim::Each(vec![i32::MAX as usize]), ..FnoConfig::new(1, 1) };
    let array = wide.largest_array(&fields).unwrap();
    assert_eq!(array.elements, (i32::MAX as u128 + 64) * 32 * wide.latent_channels as u128);
    assert_eq!(array.keys, "model.padding = [2147483647]");

    let unet = UNetConfig { dimension: 2, ..UNetConfig::new(1, 1) };
    assert_eq!(unet.largest_array(&fields), None);
    unet.check_extents(&[64, 32]).unwrap();
    let error = unet.check_extents(&[64, 36]).unwrap_err().to_string();
    let mend = "--set model.model_depth=3 --set 'model.feature_map_channels=[64, 64, 128, 128, 256, 256]'";
    assert!(error.contains("expected extents divisible by 16") && error.ends_with(mend), "{error}");
}
