// Tensors at the border: `at::Tensor*` owned by whoever the function's comment says.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace isobar {

// A copy of the handles; null stands for an undefined tensor.
inline std::vector<at::Tensor> tensors(const at::Tensor* const* handles, size_t count) {
  std::vector<at::Tensor> list;
  list.reserve(count);
  for (size_t i = 0; i < count; ++i) list.push_back(handles[i] ? *handles[i] : at::Tensor());
  return list;
}

// A new handle for Rust to own; null for an undefined tensor.
inline at::Tensor* release(at::Tensor tensor) {
  return tensor.defined() ? new at::Tensor(std::move(tensor)) : nullptr;
}

// Takes back a handle that Rust gave away.
inline at::Tensor take(at::Tensor* handle) {
  if (!handle) return {};
  std::unique_ptr<at::Tensor> owned(handle);
  return std::move(*owned);
}

} // namespace isobar
