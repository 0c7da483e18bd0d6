//! The command `isobar`; everything is in the library beside it.

fn main() -> std::process::ExitCode {
    isobar::App::new().main()
}
