// The memory of a tensor given back and taken anew, while its shape, its history and all handles to it stay.
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

#include "error.h"
#include "tensor.h"

using at::Tensor;

namespace isobar {

static c10::StorageImpl* storage_of(const Tensor* tensor) {
  TORCH_CHECK(tensor->defined() && tensor->has_storage(), "the tensor has no plain memory");
  return tensor->storage().unsafeGetStorageImpl();
}

} // namespace isobar

using namespace isobar;

extern "C" {

void isobar_storage_release(const Tensor* tensor, Error* error) {
  guarded(error, [&] {
    auto* storage = storage_of(tensor);
    storage->set_data_ptr_noswap(at::DataPtr(nullptr, tensor->device()));
    storage->set_nbytes(0);
  });
}

void isobar_storage_restore(const Tensor* tensor, Error* error) {
  guarded(error, [&] {
    auto* storage = storage_of(tensor);
    // Memory comes from the device that is current.
    c10::OptionalDeviceGuard here(tensor->device());
    size_t bytes = (tensor->storage_offset() + tensor->numel()) * tensor->element_size();
    storage->set_data_ptr_noswap(c10::GetAllocator(tensor->device().type())->allocate(bytes));
    storage->set_nbytes(bytes);
  });
}

bool isobar_shares_storage(const Tensor* one, const Tensor* other, Error* error) {
  return guarded(error, [&] { return storage_of(one) == storage_of(other); });
}

void isobar_clear_grad(const Tensor* leaf, Error* error) {
  guarded(error, [&] { leaf->mutable_grad() = Tensor(); });
}

} // extern "C"
