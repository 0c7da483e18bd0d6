//! Makes cargo take the build dependencies of this package into account.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
}
