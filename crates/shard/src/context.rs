//! State of the calling thread: the current mesh, the promotion of plain tensors, and whether hidden communication is
//! forbidden.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;

use isobar_mesh::DeviceMesh;

use crate::error::{Error, Result};

thread_local! {
    static MESHES: RefCell<Vec<DeviceMesh>> = const { RefCell::new(Vec::new()) };
    static PROMOTION: Cell<Promotion> = const { Cell::new(Promotion::Silent) };
    static FORBIDDEN: Cell<usize> = const { Cell::new(0) };
}

/// Treatment of a plain tensor that meets a sharded one in an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Promotion {
    /// It is an error. (Tensors without dims are numbers, and always welcome.)
    Off,
    /// It is taken for replicated, with a warning.
    Warn,
    /// It is taken for replicated.
    #[default]
    Silent,
}

/// The mesh that is used where none is given, while this lives. Guards nest; drop them in reverse order.
#[must_use = "the mesh is current while the guard lives"]
pub struct CurrentMesh(PhantomData<*const ()>);

impl CurrentMesh {
    /// Makes the mesh current for the calling thread.
    pub fn enter(mesh: &DeviceMesh) -> Self {
        MESHES.with(|meshes| meshes.borrow_mut().push(mesh.clone()));
        Self(PhantomData)
    }

    /// The mesh that is current.
    pub fn get() -> Option<DeviceMesh> {
        MESHES.with(|meshes| meshes.borrow().last().cloned())
    }

    pub(crate) fn or_given(mesh: Option<&DeviceMesh>) -> Result<DeviceMesh> {
        let none = || {
            Error::from(isobar_array::Error::Argument {
                op: "mesh",
                reason:
                    "no mesh was given, and none is current; give one, or enter one with CurrentMesh::enter"
                        .into(),
            })
        };
        mesh.cloned().or_else(Self::get).ok_or_else(none)
    }
}

impl Drop for CurrentMesh {
    fn drop(&mut self) {
        MESHES.with(|meshes| meshes.borrow_mut().pop());
    }
}

/// Changes [`Promotion`] for the calling thread while it lives.
#[must_use = "the mode holds while the guard lives"]
pub struct PromotionGuard(Promotion, PhantomData<*const ()>);

impl PromotionGuard {
    /// Sets the mode.
    pub fn new(mode: Promotion) -> Self {
        Self(PROMOTION.replace(mode), PhantomData)
    }
}

impl Drop for PromotionGuard {
    fn drop(&mut self) {
        PROMOTION.set(self.0);
    }
}

/// The mode of the calling thread.
pub fn promotion() -> Promotion {
    PROMOTION.get()
}

/// While it lives, an operator of the calling thread that has no rule for the layouts of its inputs is an error, in place of
/// gathering them.
#[must_use = "communication is forbidden while the guard lives"]
pub struct ForbidHiddenCommunication(PhantomData<*const ()>);

/// Forbids hidden communication; see [`ForbidHiddenCommunication`].
pub fn forbid_hidden_communication() -> ForbidHiddenCommunication {
    FORBIDDEN.set(FORBIDDEN.get() + 1);
    ForbidHiddenCommunication(PhantomData)
}

impl Drop for ForbidHiddenCommunication {
    fn drop(&mut self) {
        FORBIDDEN.set(FORBIDDEN.get().saturating_sub(1));
    }
}

/// Returns whether hidden communication is forbidden.
pub(crate) fn is_hidden_communication_forbidden() -> bool {
    FORBIDDEN.get() > 0
}
