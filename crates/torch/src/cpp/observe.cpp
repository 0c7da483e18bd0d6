// Looks at what operators give, to find the first that is not finite; and libtorch's switch for deterministic kernels.
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "error.h"
#include "tensor.h"

using namespace isobar;

namespace {

struct Finding {
  const char* op;
  const int64_t* shape;
  size_t dims;
  int64_t count; // elements that are NaN, or infinite
  int64_t marked; // the marked tensor that an operator used last, or -1
  bool nan;
  bool inputs_finite;
};

using Found = void (*)(void* box, const Finding* finding);

struct Watch {
  std::unordered_map<const void*, int64_t> marked; // by storage
  Found found;
  void* box;
  at::CallbackHandle handle = 0;
  std::mutex turn; // a device's backward runs on a thread of its own
  int64_t last = -1;
  bool seen[2] = {false, false};
};

// A rank that is a thread has its own; threads that libtorch starts for a backward pass take the process's.
thread_local Watch* of_thread = nullptr;
std::atomic<Watch*> of_process{nullptr};

Watch* current() {
  return of_thread ? of_thread : of_process.load();
}

bool holds_numbers(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() && tensor.numel() > 0 &&
      (tensor.is_floating_point() || tensor.is_complex());
}

template <typename F>
void each_tensor(const c10::IValue& value, F&& look) {
  if (value.isTensor()) {
    if (holds_numbers(value.toTensor())) look(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (holds_numbers(tensor)) look(tensor);
    }
  }
}

int64_t count(const at::Tensor& tensor, bool nan) {
  return (nan ? at::isnan(tensor) : at::isinf(tensor)).sum().item<int64_t>();
}

const void* storage(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

// Fresh memory holds anything.
bool is_fresh(const char* op) {
  return std::strstr(op, "empty") || std::strstr(op, "resize") || std::strstr(op, "aten::set_");
}

// What an operator is given, which its end does not tell.
struct Inputs : at::ObserverContext {
  std::vector<at::Tensor> tensors;
};

std::unique_ptr<at::ObserverContext> before(const at::RecordFunction& call) {
  Watch* watch = current();
  if (!watch) return nullptr;
  at::RecordFunctionGuard unobserved(false);
  auto inputs = std::make_unique<Inputs>();
  for (const c10::IValue& input : call.inputs()) {
    each_tensor(input, [&](const at::Tensor& tensor) {
      inputs->tensors.push_back(tensor);
      auto found = watch->marked.find(storage(tensor));
      if (found == watch->marked.end()) return;
      std::lock_guard<std::mutex> turn(watch->turn);
      watch->last = found->second;
    });
  }
  return inputs;
}

void after(const at::RecordFunction& call, at::ObserverContext* context) {
  Watch* watch = current();
  const char* op = call.name();
  if (!watch || !context || is_fresh(op)) return;
  at::RecordFunctionGuard unobserved(false);
  at::NoGradGuard no_grad;
  const std::vector<at::Tensor>& inputs = static_cast<Inputs*>(context)->tensors;
  size_t length = std::strlen(op);
  bool in_place = length > 0 && op[length - 1] == '_';
  for (const c10::IValue& output : call.outputs()) {
    each_tensor(output, [&](const at::Tensor& tensor) {
      auto shares = [&](const at::Tensor& other) { return storage(other) == storage(tensor); };
      // A view shows what is there, which may be fresh memory.
      if (!in_place && std::any_of(inputs.begin(), inputs.end(), shares)) return;
      std::lock_guard<std::mutex> turn(watch->turn);
      for (bool nan : {true, false}) {
        if (watch->seen[nan]) continue;
        int64_t number = count(tensor, nan);
        if (number == 0) continue;
        bool finite = std::all_of(inputs.begin(), inputs.end(), [&](const at::Tensor& other) {
          return (in_place && shares(other)) || at::isfinite(other).all().item<bool>();
        });
        watch->seen[nan] = true;
        auto sizes = tensor.sizes();
        Finding finding{op, sizes.data(), sizes.size(), number, watch->last, nan, finite};
        watch->found(watch->box, &finding);
      }
    });
  }
}

} // namespace

extern "C" {

Watch* isobar_observe_start(
    const at::Tensor* const* marked, size_t marked_count, Found found, void* box, Error* error) {
  return guarded(error, [&] {
    auto watch = std::make_unique<Watch>();
    for (size_t i = 0; i < marked_count; ++i) {
      if (marked[i]->has_storage()) watch->marked.emplace(storage(*marked[i]), static_cast<int64_t>(i));
    }
    watch->found = found;
    watch->box = box;
    watch->handle = at::addThreadLocalCallback(at::RecordFunctionCallback(before, after)
                                                   .needsInputs(true)
                                                   .needsOutputs(true)
                                                   .scopes({at::RecordScope::FUNCTION}));
    of_thread = watch.get();
    of_process.store(watch.get());
    return watch.release();
  });
}

void isobar_observe_stop(Watch* watch) {
  at::removeCallback(watch->handle);
  of_thread = nullptr;
  Watch* expected = watch;
  of_process.compare_exchange_strong(expected, nullptr);
  delete watch;
}

void isobar_set_deterministic(bool on, Error* error) {
  guarded(error, [&] {
    at::globalContext().setDeterministicAlgorithms(on, /*warn_only=*/false);
    at::globalContext().setDeterministicFillUninitializedMemory(false);
    at::globalContext().setDeterministicCuDNN(on);
    if (on) at::globalContext().setBenchmarkCuDNN(false);
  });
}

bool isobar_is_deterministic() {
  return at::globalContext().deterministicAlgorithms();
}

} // extern "C"
