//! Compiles the C++ shim against the headers of the libtorch that torch-sys links.

use std::path::{Path, PathBuf};

fn main() {
    println!("cargo:rerun-if-changed=src/cpp");
    let lib = PathBuf::from(
        std::env::var_os("DEP_TCH_LIBTORCH_LIB")
            .expect("torch-sys tells its direct dependents where libtorch is"),
    );
    let include = lib.join("../include");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .pic(true)
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        .define("USE_C10D_GLOO", None)
        // As libtorch itself was compiled: its headers check more without.
        .define("NDEBUG", None)
        .include(Path::new("src/cpp"))
        .include(Path::new("src/cpp/gloo_stubs"))
        // libtorch's own headers are not ours to lint.
        .flag(format!("-isystem{}", include.display()))
        .flag(format!("-isystem{}", include.join("torch/csrc/api/include").display()))
        .flag("-Wno-unused-parameter")
        .file("src/cpp/shim.cpp")
        .compile("isobar_torch_shim");
    // After the shim, which needs them: the linker resolves from left to right.
    println!("cargo:rustc-link-search=native={}", lib.display());
    for library in ["torch_cpu", "c10"] {
        println!("cargo:rustc-link-lib=dylib={library}");
    }
}
