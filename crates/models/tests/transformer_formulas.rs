//! Transformers against their formulas, written once more with plain tensors: tokens in a row, samples first.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_array::{Generator, Window};
use isobar_models::{
    AttentionBackend, DetokenizerKind, Dit, DitAttention, DitConditioning, DitConfig, DitDetokenizer,
    DitEmbedder, EmbedFn, Mode, PerDim, QkNorm, Vit, VitConfig, VitPositions,
};
use isobar_shard::ParamStore;
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use crate::common::perturb;

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);
const HEADS: i64 = 2;
/// Rows and columns of tokens, and of points of a patch.
const GRID: [i64; 2] = [4, 3];
const PATCH: [i64; 2] = [2, 3];

fn random(seed: u64, shape: &[i64]) -> Tensor {
    Generator::new(seed).normal(&Window::whole(shape), 0.0, 1.0, DOUBLE).unwrap()
}

/// Parameters by name.
struct Formula<'a> {
    params: &'a ParamStore,
    /// The pairs of tokens that see each other; all where there is none.
    seen: Option<Tensor>,
    qk_norm: Option<QkNorm>,
    rotary: bool,
}

impl Formula<'_> {
    fn get(&self, name: &str) -> Tensor {
        self.params.get(name).unwrap_or_else(|| panic!("no {name}")).tensor.shallow_clone()
    }

    fn linear(&self, x: &Tensor, name: &str) -> Tensor {
        let bias = self.params.get(&format!("{name}.bias")).map(|bias| bias.tensor.shallow_clone());
        x.linear(&self.get(&format!("{name}.weight")), bias)
    }

    fn norm(&self, x: &Tensor, name: Option<&str>, eps: f64) -> Tensor {
        let (mean, variance) = (x.mean_dim(-1, true, None), x.var_dim(-1, false, true));
        let y = (x - mean) / (variance + eps).sqrt();
        match name {
            Some(name) => y * self.get(&format!("{name}.weight")) + self.get(&format!("{name}.bias")),
            None => y,
        }
    }

    fn of_heads(&self, x: &Tensor, name: &str) -> Tensor {
        match self.qk_norm {
            None => x.shallow_clone(),
            Some(QkNorm::LayerNorm) => self.norm(x, Some(name), 1e-5),
            Some(QkNorm::RmsNorm) => {
                let y = x / (x.square().mean_dim(-1, true, None) + 1e-6).sqrt();
                y * self.get(&format!("{name}.weight"))
            }
        }
    }

    /// Pairs of features as complex numbers, times e^(i angle).
    fn rotated(&self, x: &Tensor) -> Tensor {
        if !self.rotary {
            return x.shallow_clone();
        }
        let features = x.size()[3];
        let angles: Vec<f64> = (0..GRID[0] * GRID[1])
            .flat_map(|token| {
                let place = [token / GRID[1], token % GRID[1]];
                (0..features / 2).map(move |pair| {
                    let (axis, k) = (pair / (features / 4), pair % (features / 4));
                    place[axis as usize] as f64 * 10_000f64.powf(-4.0 * k as f64 / features as f64)
                })
            })
            .collect();
        let angles = Tensor::from_slice(&angles).reshape([GRID[0] * GRID[1], features / 2]);
        let turn = Tensor::complex(&angles.cos(), &angles.sin());
        let pairs = x.reshape([x.size()[0], x.size()[1], x.size()[2], features / 2, 2]).contiguous();
        (pairs.view_as_complex() * turn).view_as_real().reshape(x.size())
    }

    fn attention(&self, x: &Tensor, name: &str) -> Tensor {
        let [batch, tokens, width] = x.size()[..] else { panic!("{:?}", x.size()) };
        let qkv = self.linear(x, &format!("{name}.qkv"));
        let qkv = qkv.reshape([batch, tokens, 3, HEADS, width / HEADS]).permute([2, 0, 3, 1, 4]);
        let q = self.rotated(&self.of_heads(&qkv.get(0), &format!("{name}.q_norm")));
        let k = self.rotated(&self.of_heads(&qkv.get(1), &format!("{name}.k_norm")));
        let mut scores = q.matmul(&k.transpose(-2, -1)) / ((width / HEADS) as f64).sqrt();
        if let Some(seen) = &self.seen {
            scores = scores.masked_fill(&seen.logical_not(), f64::NEG_INFINITY);
        }
        let mixed = scores.softmax(-1, None).matmul(&qkv.get(2));
        self.linear(&mixed.transpose(1, 2).reshape([batch, tokens, width]), &format!("{name}.proj"))
    }

    fn tokens(&self, x: &Tensor, patch: &str, positions: Option<&str>) -> Tensor {
        let (weight, bias) = (self.get(&format!("{patch}.weight")), self.get(&format!("{patch}.bias")));
        let tokens = x.conv2d(&weight, Some(bias), PATCH, [0, 0], [1, 1], 1).flatten(2, 3).transpose(1, 2);
        match positions {
            Some(name) => tokens + self.get(name),
            None => tokens,
        }
    }

    /// The sample's vector.
    fn conditioned(&self, t: &Tensor, condition: &Tensor, config: &DitConfig) -> Tensor {
        let root = "conditioning_embedder";
        let waves = |name: &str, pairs: i64, steps: i64| {
            let k = Tensor::arange(pairs, DOUBLE);
            let f = (k * (-(10_000f64.ln()) / steps as f64)).exp();
            assert!((&f - self.get(&format!("{root}.{name}.freqs"))).abs().max().double_value(&[]) < 1e-12);
            let angles = t.reshape([-1, 1]) * f;
            (angles.cos(), angles.sin())
        };
        if config.conditioning_embedder == DitEmbedder::Edm {
            let (cos, sin) = waves("map_noise", 3, 2);
            let embedded = condition * (condition.size()[1] as f64).sqrt();
            let e = Tensor::cat(&[sin, cos], 1) + self.linear(&embedded, &format!("{root}.map_condition"));
            return self.linear(
                &self.linear(&e, &format!("{root}.map_layer0")).silu(),
                &format!("{root}.map_layer1"),
            );
        }
        let (cos, sin) = waves("t_embedder", 4, 4);
        let swapped = config.conditioning_embedder_kwargs.embed_fn == Some(EmbedFn::NpSinCos);
        let e = if swapped { Tensor::cat(&[sin, cos], 1) } else { Tensor::cat(&[cos, sin], 1) };
        let hidden = self.linear(&e, &format!("{root}.t_embedder.mlp.0")).silu();
        self.linear(&hidden, &format!("{root}.t_embedder.mlp.2"))
            + self.linear(condition, &format!("{root}.cond_embedder"))
    }

    fn modulation(&self, c: &Tensor, name: &str, count: i64) -> Vec<Tensor> {
        self.linear(&c.silu(), &format!("{name}.adaptive_modulation.1")).unsqueeze(1).chunk(count, 2)
    }

    fn modulated(&self, x: &Tensor, [shift, scale]: [&Tensor; 2]) -> Tensor {
        self.norm(x, None, 1e-6) * (scale + 1.0) + shift
    }
}

/// The fields of patches, point by point.
fn unpatched(patches: &Tensor, channels: i64) -> Tensor {
    let batch = patches.size()[0];
    let fields = Tensor::zeros([batch, channels, GRID[0] * PATCH[0], GRID[1] * PATCH[1]], DOUBLE);
    for (token, point) in (0..GRID[0] * GRID[1]).flat_map(|t| (0..PATCH[0] * PATCH[1]).map(move |p| (t, p))) {
        let row = token / GRID[1] * PATCH[0] + point / PATCH[1];
        let column = token % GRID[1] * PATCH[1] + point % PATCH[1];
        let value = patches.select(1, token).narrow(1, point * channels, channels);
        fields.select(2, row).select(2, column).copy_(&value);
    }
    fields
}

#[track_caller]
fn assert_close(got: &Tensor, want: &Tensor) {
    assert_eq!(got.size(), want.size());
    let far = (got - want).abs().max().double_value(&[]);
    assert!(far < 1e-11, "{far}");
    assert!(want.abs().max().double_value(&[]) > 0.01);
}

fn dit() -> DitConfig {
    DitConfig {
        patch_size: PerDim::Each(PATCH.to_vec().iter().map(|&n| n as usize).collect()),
        out_channels: Some(2),
        hidden_size: 8,
        depth: 2,
        num_heads: HEADS as usize,
        mlp_ratio: 1.5,
        condition_dim: Some(3),
        ..DitConfig::new([8, 9], 1)
    }
}

fn edm() -> DitConfig {
    DitConfig {
        conditioning_embedder: DitEmbedder::Edm,
        conditioning_embedder_kwargs: DitConditioning {
            emb_channels: Some(8),
            noise_channels: Some(6),
            ..DitConditioning::default()
        },
        ..dit()
    }
}

fn normed(qk_norm: QkNorm, is_causal: bool, config: DitConfig) -> DitConfig {
    let is_causal = Some(is_causal);
    let attn_kwargs = DitAttention { qk_norm_type: Some(qk_norm), is_causal, ..DitAttention::default() };
    DitConfig { attn_kwargs, ..config }
}

fn conv(layers: usize, config: DitConfig) -> DitConfig {
    DitConfig {
        detokenizer: DetokenizerKind::ProjReshape2dConv,
        detokenizer_kwargs: DitDetokenizer {
            conv_layers: Some(layers),
            conv_hidden: Some(5),
            ..DitDetokenizer::default()
        },
        ..config
    }
}

fn swapped() -> DitConfig {
    let kwargs = DitConditioning { embed_fn: Some(EmbedFn::NpSinCos), ..DitConditioning::default() };
    DitConfig { conditioning_embedder_kwargs: kwargs, ..dit() }
}

fn windows(attention_backend: AttentionBackend) -> DitConfig {
    DitConfig { attention_backend, ..dit() }
}

/// Returns the mask of attention, `[query, key]`.
fn pairs(see: impl Fn(i64, i64) -> bool) -> Tensor {
    let count = GRID[0] * GRID[1];
    let all: Vec<bool> = (0..count * count).map(|pair| see(pair / count, pair % count)).collect();
    Tensor::from_slice(&all).reshape([count, count])
}

/// Windows of 3 × 3 tokens, shifted into the grid at its borders.
fn in_windows() -> Tensor {
    let window = |at: i64, key: i64, extent: i64| {
        let start = (at - 1).clamp(0, extent - 3);
        (start..start + 3).contains(&key)
    };
    pairs(|query, key| {
        window(query / GRID[1], key / GRID[1], GRID[0]) && window(query % GRID[1], key % GRID[1], GRID[1])
    })
}

fn seen(config: &DitConfig) -> Option<Tensor> {
    match config.attention_backend {
        AttentionBackend::Timm if config.attn_kwargs.is_causal == Some(true) => {
            Some(pairs(|query, key| key <= query))
        }
        AttentionBackend::Timm | AttentionBackend::TransformerEngine => None,
        _ => Some(in_windows()),
    }
}

#[rstest]
#[case::plain(dit())]
#[case::sines_first(swapped())]
#[case::edm(edm())]
#[case::rms_norm_and_three_convolutions(conv(3, normed(QkNorm::RmsNorm, false, dit())))]
#[case::layer_norm_causal_edm_and_one_convolution(conv(1, normed(QkNorm::LayerNorm, true, edm())))]
#[case::windows(windows(AttentionBackend::Natten2d))]
#[case::windows_with_rotary_positions(windows(AttentionBackend::Natten2dRope))]
fn dit_is_its_formula(#[case] config: DitConfig) {
    let mut params = ParamStore::new(Generator::new(1)).with_options(DOUBLE.0, DOUBLE.1);
    let model = Dit::new(&config, &mut params).unwrap();
    perturb(&params, 2);
    let (x, t, condition) = (random(1, &[2, 1, 8, 9]), random(2, &[2]), random(3, &[2, 3]));
    let got = model.forward(&x, &t, Some(&condition), Mode::Eval).unwrap();

    let rotary = config.attention_backend == AttentionBackend::Natten2dRope;
    let of =
        Formula { params: &params, seen: seen(&config), qk_norm: config.attn_kwargs.qk_norm_type, rotary };
    let c = of.conditioned(&t, &condition, &config);
    let positions = (!rotary).then_some("tokenizer.pos_embed");
    let mut tokens = of.tokens(&x, "tokenizer.x_embedder.proj", positions);
    for block in (0..2).map(|i| format!("blocks.{i}")) {
        let scope = if config.attention_backend == AttentionBackend::Timm { ".attn_op" } else { "" };
        let m = of.modulation(&c, &block, 6);
        let u = of.modulated(&tokens, [&m[0], &m[1]]);
        tokens += &m[2] * of.attention(&u, &format!("{block}.attention{scope}"));
        let u = of.modulated(&tokens, [&m[3], &m[4]]);
        let hidden = of.linear(&u, &format!("{block}.linear.layers.0")).gelu("tanh");
        tokens += &m[5] * of.linear(&hidden, &format!("{block}.linear.layers.2"));
    }
    let convs = config.detokenizer_kwargs.conv_layers;
    let last = format!("detokenizer.{}proj_layer", if convs.is_some() { "proj." } else { "" });
    let m = of.modulation(&c, &last, 2);
    let patches = of.linear(&of.modulated(&tokens, [&m[0], &m[1]]), &format!("{last}.output_projection"));
    let mut want = unpatched(&patches, 2);
    if let Some(convs) = convs {
        let mut y = want.shallow_clone();
        for j in 0..convs {
            let name = format!("detokenizer.conv_head.{}", 2 * j);
            let (weight, bias) = (of.get(&format!("{name}.weight")), of.get(&format!("{name}.bias")));
            let input = if j > 0 { y.gelu("none") } else { y };
            y = input.conv2d(&weight, Some(bias), [1, 1], [1, 1], [1, 1], 1);
        }
        want += y;
    }
    assert_close(&got, &want);
}

#[rstest]
fn vit_is_its_formula(
    #[values(VitPositions::Learned, VitPositions::Rotary)] pos_embed: VitPositions,
    #[values(None, Some(3))] kernel: Option<usize>,
) {
    let config = VitConfig {
        attn_kernel: kernel.map(PerDim::All),
        patch_size: PerDim::Each(vec![2, 3]),
        embed_dim: 8,
        depth: 2,
        num_heads: HEADS as usize,
        qk_norm: Some(QkNorm::LayerNorm),
        pos_embed,
        ..VitConfig::new([8, 9], 1, 2)
    };
    let mut params = ParamStore::new(Generator::new(1)).with_options(DOUBLE.0, DOUBLE.1);
    let model = Vit::new(&config, &mut params).unwrap();
    perturb(&params, 2);
    let x = random(1, &[2, 1, 8, 9]);
    let got = model.forward(&x, Mode::Eval).unwrap();

    let rotary = pos_embed == VitPositions::Rotary;
    let seen = kernel.map(|_| in_windows());
    let of = Formula { params: &params, seen, qk_norm: config.qk_norm, rotary };
    let mut tokens = of.tokens(&x, "patch_embed.proj", (!rotary).then_some("pos_embed"));
    for block in (0..2).map(|i| format!("blocks.{i}")) {
        let u = of.norm(&tokens, Some(&format!("{block}.norm1")), 1e-6);
        tokens += of.attention(&u, &format!("{block}.attn"));
        let u = of.norm(&tokens, Some(&format!("{block}.norm2")), 1e-6);
        let hidden = of.linear(&u, &format!("{block}.mlp.fc1")).gelu("none");
        tokens += of.linear(&hidden, &format!("{block}.mlp.fc2"));
    }
    let patches = of.linear(&of.norm(&tokens, Some("norm"), 1e-6), "head");
    assert_close(&got, &unpatched(&patches, 2));
}
