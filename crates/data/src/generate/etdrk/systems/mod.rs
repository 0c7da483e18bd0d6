//! Systems, a file each, which registers it.
//!
//! A system defines its terms and exact solutions; it depends on neither time steps nor files.

mod advection;
mod advection_diffusion;
mod burgers;
mod diffusion;
mod dispersion;
mod fisher_kpp;
mod gray_scott;
mod hyper_diffusion;
mod korteweg_de_vries;
mod kuramoto_sivashinsky;
mod navier_stokes;
mod swift_hohenberg;

pub use advection::Advection;
pub use advection_diffusion::AdvectionDiffusion;
pub use burgers::Burgers;
pub use diffusion::Diffusion;
pub use dispersion::Dispersion;
pub use fisher_kpp::FisherKpp;
pub use gray_scott::GrayScott;
pub use hyper_diffusion::HyperDiffusion;
pub use korteweg_de_vries::KortewegDeVries;
pub use kuramoto_sivashinsky::KuramotoSivashinsky;
pub use navier_stokes::NavierStokes;
pub use swift_hohenberg::SwiftHohenberg;
