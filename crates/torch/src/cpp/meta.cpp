// The meta device: tensors with a shape and without memory. tch cannot name it, so `Device::Mps`, which libtorch for Linux
// does not have, stands for it. Kernels that PyTorch implements only in Python are added here.
#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "error.h"
#include "tensor.h"

using at::IntArrayRef;
using at::Tensor;

namespace isobar {

namespace {

using Maybe = std::optional<Tensor>;
using Shape = std::vector<int64_t>;
using Mask = std::array<bool, 3>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

// Bytes of the meta tensors that a thread has made.
struct Meter {
  std::atomic<int64_t> live{0};
  std::atomic<int64_t> peak{0};

  void add(int64_t bytes) {
    const int64_t now = live += bytes;
    if (now > peak.load()) peak.store(now);
  }
};

// Shared with the blocks, which another thread may free.
const std::shared_ptr<Meter>& meter() {
  static thread_local auto own = std::make_shared<Meter>();
  return own;
}

struct Block {
  std::shared_ptr<Meter> meter;
  int64_t bytes;
};

void free_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  block->meter->live -= block->bytes;
}

// Counts bytes without allocating them. Each block has a unique address, which is never mapped, so that tensors of different
// storages differ.
class CountingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto block = std::make_unique<Block>(Block{meter(), static_cast<int64_t>(bytes)});
    block->meter->add(block->bytes);
    void* address = bytes ? reinterpret_cast<void*>(next_.fetch_add((bytes + 63) / 64 * 64)) : nullptr;
    return {address, block.release(), &free_block, c10::Device(c10::DeviceType::Meta)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void*, const void*, std::size_t) const override {}

 private:
  // Above all addresses of a process.
  std::atomic<uintptr_t> next_{uintptr_t{1} << 62};
};

// ---- creation, for the device that stands for meta

at::TensorOptions meta_options(std::optional<at::ScalarType> kind) {
  return at::TensorOptions().device(at::kMeta).dtype(kind.value_or(at::kFloat));
}

Tensor empty(
    IntArrayRef shape, std::optional<at::ScalarType> kind, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::empty(shape, meta_options(kind), format);
}

Tensor empty_strided(
    IntArrayRef shape, IntArrayRef strides, std::optional<at::ScalarType> kind, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::empty_strided(shape, strides, meta_options(kind));
}

// ---- reads: every value is 0

Tensor& copy(Tensor& to, const Tensor& from, bool) {
  TORCH_CHECK(at::is_expandable_to(from.sizes(), to.sizes()), "a tensor of ", from.sizes(), " is copied to ", to.sizes());
  if (!to.is_meta()) to.zero_();
  return to;
}

at::Scalar local_scalar(const Tensor&) { return 0; }

// ---- kernels

Tensor like(const Tensor& tensor, IntArrayRef shape) { return at::empty(shape, tensor.options()); }

Tensor if_asked(bool asked, const Tensor& tensor) { return asked ? at::empty_like(tensor) : Tensor(); }

Tensor convolution(
    const Tensor& input, const Tensor& weight, const Maybe&, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
    bool transposed, IntArrayRef output_padding, int64_t groups) {
  const bool batched = input.dim() == weight.dim();
  const int64_t first = batched ? 2 : 1;
  Shape shape;
  if (batched) shape.push_back(input.size(0));
  shape.push_back(transposed ? weight.size(1) * groups : weight.size(0));
  for (int64_t dim = 0; dim < weight.dim() - 2; ++dim) {
    const int64_t extent = input.size(first + dim), reach = dilation[dim] * (weight.size(dim + 2) - 1);
    shape.push_back(
        transposed ? (extent - 1) * stride[dim] - 2 * padding[dim] + reach + output_padding[dim] + 1
                   : (extent + 2 * padding[dim] - reach - 1) / stride[dim] + 1);
  }
  return at::empty(shape, input.options(), batched ? input.suggest_memory_format() : at::MemoryFormat::Contiguous);
}

Three convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, IntArrayRef, IntArrayRef, IntArrayRef, bool transposed,
    IntArrayRef, int64_t groups, Mask mask) {
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  return {if_asked(mask[0], input), if_asked(mask[1], weight), mask[2] ? like(grad, {channels}) : Tensor()};
}

Tensor real_to_complex(const Tensor& self, IntArrayRef dims, int64_t, bool onesided) {
  Shape shape = self.sizes().vec();
  if (onesided && !dims.empty()) shape[dims.back()] = shape[dims.back()] / 2 + 1;
  return at::empty(shape, self.options().dtype(at::toComplexType(self.scalar_type())));
}

Tensor complex_to_real(const Tensor& self, IntArrayRef dims, int64_t, int64_t last) {
  Shape shape = self.sizes().vec();
  if (!dims.empty()) shape[dims.back()] = last;
  return at::empty(shape, self.options().dtype(at::toRealValueType(self.scalar_type())));
}

Tensor complex_to_complex(const Tensor& self, IntArrayRef, int64_t, bool) { return like(self, self.sizes()); }

Three layer_norm(const Tensor& input, IntArrayRef normalized, const Maybe&, const Maybe&, double) {
  Shape moments = input.sizes().vec();
  for (size_t dim = moments.size() - normalized.size(); dim < moments.size(); ++dim) moments[dim] = 1;
  return {like(input, input.sizes()), like(input, moments), like(input, moments)};
}

Tensor parameter_grad(bool asked, const Maybe& weight, const Tensor& input, IntArrayRef shape) {
  if (!asked) return {};
  return weight && weight->defined() ? like(*weight, shape) : like(input, shape);
}

Three layer_norm_backward(
    const Tensor&, const Tensor& input, IntArrayRef normalized, const Tensor&, const Tensor&, const Maybe& weight, const Maybe&,
    Mask mask) {
  return {
      if_asked(mask[0], input), parameter_grad(mask[1], weight, input, normalized),
      parameter_grad(mask[2], weight, input, normalized)};
}

Three group_norm(const Tensor& input, const Maybe&, const Maybe&, int64_t n, int64_t, int64_t, int64_t group, double) {
  return {like(input, input.sizes()), like(input, {n, group}), like(input, {n, group})};
}

Three group_norm_backward(
    const Tensor&, const Tensor& input, const Tensor&, const Tensor&, const Maybe& weight, int64_t, int64_t channels, int64_t,
    int64_t, Mask mask) {
  return {
      if_asked(mask[0], input), parameter_grad(mask[1], weight, input, {channels}),
      parameter_grad(mask[2], weight, input, {channels})};
}

Three batch_norm(
    const Tensor& input, const Maybe&, const Maybe&, const Maybe&, const Maybe&, bool training, double, double) {
  const int64_t saved = training ? input.size(1) : 0;
  return {at::empty_like(input), like(input, {saved}), like(input, {saved})};
}

Three batch_norm_backward(
    const Tensor&, const Tensor& input, const Maybe& weight, const Maybe&, const Maybe&, const Maybe&, const Maybe&, bool, double,
    Mask mask) {
  const int64_t channels = input.size(1);
  return {
      if_asked(mask[0], input), parameter_grad(mask[1], weight, input, {channels}),
      parameter_grad(mask[2], weight, input, {channels})};
}

Shape reduced_shape(const Tensor& self, at::OptionalIntArrayRef dims, bool keepdim) {
  Shape shape;
  std::vector<bool> reduced(self.dim(), !dims || dims->empty());
  if (dims) {
    for (int64_t dim : *dims) reduced[dim < 0 ? dim + self.dim() : dim] = true;
  }
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (!reduced[dim]) shape.push_back(self.size(dim));
    if (reduced[dim] && keepdim) shape.push_back(1);
  }
  return shape;
}

Tensor variance(const Tensor& self, at::OptionalIntArrayRef dims, const std::optional<at::Scalar>&, bool keepdim) {
  const auto real = self.options().dtype(at::toRealValueType(self.scalar_type()));
  return at::empty(reduced_shape(self, dims, keepdim), real);
}

std::tuple<Tensor, Tensor> var_mean(
    const Tensor& self, at::OptionalIntArrayRef dims, const std::optional<at::Scalar>& correction, bool keepdim) {
  return {variance(self, dims, correction, keepdim), like(self, reduced_shape(self, dims, keepdim))};
}

Tensor index_select(const Tensor& self, int64_t dim, const Tensor& index) {
  Shape shape = self.sizes().vec();
  if (!shape.empty()) shape[dim < 0 ? dim + self.dim() : dim] = index.numel();
  return like(self, shape);
}

Tensor where(const Tensor& condition, const Tensor& self, const Tensor& other) {
  const auto shape = at::infer_size(condition.sizes(), at::infer_size(self.sizes(), other.sizes()));
  const auto& tensor = self.is_meta() ? self : (other.is_meta() ? other : condition);
  return at::empty(shape, tensor.options().dtype(at::result_type(self, other)));
}

// The tensors among the arguments of a call.
std::vector<Tensor> tensors_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  std::vector<Tensor> found;
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor() && value.toTensor().defined()) found.push_back(value.toTensor());
  }
  return found;
}

// An operator whose result is like the tensor with this number among its arguments.
template <size_t place>
void like_argument(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto result = at::empty_like(tensors_of(op, *stack).at(place));
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, result);
}

// An element-wise operator that writes to its last argument.
void into_last(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  auto found = tensors_of(op, *stack);
  Shape shape;
  for (size_t place = 0; place + 1 < found.size(); ++place) shape = at::infer_size(shape, found[place].sizes());
  found.back().resize_(shape);
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, found.back());
}

Tensor scalar(const Tensor& self) { return like(self, {}); }

Tensor dot(const Tensor& self, const Tensor&) { return like(self, {}); }

Tensor standard_deviation(
    const Tensor& self, at::OptionalIntArrayRef dims, const std::optional<at::Scalar>& correction, bool keepdim) {
  return variance(self, dims, correction, keepdim);
}

Tensor pooled_to(const Tensor& self, IntArrayRef extents) {
  Shape shape = self.sizes().vec();
  std::copy(extents.rbegin(), extents.rend(), shape.rbegin());
  return like(self, shape);
}

std::tuple<Tensor, Tensor> max_pool3d(
    const Tensor& self, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  const auto at = [](IntArrayRef values, size_t dim) { return values.size() == 1 ? values[0] : values[dim]; };
  Shape shape = self.sizes().vec();
  for (size_t dim = 0; dim < 3; ++dim) {
    auto& extent = shape[shape.size() - 3 + dim];
    const int64_t step = at(stride.empty() ? kernel : stride, dim), pad = at(padding, dim);
    const int64_t room = extent + 2 * pad - at(dilation, dim) * (at(kernel, dim) - 1) - 1;
    int64_t count = (room + (ceil_mode ? step - 1 : 0)) / step + 1;
    // A window begins inside the input or its leading padding.
    if (ceil_mode && (count - 1) * step >= extent + pad) --count;
    extent = count;
  }
  return {like(self, shape), at::empty(shape, self.options().dtype(at::kLong))};
}

Tensor reflection_pad2d(const Tensor& self, IntArrayRef padding) {
  Shape shape = self.sizes().vec();
  shape[shape.size() - 1] += padding[0] + padding[1];
  shape[shape.size() - 2] += padding[2] + padding[3];
  return like(self, shape);
}

Tensor embedding_backward(const Tensor& grad, const Tensor&, int64_t count, int64_t, bool) {
  return like(grad, {count, grad.size(-1)});
}

Tensor grid_sample(const Tensor& self, const Tensor& grid, int64_t, int64_t, bool) {
  Shape shape = grid.sizes().vec();
  shape.pop_back();
  shape.insert(shape.begin() + 1, self.size(1));
  return like(self, shape);
}

std::tuple<Tensor, Tensor> grid_sample_backward(
    const Tensor&, const Tensor& self, const Tensor& grid, int64_t, int64_t, bool, std::array<bool, 2> mask) {
  return {if_asked(mask[0], self), at::empty_like(grid)};
}

Tensor unfold_backward(const Tensor& grad, IntArrayRef shape, int64_t, int64_t, int64_t) { return like(grad, shape); }

std::tuple<Tensor, Tensor> prelu_backward(const Tensor&, const Tensor& self, const Tensor& weight) {
  return {at::empty_like(self), at::empty_like(weight)};
}

Tensor is_nan(const Tensor& self) { return at::empty(self.sizes(), self.options().dtype(at::kBool)); }

std::tuple<Tensor, Tensor> log_sigmoid(const Tensor& self) { return {at::empty_like(self), at::empty_like(self)}; }

Tensor angle(const Tensor& self) {
  return at::empty(self.sizes(), self.options().dtype(at::toRealValueType(self.scalar_type())));
}

Tensor distances(const Tensor& from, const Tensor& to, double, std::optional<int64_t>) {
  Shape shape = at::infer_size(from.sizes().slice(0, from.dim() - 2), to.sizes().slice(0, to.dim() - 2));
  shape.push_back(from.size(-2));
  shape.push_back(to.size(-2));
  return like(from, shape);
}

// One loss for each element, or a scalar.
Tensor huber_loss(const Tensor& self, const Tensor& target, int64_t reduction, double) {
  return reduction == at::Reduction::None ? like(self, at::infer_size(self.sizes(), target.sizes())) : like(self, {});
}

Tensor& where_out(const Tensor& condition, const Tensor& self, const Tensor& other, Tensor& out) {
  out.resize_(at::infer_size(condition.sizes(), at::infer_size(self.sizes(), other.sizes())));
  return out;
}

Tensor binary(const Tensor& self, const Tensor& other) {
  const auto kind = at::result_type(self, other);
  return at::empty(at::infer_size(self.sizes(), other.sizes()), self.options().dtype(kind));
}

Tensor reversed_difference(const Tensor& self, const Tensor& other, const at::Scalar&) { return binary(self, other); }

// Results like the first tensor, and like the second.
const char* const LIKE_FIRST[] = {
    "relu", "flip", "roll", "hardtanh", "hardtanh_backward", "hardswish", "hardswish_backward", "log_sigmoid_backward",
    "_prelu_kernel", "index_add"};
const char* const LIKE_SECOND[] = {
    "_adaptive_avg_pool2d_backward", "_cdist_backward", "_adaptive_avg_pool3d_backward", "max_pool3d_with_indices_backward",
    "reflection_pad2d_backward", "replication_pad2d_backward", "replication_pad3d_backward", "mse_loss_backward", "glu_backward"};
const char* const INTO_LAST[] = {
    "abs.out", "angle.out", "conj_physical.out", "logical_not.out", "logical_and.out", "logical_or.out", "logical_xor.out",
    "complex.out", "polar.out", "nan_to_num.out", "floor_divide.out", "hardtanh.out", "huber_loss_backward.out",
    "smooth_l1_loss_backward.grad_input", "mse_loss_backward.grad_input"};

struct Registrations {
  std::vector<torch::Library> libraries;

  Registrations() {
    static CountingAllocator allocator;
    c10::SetAllocator(c10::DeviceType::Meta, &allocator);
    static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MPS> guard;
    c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::MPS, &guard);
    torch::Library creation(torch::Library::IMPL, "aten", c10::DispatchKey::MPS, __FILE__, __LINE__);
    creation.impl("empty.memory_format", TORCH_FN(empty));
    creation.impl("empty_strided", TORCH_FN(empty_strided));
    libraries.push_back(std::move(creation));
    torch::Library meta(torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__, __LINE__);
    meta.impl("copy_", TORCH_FN(copy));
    meta.impl("_local_scalar_dense", TORCH_FN(local_scalar));
    meta.impl("convolution_overrideable", TORCH_FN(convolution));
    meta.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
    meta.impl("_fft_r2c", TORCH_FN(real_to_complex));
    meta.impl("_fft_c2r", TORCH_FN(complex_to_real));
    meta.impl("_fft_c2c", TORCH_FN(complex_to_complex));
    meta.impl("native_layer_norm", TORCH_FN(layer_norm));
    meta.impl("native_layer_norm_backward", TORCH_FN(layer_norm_backward));
    meta.impl("native_group_norm", TORCH_FN(group_norm));
    meta.impl("native_group_norm_backward", TORCH_FN(group_norm_backward));
    meta.impl("native_batch_norm", TORCH_FN(batch_norm));
    meta.impl("native_batch_norm_backward", TORCH_FN(batch_norm_backward));
    meta.impl("var.correction", TORCH_FN(variance));
    meta.impl("var_mean.correction", TORCH_FN(var_mean));
    meta.impl("index_select", TORCH_FN(index_select));
    for (const auto* name : LIKE_FIRST) meta.impl(name, torch::CppFunction::makeFromBoxedFunction<&like_argument<0>>());
    for (const auto* name : LIKE_SECOND) meta.impl(name, torch::CppFunction::makeFromBoxedFunction<&like_argument<1>>());
    for (const auto* name : INTO_LAST) meta.impl(name, torch::CppFunction::makeFromBoxedFunction<&into_last>());
    for (const auto* name : {"max", "min", "trace"}) meta.impl(name, TORCH_FN(scalar));
    for (const auto* name : {"dot", "vdot"}) meta.impl(name, TORCH_FN(dot));
    meta.impl("std.correction", TORCH_FN(standard_deviation));
    meta.impl("_prelu_kernel_backward", TORCH_FN(prelu_backward));
    meta.impl("floor_divide", TORCH_FN(binary));
    meta.impl("rsub.Tensor", TORCH_FN(reversed_difference));
    meta.impl("isnan", TORCH_FN(is_nan));
    meta.impl("angle", TORCH_FN(angle));
    meta.impl("log_sigmoid_forward", TORCH_FN(log_sigmoid));
    meta.impl("_adaptive_avg_pool2d", TORCH_FN(pooled_to));
    meta.impl("_adaptive_avg_pool3d", TORCH_FN(pooled_to));
    meta.impl("max_pool3d_with_indices", TORCH_FN(max_pool3d));
    meta.impl("reflection_pad2d", TORCH_FN(reflection_pad2d));
    meta.impl("embedding_dense_backward", TORCH_FN(embedding_backward));
    meta.impl("grid_sampler_2d", TORCH_FN(grid_sample));
    meta.impl("grid_sampler_3d", TORCH_FN(grid_sample));
    meta.impl("grid_sampler_2d_backward", TORCH_FN(grid_sample_backward));
    meta.impl("grid_sampler_3d_backward", TORCH_FN(grid_sample_backward));
    meta.impl("unfold_backward", TORCH_FN(unfold_backward));
    meta.impl("_cdist_forward", TORCH_FN(distances));
    meta.impl("huber_loss", TORCH_FN(huber_loss));
    meta.impl("where.self", TORCH_FN(where));
    meta.impl("where.self_out", TORCH_FN(where_out));
    libraries.push_back(std::move(meta));
  }
};

} // namespace

} // namespace isobar

using namespace isobar;

extern "C" {

// Makes `Device::Mps` the meta device, once for the process.
void isobar_meta_enable(Error* error) {
  guarded(error, [] {
    // Never freed: libtorch refers to it until the process ends.
    static auto* const registrations = new Registrations();
    (void)registrations;
  });
}

int64_t isobar_meta_live() { return meter()->live; }

int64_t isobar_meta_peak() { return meter()->peak; }

void isobar_meta_reset_peak() { meter()->peak = meter()->live.load(); }

} // extern "C"
