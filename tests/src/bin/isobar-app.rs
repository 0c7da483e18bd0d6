//! The command `isobar`, built as a program of this package, so that its tests run what was just compiled.

fn main() -> std::process::ExitCode {
    isobar_app::App::new().main()
}
