use rstest::rstest;

use super::*;

const SEED: u64 = 3;

fn store() -> ParamStore {
    ParamStore::new(Generator::new(SEED))
}

fn filled(mut store: ParamStore) -> ParamStore {
    let _ = store.param("w", &[5, 3], Init::XavierUniform, Placement::Shard(0)).unwrap();
    let _ = store.param("b", &[5], Init::Normal { mean: 0.0, std: 1.0 }, Placement::Replicate).unwrap();
    let _ = store.buffer("scale", &[2], Init::Constant(2.0), Placement::Replicate).unwrap();
    store.tie("alias.b", "b").unwrap();
    store
}

#[test]
fn order_flags_and_ties() {
    let store = filled(store());
    let names: Vec<&str> = store.parameters().iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["w", "b", "scale"]);
    assert_eq!(store.trainable().count(), 2);
    assert!(store.get("alias.b").unwrap().tensor.requires_grad());
    assert!(!store.get("scale").unwrap().tensor.requires_grad());
    assert!(store.get("nothing").is_none());
    let state = store.state_dict().unwrap();
    assert_eq!(state.keys().map(String::as_str).collect::<Vec<_>>(), ["alias.b", "b", "scale", "w"]);
}

#[test]
fn values_depend_on_the_name_not_on_the_order() {
    let mut store = store();
    let _ = store.param("b", &[5], Init::Normal { mean: 0.0, std: 1.0 }, Placement::Replicate).unwrap();
    assert_eq!(store.get("b").unwrap().tensor, filled(self::store()).get("b").unwrap().tensor);
}

#[test]
fn parts_are_cut_from_the_whole() {
    let whole = filled(store());
    let deadline = std::time::Duration::from_secs(30);
    isobar_collectives::threads::run(2, deadline, |group| {
        let region = ParallelRegion::new(group);
        let (start, extent) = region.part(5);
        let part = filled(store().with_region(region));
        let want = filled(store()).get("w").unwrap().tensor.detach().narrow(0, start, extent);
        assert_eq!(part.get("w").unwrap().tensor.detach(), want);
        assert_eq!(part.get("w").unwrap().shape, [5, 3]);
        // A whole state dict is cut, a state dict of parts is taken.
        for dict in [filled(store()).state_dict().unwrap(), part.state_dict().unwrap()] {
            let mut loaded =
                filled(ParamStore::new(Generator::new(SEED + 1)).with_region(part.region().clone()));
            loaded.load(&dict).unwrap();
            assert_eq!(loaded.get("w").unwrap().tensor.detach(), want);
        }
    });
    assert_eq!(whole.get("w").unwrap().tensor.size(), [5, 3]);
}

#[rstest]
#[case::xavier(Init::XavierUniform, 0.0, (6.0f64 / 600.0).sqrt() / 3f64.sqrt())]
#[case::fan_in(Init::FanIn(25), 0.0, 0.2 / 3f64.sqrt())]
#[case::uniform(Init::Uniform { low: 0.0, high: 1.0 }, 0.5, 1.0 / 12f64.sqrt())]
#[case::trunc(Init::TruncNormal { std: 0.02 }, 0.0, 0.02)]
#[case::log_normal(Init::LogNormal { mean: 0.0, std: 0.1 }, (0.005f64).exp(), 0.1)]
fn initial_values_have_their_moments(#[case] init: Init<Tensor>, #[case] mean: f64, #[case] std: f64) {
    let value = store().draw("x", &[300, 300], &init, Placement::Replicate).unwrap();
    assert!((value.mean(Kind::Double).double_value(&[]) - mean).abs() < 0.02 * std.max(mean));
    assert!((value.std(true).double_value(&[]) - std).abs() < 0.02 * std);
}

#[test]
fn bad_parameters_are_errors() {
    let mut store = filled(store());
    let zeros = || Init::Constant(0.0);
    let errors = [
        store.param("w", &[1], zeros(), Placement::Replicate).unwrap_err(),
        store.param("alias.b", &[1], zeros(), Placement::Replicate).unwrap_err(),
        store.param("x", &[1], zeros(), Placement::Shard(1)).unwrap_err(),
        store.param("x", &[-1], zeros(), Placement::Replicate).unwrap_err(),
        store.param("x", &[4], Init::XavierUniform, Placement::Replicate).unwrap_err(),
        store.param("x", &[4], Init::Given(Tensor::from_slice(&[1.0f32])), Placement::Replicate).unwrap_err(),
        store.tie("alias.x", "x").unwrap_err(),
    ];
    for error in errors {
        assert!(error.to_string().starts_with("parameter \""), "{error}");
    }
    assert_eq!(store.parameters().len(), 3);
}

#[test]
fn loading_says_all_that_is_wrong_and_changes_nothing() {
    let mut store = filled(store());
    let before = store.state_dict().unwrap()["b"].copy();
    let mut state = StateDict::new();
    state.insert("w".into(), Tensor::zeros([5, 4], (Kind::Float, Device::Cpu)));
    state.insert("b".into(), Tensor::zeros([5], (Kind::Double, Device::Cpu)));
    state.insert("other".into(), Tensor::zeros([5], (Kind::Float, Device::Cpu)));
    let text = store.load(&state).unwrap_err().to_string();
    assert_eq!(
        text,
        "state dict does not fit the model (missing: scale; not of this model: other; \
         \"w\" has shape [5, 4], the model's is [5, 3], this rank's part [5, 3]; \
         \"b\" is Double, the model's is Float); nothing was loaded"
    );
    assert_eq!(store.get("b").unwrap().tensor.detach(), before);
    let mut state = filled(self::store()).state_dict().unwrap();
    state.insert("alias.b".into(), Tensor::zeros([5], (Kind::Float, Device::Cpu)));
    assert!(store.load(&state).unwrap_err().to_string().contains("\"alias.b\" differs from \"b\""));
}

#[test]
fn a_file_is_loaded() {
    let path = std::env::temp_dir().join(format!("isobar-shard-{}.safetensors", std::process::id()));
    let source = filled(store());
    let tensors: Vec<(String, Tensor)> = source.state_dict().unwrap().into_iter().collect();
    Tensor::write_safetensors(&tensors, &path).unwrap();
    let mut target = filled(ParamStore::new(Generator::new(SEED + 1)));
    target.load_file(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(target.get("w").unwrap().tensor, source.get("w").unwrap().tensor);
    assert!(target.load_file(&path).unwrap_err().to_string().starts_with("cannot read tensors from "));
}

#[test]
fn conversion_reaches_the_models_handles() {
    let mut store = store();
    let weight = store.param("w", &[3], Init::Constant(1.0), Placement::Replicate).unwrap();
    weight.sum(Kind::Float).backward();
    assert!(weight.grad().defined());
    store.set_kind(Kind::Double).unwrap();
    assert_eq!(weight.kind(), Kind::Double);
    assert!(weight.requires_grad());
    assert_eq!(weight.grad().kind(), Kind::Double);
    weight.sum(Kind::Double).backward();
    assert_eq!(weight.grad(), weight.ones_like() * 2);
    store.zero_grad().unwrap();
    assert_eq!(weight.grad(), weight.zeros_like());
    assert!(store.set_kind(Kind::Int64).is_err());
}

/// Values of a computed buffer: the row-major number of each element.
fn numbers(part: &Window) -> isobar_array::Result<Tensor> {
    let mut all = Tensor::arange(24, (Kind::Float, Device::Cpu)).reshape(part.global());
    for (dim, (&start, &extent)) in part.offset().iter().zip(part.shape()).enumerate() {
        all = all.narrow(dim as i64, start, extent);
    }
    Ok(all)
}

#[test]
fn computed_buffers_are_in_the_state_dict_and_not_in_the_store() {
    let mut store = filled(store()).with_options(Kind::Double, Device::Cpu);
    store.computed_buffer("grid", &[1, 6, 4], std::sync::Arc::new(numbers)).unwrap();
    assert!(store.get("grid").is_none() && store.parameters().iter().all(|p| p.name != "grid"));
    assert!(store.computed_buffer("w", &[1], std::sync::Arc::new(numbers)).is_err());
    assert!(store.param("grid", &[1], Init::Constant(0.0), Placement::Replicate).is_err());
    let mut state = store.state_dict().unwrap();
    assert_eq!(state["grid"], Tensor::arange(24, (Kind::Double, Device::Cpu)).reshape([1, 6, 4]));
    store.load(&state).unwrap();
    let grid = state.remove("grid").unwrap();
    store.load(&state).unwrap();
    for (value, words) in
        [(grid.copy() + 0.1, "differs from the values computed"), (grid.reshape([6, 4]), "has shape [6, 4]")]
    {
        state.insert("grid".to_owned(), value);
        let error = store.load(&state).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}
