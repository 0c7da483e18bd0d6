// Memory: tensors over Rust's vectors, the allocator's face to libtorch, and what raw communication asks of a tensor.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>

#include "error.h"
#include "tensor.h"

using at::MemoryFormat;
using at::Tensor;

namespace isobar {

using Allocate = void* (*)(size_t bytes);
using Free = void (*)(void* block);

// Hands libtorch's requests to Rust. A block's deleter is plain `free`, so that blocks outlive a change of allocator.
class RustAllocator : public c10::Allocator {
 public:
  RustAllocator(Allocate allocate, Free free) : allocate_(allocate), free_(free) {}

  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes ? allocate_(bytes) : nullptr;
    TORCH_CHECK(block || !bytes, "not enough memory: ", bytes, " bytes were asked for");
    return {block, block, free_, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return free_; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  Allocate allocate_;
  Free free_;
};

// The numbers that Rust's `MemoryFormat` has.
static MemoryFormat memory_format(int format) {
  switch (format) {
    case 1:
      return MemoryFormat::ChannelsLast;
    case 2:
      return MemoryFormat::ChannelsLast3d;
    default:
      return MemoryFormat::Contiguous;
  }
}

} // namespace isobar

using namespace isobar;

extern "C" {

// `context` is given to `drop` once: when the last tensor over the memory goes, or here when there is an error.
Tensor* isobar_from_vec(
    void* data, const int64_t* shape, size_t dims, int kind, void* context, void (*drop)(void*), Error* error) {
  // Shared, since the tensor's deleter is a std::function, which is copied.
  std::shared_ptr<void> owner(context, drop);
  return guarded(error, [&]() -> Tensor* {
    return new Tensor(at::from_blob(
        data, at::IntArrayRef(shape, dims), [owner](void*) mutable { owner.reset(); },
        at::TensorOptions().dtype(static_cast<at::ScalarType>(kind))));
  });
}

void isobar_install_allocator(Allocate allocate, Free free) {
  // Never freed: libtorch keeps using it until the process ends. The priority is the highest there is.
  c10::SetCPUAllocator(new RustAllocator(allocate, free), 255);
}

void* isobar_data_ptr(const Tensor* tensor, Error* error) {
  return guarded(error, [&]() -> void* {
    TORCH_CHECK(
        !tensor->is_conj() && !tensor->is_neg(),
        "the tensor's memory holds values yet to be conjugated or negated; take it through memory::dense first");
    return tensor->data_ptr();
  });
}

size_t isobar_nbytes(const Tensor* tensor) {
  return tensor->defined() ? static_cast<size_t>(tensor->numel()) * tensor->element_size() : 0;
}

int64_t isobar_storage_offset(const Tensor* tensor, Error* error) {
  return guarded(error, [&] { return tensor->storage_offset(); });
}

bool isobar_is_contiguous(const Tensor* tensor, int format, Error* error) {
  return guarded(error, [&] { return tensor->is_contiguous(memory_format(format)); });
}

int isobar_suggest_memory_format(const Tensor* tensor, Error* error) {
  return guarded(error, [&] {
    switch (tensor->suggest_memory_format()) {
      case MemoryFormat::ChannelsLast:
        return 1;
      case MemoryFormat::ChannelsLast3d:
        return 2;
      default:
        return 0;
    }
  });
}

Tensor* isobar_dense(const Tensor* tensor, int format, Error* error) {
  return guarded(error, [&]() -> Tensor* {
    return new Tensor(tensor->resolve_conj().resolve_neg().contiguous(memory_format(format)));
  });
}

Tensor* isobar_empty(
    const int64_t* shape, size_t dims, const Tensor* like, int format, Error* error) {
  return guarded(error, [&]() -> Tensor* {
    return new Tensor(at::empty(at::IntArrayRef(shape, dims), like->options().requires_grad(false), memory_format(format)));
  });
}

Tensor* isobar_empty_like(const Tensor* like, Error* error) {
  return guarded(error, [&]() -> Tensor* {
    return new Tensor(at::empty_like(*like, like->options().requires_grad(false), MemoryFormat::Preserve));
  });
}

void isobar_copy(const Tensor* to, const Tensor* from, bool non_blocking, Error* error) {
  guarded(error, [&] {
    c10::AutoGradMode no_grad(false);
    to->copy_(*from, non_blocking);
  });
}

} // extern "C"
