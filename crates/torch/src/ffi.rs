//! The shim's functions and structs, as declared in `src/cpp`.

use std::ffi::{c_char, c_int, c_void};

pub(crate) use torch_sys::C_tensor;

/// Error report of a shim function; `isobar::Error` in C++.
#[repr(C)]
pub(crate) struct RawError {
    pub(crate) message: *mut c_char,
    pub(crate) boxed: *mut c_void,
}

/// Slot for a callback's error; `isobar::Failure` in C++.
#[repr(C)]
pub(crate) struct RawFailure {
    pub(crate) boxed: *mut c_void,
    pub(crate) drop: Option<extern "C" fn(*mut c_void)>,
    pub(crate) text: *const c_char,
}

/// `Finding` of `observe.cpp`.
#[repr(C)]
pub(crate) struct Finding {
    pub(crate) op: *const c_char,
    pub(crate) shape: *const i64,
    pub(crate) dims: usize,
    pub(crate) count: i64,
    pub(crate) marked: i64,
    pub(crate) nan: bool,
    pub(crate) inputs_finite: bool,
}

pub(crate) type Drop = extern "C" fn(*mut c_void);
pub(crate) type Backward = extern "C" fn(
    boxed: *mut c_void,
    node: *const Node,
    grads: *mut *mut C_tensor,
    grad_count: usize,
    results: *mut *mut C_tensor,
    result_count: usize,
    failure: *mut RawFailure,
);
pub(crate) type Hook =
    extern "C" fn(boxed: *mut c_void, grad: *const C_tensor, failure: *mut RawFailure) -> *mut C_tensor;

/// `isobar::ClosureNode`.
#[repr(C)]
pub(crate) struct Node {
    _opaque: [u8; 0],
}

/// A `std::shared_ptr` to `isobar::Slot`.
#[repr(C)]
pub(crate) struct HookSlot {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    pub(crate) fn isobar_free_text(text: *mut c_char);

    pub(crate) fn isobar_libtorch_version() -> *const c_char;

    pub(crate) fn isobar_cpu_capability() -> *const c_char;

    pub(crate) fn isobar_skip_earlier_exit_handlers() -> c_int;

    pub(crate) fn isobar_function_apply(
        name: *const c_char,
        inputs: *const *const C_tensor,
        input_count: usize,
        outputs: *const *const C_tensor,
        output_count: usize,
        saved: *const *const C_tensor,
        saved_count: usize,
        closure: *mut c_void,
        drop: Drop,
        backward: Backward,
        results: *mut *mut C_tensor,
        error: *mut RawError,
    );
    pub(crate) fn isobar_node_saved_count(node: *const Node) -> usize;
    pub(crate) fn isobar_node_saved(node: *const Node, index: usize, error: *mut RawError) -> *mut C_tensor;
    pub(crate) fn isobar_node_needs_input_grad(node: *const Node, index: usize) -> bool;
    pub(crate) fn isobar_node_output_zeros(
        node: *const Node,
        index: usize,
        error: *mut RawError,
    ) -> *mut C_tensor;
    pub(crate) fn isobar_backward(
        roots: *const *const C_tensor,
        count: usize,
        grads: *const *const C_tensor,
        inputs: *const *const C_tensor,
        input_count: usize,
        retain_graph: bool,
        create_graph: bool,
        error: *mut RawError,
    );
    pub(crate) fn isobar_backward_within(
        roots: *const *const C_tensor,
        count: usize,
        grads: *const *const C_tensor,
        error: *mut RawError,
    );
    pub(crate) fn isobar_grad(
        outputs: *const *const C_tensor,
        count: usize,
        inputs: *const *const C_tensor,
        input_count: usize,
        grads: *const *const C_tensor,
        retain_graph: bool,
        create_graph: bool,
        allow_unused: bool,
        results: *mut *mut C_tensor,
        error: *mut RawError,
    );

    pub(crate) fn isobar_register_hook(
        tensor: *const C_tensor,
        closure: *mut c_void,
        drop: Drop,
        hook: Hook,
        error: *mut RawError,
    ) -> *mut HookSlot;
    pub(crate) fn isobar_register_post_accumulate_hook(
        leaf: *const C_tensor,
        closure: *mut c_void,
        drop: Drop,
        hook: Hook,
        error: *mut RawError,
    ) -> *mut HookSlot;
    pub(crate) fn isobar_after_backward(
        closure: *mut c_void,
        drop: unsafe extern "C" fn(*mut c_void),
        run: extern "C" fn(*mut c_void, *mut RawFailure),
        error: *mut RawError,
    );
    pub(crate) fn isobar_hook_remove(slot: *const HookSlot);
    pub(crate) fn isobar_hook_free(slot: *mut HookSlot);
}

/// `State` of `autocast.cpp`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AutocastState {
    pub(crate) enabled: bool,
    pub(crate) kind: c_int,
    pub(crate) cached: bool,
}

unsafe extern "C" {
    pub(crate) fn isobar_autocast_get(device: c_int, state: *mut AutocastState, error: *mut RawError);
    pub(crate) fn isobar_autocast_set(device: c_int, state: *const AutocastState, error: *mut RawError);
}

unsafe extern "C" {
    pub(crate) fn isobar_storage_release(tensor: *const C_tensor, error: *mut RawError);
    pub(crate) fn isobar_storage_restore(tensor: *const C_tensor, error: *mut RawError);
    pub(crate) fn isobar_shares_storage(
        one: *const C_tensor,
        other: *const C_tensor,
        error: *mut RawError,
    ) -> bool;
    pub(crate) fn isobar_clear_grad(leaf: *const C_tensor, error: *mut RawError);
}

pub(crate) type Allocate = extern "C" fn(bytes: usize) -> *mut c_void;
pub(crate) type Free = extern "C" fn(block: *mut c_void);

unsafe extern "C" {
    pub(crate) fn isobar_from_vec(
        data: *mut c_void,
        shape: *const i64,
        dims: usize,
        kind: c_int,
        context: *mut c_void,
        drop: Drop,
        error: *mut RawError,
    ) -> *mut C_tensor;
    pub(crate) fn isobar_install_allocator(allocate: Allocate, free: Free);
    pub(crate) fn isobar_data_ptr(tensor: *const C_tensor, error: *mut RawError) -> *mut c_void;
    pub(crate) fn isobar_nbytes(tensor: *const C_tensor) -> usize;
    pub(crate) fn isobar_storage_offset(tensor: *const C_tensor, error: *mut RawError) -> i64;
    pub(crate) fn isobar_is_contiguous(tensor: *const C_tensor, format: c_int, error: *mut RawError) -> bool;
    pub(crate) fn isobar_suggest_memory_format(tensor: *const C_tensor, error: *mut RawError) -> c_int;
    pub(crate) fn isobar_dense(tensor: *const C_tensor, format: c_int, error: *mut RawError)
    -> *mut C_tensor;
    pub(crate) fn isobar_empty(
        shape: *const i64,
        dims: usize,
        like: *const C_tensor,
        format: c_int,
        error: *mut RawError,
    ) -> *mut C_tensor;
    pub(crate) fn isobar_empty_like(like: *const C_tensor, error: *mut RawError) -> *mut C_tensor;
    pub(crate) fn isobar_copy(
        to: *const C_tensor,
        from: *const C_tensor,
        non_blocking: bool,
        error: *mut RawError,
    );
}

/// Bytes of C++'s; `isobar::Bytes`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Bytes {
    pub(crate) data: *const u8,
    pub(crate) size: usize,
}

pub(crate) type Ask = extern "C" fn(
    boxed: *mut c_void,
    kind: u8,
    number: i64,
    parts: *const Bytes,
    part_count: usize,
    target: *mut c_void,
    receive: extern "C" fn(target: *mut c_void, data: *const u8, size: usize),
    failure: *mut RawFailure,
) -> i64;

/// A reference to a `c10d::ProcessGroupGloo`.
#[repr(C)]
pub(crate) struct Gloo {
    _opaque: [u8; 0],
}

/// `isobar::Work`.
#[repr(C)]
pub(crate) struct Work {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    pub(crate) fn isobar_gloo_new(
        store: *mut c_void,
        drop: Drop,
        ask: Ask,
        prefix: *const c_char,
        rank: c_int,
        size: c_int,
        timeout_ms: i64,
        interface: *const c_char,
        host: *const c_char,
        error: *mut RawError,
    ) -> *mut Gloo;
    pub(crate) fn isobar_gloo_free(gloo: *mut Gloo);
    pub(crate) fn isobar_gloo_send(
        gloo: *const Gloo,
        tensor: *const C_tensor,
        to: c_int,
        tag: c_int,
        error: *mut RawError,
    ) -> *mut Work;
    pub(crate) fn isobar_gloo_recv(
        gloo: *const Gloo,
        tensor: *const C_tensor,
        from: c_int,
        tag: c_int,
        error: *mut RawError,
    ) -> *mut Work;
    pub(crate) fn isobar_gloo_all_to_all(
        gloo: *const Gloo,
        output: *const C_tensor,
        input: *const C_tensor,
        output_counts: *const i64,
        input_counts: *const i64,
        ranks: usize,
        error: *mut RawError,
    ) -> *mut Work;
    pub(crate) fn isobar_gloo_all_reduce(
        gloo: *const Gloo,
        tensor: *const C_tensor,
        op: c_int,
        error: *mut RawError,
    ) -> *mut Work;
    pub(crate) fn isobar_gloo_barrier(gloo: *const Gloo, error: *mut RawError) -> *mut Work;
    pub(crate) fn isobar_work_is_completed(work: *mut Work, error: *mut RawError) -> bool;
    pub(crate) fn isobar_work_wait(work: *mut Work, timeout_ms: i64, error: *mut RawError);
    pub(crate) fn isobar_work_abandon(work: *mut Work, error: *mut RawError);
    pub(crate) fn isobar_work_free(work: *mut Work);
}

/// A `c10::Event`.
#[repr(C)]
pub(crate) struct Event {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    pub(crate) fn isobar_cuda_current_stream(device: c_int, error: *mut RawError) -> i64;
    pub(crate) fn isobar_cuda_stream_from_pool(
        device: c_int,
        high_priority: bool,
        error: *mut RawError,
    ) -> i64;
    pub(crate) fn isobar_cuda_stream_handle(id: i64, device: c_int, error: *mut RawError) -> *mut c_void;
    pub(crate) fn isobar_cuda_stream_query(id: i64, device: c_int, error: *mut RawError) -> bool;
    pub(crate) fn isobar_cuda_stream_synchronize(id: i64, device: c_int, error: *mut RawError);
    pub(crate) fn isobar_cuda_enter_stream(
        id: i64,
        device: c_int,
        device_before: *mut c_int,
        error: *mut RawError,
    ) -> i64;
    pub(crate) fn isobar_cuda_leave_stream(
        id_before: i64,
        device: c_int,
        device_before: c_int,
        error: *mut RawError,
    );
    pub(crate) fn isobar_cuda_record_stream(
        tensor: *const C_tensor,
        id: i64,
        device: c_int,
        error: *mut RawError,
    );
    pub(crate) fn isobar_cuda_event_new(timing: bool, error: *mut RawError) -> *mut Event;
    pub(crate) fn isobar_cuda_event_free(event: *mut Event);
    pub(crate) fn isobar_cuda_event_record(event: *mut Event, id: i64, device: c_int, error: *mut RawError);
    pub(crate) fn isobar_cuda_event_block(event: *const Event, id: i64, device: c_int, error: *mut RawError);
    pub(crate) fn isobar_cuda_event_query(event: *const Event, error: *mut RawError) -> bool;
    pub(crate) fn isobar_cuda_event_synchronize(event: *const Event, error: *mut RawError);
    pub(crate) fn isobar_cuda_event_elapsed_ms(
        from: *const Event,
        to: *const Event,
        error: *mut RawError,
    ) -> f64;
    pub(crate) fn isobar_pinned(
        shape: *const i64,
        dims: usize,
        kind: c_int,
        error: *mut RawError,
    ) -> *mut C_tensor;
}

/// `Watch` of `observe.cpp`.
#[repr(C)]
pub(crate) struct Watch {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    pub(crate) fn isobar_observe_start(
        marked: *const *const C_tensor,
        marked_count: usize,
        found: extern "C" fn(*mut c_void, *const Finding),
        findings: *mut c_void,
        error: *mut RawError,
    ) -> *mut Watch;
    pub(crate) fn isobar_observe_stop(watch: *mut Watch);
    pub(crate) fn isobar_set_deterministic(on: bool, error: *mut RawError);
    pub(crate) fn isobar_is_deterministic() -> bool;
}

unsafe extern "C" {
    pub(crate) fn isobar_meta_enable(error: *mut RawError);
    pub(crate) fn isobar_meta_live() -> i64;
    pub(crate) fn isobar_meta_peak() -> i64;
    pub(crate) fn isobar_meta_reset_peak();
}
