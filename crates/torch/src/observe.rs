//! Search for the operator that produced a value that is not finite.

use std::ffi::{CStr, c_void};
use std::sync::{Mutex, PoisonError};

use tch::Tensor;

use crate::error::{Result, call};
use crate::ffi;

/// The first result that held NaN, or the first that held infinities.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NonFinite {
    /// libtorch's operator, such as `aten::div`: the innermost.
    pub operator: String,
    /// The shape of its result.
    pub shape: Vec<i64>,
    /// Number of elements that are NaN or infinite.
    pub count: i64,
    /// True if some are NaN; otherwise they are infinite.
    pub nan: bool,
    /// True if all inputs of the operator are finite, so that it produced the values.
    pub inputs_finite: bool,
    /// The marked tensor that an operator was given last, itself included: about where in the model it is.
    pub marked: Option<usize>,
    /// Value of `label` at that time.
    pub label: String,
}

/// Runs `body` and looks at the results of all operators of this thread, and of the backward passes that it runs: the first
/// that holds NaN, and the first that holds infinities, in the order of their coming. Infinities may be meant, as in masks.
/// Results without values yet (`empty`) and views are left out.
///
/// It reads each result once more: it is for a step that is known to fail. `marked` are tensors whose use tells the place,
/// such as parameters.
///
/// # Errors
///
/// libtorch refuses the observer.
///
/// ```
/// use isobar_torch::observe::first_non_finite;
/// use tch::Tensor;
///
/// let w = Tensor::from_slice(&[1.0f32, 0.0]);
/// let (_, found) = first_non_finite(&[&w], || "forward".to_owned(), || w.f_log()?.f_mul(&w))?;
/// assert_eq!((found[0].operator.as_str(), found[0].nan, found[0].inputs_finite), ("aten::log", false, true));
/// assert_eq!((found[1].operator.as_str(), found[1].nan, found[1].marked), ("aten::mul", true, Some(0)));
/// # Ok::<(), isobar_torch::Error>(())
/// ```
pub fn first_non_finite<T>(
    marked: &[&Tensor],
    label: impl Fn() -> String + Send + Sync,
    body: impl FnOnce() -> T,
) -> Result<(T, Vec<NonFinite>)> {
    let findings = Findings { label: Box::new(label), found: Mutex::default() };
    let handles: Vec<_> = marked.iter().map(|tensor| tensor.as_ptr()).collect();
    // SAFETY: the handles are valid during the call, and `findings` outlives the watch, which ends before it is dropped.
    let watch = call(|error| unsafe {
        let found = std::ptr::from_ref(&findings).cast_mut().cast();
        ffi::isobar_observe_start(handles.as_ptr(), handles.len(), note, found, error)
    })?;
    let watch = Watch(watch);
    let value = body();
    drop(watch);
    Ok((value, findings.found.into_inner().unwrap_or_else(PoisonError::into_inner)))
}

struct Findings<'a> {
    label: Box<dyn Fn() -> String + Send + Sync + 'a>,
    found: Mutex<Vec<NonFinite>>,
}

/// Ends on the thread that began it, as the pointer is not `Send`.
struct Watch(*mut ffi::Watch);

impl Drop for Watch {
    fn drop(&mut self) {
        // SAFETY: it is ours, and not used after this.
        unsafe { ffi::isobar_observe_stop(self.0) };
    }
}

extern "C" fn note(findings: *mut c_void, finding: *const ffi::Finding) {
    // SAFETY: both are valid during the call; the findings are only read, but for what their mutex guards.
    let (findings, finding) = unsafe { (&*findings.cast::<Findings<'_>>(), &*finding) };
    // SAFETY: the operator's name is a C string, and the shape has so many dims.
    let (operator, shape) = unsafe {
        let shape = match finding.dims {
            0 => &[][..],
            dims => std::slice::from_raw_parts(finding.shape, dims),
        };
        (CStr::from_ptr(finding.op), shape)
    };
    let found = NonFinite {
        operator: operator.to_string_lossy().into_owned(),
        shape: shape.to_vec(),
        count: finding.count,
        nan: finding.nan,
        inputs_finite: finding.inputs_finite,
        marked: usize::try_from(finding.marked).ok(),
        label: (findings.label)(),
    };
    findings.found.lock().unwrap_or_else(PoisonError::into_inner).push(found);
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;
    use crate::autograd::{BackwardOptions, backward};

    #[test]
    fn the_first_of_each_is_found_and_its_place() -> Result<()> {
        let a = Tensor::from_slice(&[2.0f64, 3.0]).set_requires_grad(true);
        let b = Tensor::from_slice(&[1.0f64, 0.0]).set_requires_grad(true);
        // The derivative of the root at 0 is infinite, times 0 is NaN; forward is finite.
        let (loss, found) = first_non_finite(
            &[&a, &b],
            || "here".to_owned(),
            || -> Result<Tensor> {
                let loss = a.f_mul(&b)?.f_sqrt()?.f_mul_scalar(0.0)?.f_sum(Kind::Double)?;
                backward(&[&loss], &[], BackwardOptions::default())?;
                Ok(loss)
            },
        )?;
        assert_eq!(loss?.f_double_value(&[])?, 0.0);
        assert_eq!(found.len(), 1, "{found:?}");
        let first = &found[0];
        assert!(first.nan && first.count == 1 && first.inputs_finite, "{first:?}");
        assert_eq!((first.shape.as_slice(), first.label.as_str()), (&[2][..], "here"));
        let (_, none) = first_non_finite(&[], String::new, || a.f_mul(&b))?;
        assert_eq!(none, []);
        Ok(())
    }

    #[test]
    fn fresh_memory_and_other_threads_do_not_count() -> Result<()> {
        let (_, found) = first_non_finite(&[], String::new, || {
            let fresh = Tensor::f_empty([64], (Kind::Float, tch::Device::Cpu))?;
            let part = fresh.f_narrow(0, 0, 8)?;
            let part = part.shallow_clone().f_fill_(1.0)?;
            let _ = std::thread::spawn(|| Tensor::from_slice(&[0.0f32]).f_log()).join().unwrap()?;
            part.f_sum(Kind::Float)
        })?;
        assert_eq!(found, []);
        Ok(())
    }
}
