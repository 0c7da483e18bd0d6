//! Equations on periodic boxes, solved in Fourier space: the gallery of APEBench (Koehler et al., "APEBench: A Benchmark for
//! Autoregressive Neural Emulators of PDEs", NeurIPS 2024) in plain parameters.
//!
//! Nothing here depends on files or ranks.
//!
//! | | |
//! |---|---|
//! | [`make`], [`MakeConfig`] | solves a data set and writes it in The Well's schema |
//! | [`System`], [`SystemKind`], [`register_system!`](crate::register_system) | an equation, and how one registers itself by name |
//! | [`Solver`] | exponential time differencing Runge–Kutta methods of order 1 to 4 |
//! | [`Domain`], [`Spectrum`] | a periodic box; Fourier coefficients and derivatives on it |
//! | [`Initial`], [`InitialConfig`] | random initial fields |

mod initial;
mod make;
mod registry;
mod run;
mod solver;
mod spectrum;
mod system;
mod systems;

pub use self::initial::{Initial, InitialConfig, InitialKind};
pub use self::make::{MakeConfig, make};
pub use self::registry::{SystemEntry, SystemKind, Systems, register, registered, systems};
pub use self::solver::Solver;
pub use self::spectrum::{Domain, Spectrum};
pub use self::system::{Defaults, System};
pub use self::systems::{
    Advection, AdvectionDiffusion, Burgers, Diffusion, Dispersion, FisherKpp, GrayScott, HyperDiffusion,
    KortewegDeVries, KuramotoSivashinsky, NavierStokes, SwiftHohenberg,
};
