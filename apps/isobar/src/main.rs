//! The program `isobar`, with the built-in models.

fn main() -> std::process::ExitCode {
    isobar_app::App::new().main()
}
