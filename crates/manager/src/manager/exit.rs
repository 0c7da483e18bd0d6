//! Handling of programs that exit without leaving the job properly.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, Once, PoisonError};

use super::DistributedManager;

/// The last panic of the main thread, in one line.
static PANIC: Mutex<Option<String>> = Mutex::new(None);

thread_local! {
    static AT_EXIT: AtExit = const { AtExit };
}

/// Lives as long as the main thread: the C library drops it when `main` returns and in `std::process::exit`.
struct AtExit;

/// Sees to an orderly end where the main thread ends without `cleanup`. For other threads the end is the program's
/// affair.
pub(crate) fn watch_main_thread() {
    static HOOK: Once = Once::new();
    if !is_main_thread() {
        return;
    }
    AT_EXIT.with(|_| ());
    HOOK.call_once(|| {
        let inner = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if is_main_thread() {
                *PANIC.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic.to_string());
            }
            inner(panic);
        }));
    });
}

impl Drop for AtExit {
    fn drop(&mut self) {
        // A panic here would abort the program and hide its exit code.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            let panic = PANIC.lock().unwrap_or_else(PoisonError::into_inner).take();
            match panic {
                Some(panic) => DistributedManager::leave_in_panic(&panic),
                None => drop(DistributedManager::cleanup(false)),
            }
            crate::watchdog::at_exit();
        }));
        let _ = catch_unwind(AssertUnwindSafe(crate::logging::flush));
    }
}

fn is_main_thread() -> bool {
    std::thread::current().name() == Some("main")
}
