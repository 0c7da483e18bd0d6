//! For which part of a model the calling thread communicates.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;

/// A label, and whether it is that of a backward pass.
type Scope = (Option<Arc<str>>, bool);

thread_local! {
    static SCOPES: RefCell<Vec<Scope>> = const { RefCell::new(Vec::new()) };
}

/// Labels what the calling thread communicates while the guard lives. Labels nest: within `encoder`, `block.0` is
/// `encoder.block.0`. The backward pass of what is computed under a label communicates under the same one.
///
/// ```
/// use isobar_collectives::trace::{Label, module};
///
/// let _encoder = module("encoder");
/// let _block = module("block.0");
/// assert_eq!(Label::current().name(), Some("encoder.block.0"));
/// ```
pub fn module(name: &str) -> LabelGuard {
    let (outer, backward) = current();
    let full = match outer {
        Some(outer) => format!("{outer}.{name}").into(),
        None => name.into(),
    };
    enter((Some(full), backward))
}

/// The label that a thread had: differentiable maps remember it for their backward pass.
///
/// Maps made by [`differentiable`](crate::differentiable) do so by themselves. A custom function whose backward
/// communicates takes [`Label::current`] when it is made, and enters [`Label::backward`] in its backward.
#[derive(Debug, Clone)]
pub struct Label(Option<Arc<str>>);

impl Label {
    /// The calling thread's.
    pub fn current() -> Self {
        Self(current().0)
    }

    /// Its name; none where the thread was in no module.
    pub fn name(&self) -> Option<&str> {
        self.0.as_deref()
    }

    /// Attributes communication of the calling thread to the backward pass of this label, while the guard lives.
    pub fn backward(&self) -> LabelGuard {
        enter((self.0.clone(), true))
    }
}

/// A label is the thread's while this lives. Guards nest; drop them in reverse order.
#[must_use = "the label holds while the guard lives"]
pub struct LabelGuard(PhantomData<*const ()>);

impl Drop for LabelGuard {
    fn drop(&mut self) {
        // Thread-local storage may be gone where a guard outlives it; then so is the label.
        let _ = SCOPES.try_with(|scopes| scopes.borrow_mut().pop());
    }
}

pub(crate) fn current() -> Scope {
    SCOPES.try_with(|scopes| scopes.borrow().last().cloned()).ok().flatten().unwrap_or((None, false))
}

fn enter(scope: Scope) -> LabelGuard {
    let _ = SCOPES.try_with(|scopes| scopes.borrow_mut().push(scope));
    LabelGuard(PhantomData)
}
