// Tensor hooks and post-accumulate hooks that are Rust closures.
#include <algorithm>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "closure.h"
#include "tensor.h"

using at::Tensor;
using at::TensorBase;

namespace isobar {

// The place of one hook, shared by the tensor and the handle: the handle empties it, the tensor's list drops empty
// places when the next hook is registered. So a handle never touches the tensor, and may be used from any thread.
class Slot {
 public:
  explicit Slot(std::shared_ptr<Closure> closure) : closure_(std::move(closure)) {}

  std::shared_ptr<Closure> get() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return closure_;
  }

  // The closure is dropped outside the lock, and by a call that is running, after it.
  void remove() {
    std::shared_ptr<Closure> removed;
    std::lock_guard<std::mutex> lock(mutex_);
    removed.swap(closure_);
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Closure> closure_;
};

// Borrows the gradient; returns null (unchanged) or a handle that the caller owns.
using Hook = Tensor* (*)(void* box, const Tensor* grad, Failure* failure);

struct TensorHook {
  std::shared_ptr<Slot> slot;
  Hook hook;

  TensorBase operator()(const TensorBase& grad) const {
    auto closure = slot->get();
    if (!closure || !grad.defined()) return {};
    Tensor borrowed(grad);
    Tensor* changed = nullptr;
    closure->call([&](void* box, Failure* failure) { changed = hook(box, &borrowed, failure); });
    return take(changed);
  }
};

static bool is_empty(const std::function<TensorBase(const TensorBase&)>& hook) {
  if (!hook) return true;
  auto* ours = hook.target<TensorHook>();
  return ours && !ours->slot->get();
}

// Only places at the end go: those before them may be known to others by their index.
static void drop_empty_places(const Tensor& tensor) {
  auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (!meta || !meta->cpp_hooks_list_) return;
  auto& list = *meta->cpp_hooks_list_;
  for (auto& hook : list)
    if (is_empty(hook)) hook = nullptr;
  while (!list.empty() && !list.back()) list.pop_back();
}

struct PostAccumulateHooks : public torch::autograd::PostAccumulateGradHook {
  struct Entry {
    std::shared_ptr<Slot> slot;
    Hook hook;
  };

  void operator()(const torch::autograd::Variable& tensor) override {
    auto running = entries; // a hook may register another one
    for (auto& entry : running)
      if (auto closure = entry.slot->get())
        closure->call([&](void* box, Failure* failure) { entry.hook(box, &tensor, failure); });
  }

  std::vector<Entry> entries;
};

using Callback = std::function<void()>;

// Callbacks of passes within another one, kept for the outer one's end; null outside of such passes.
static thread_local std::vector<Callback>* deferred = nullptr;

static void add_post_accumulate(const Tensor& leaf, PostAccumulateHooks::Entry entry) {
  TORCH_CHECK(
      leaf.is_leaf() && leaf.requires_grad(),
      "post-accumulate hooks need a leaf tensor that requires grad; use register_hook on others");
  auto& existing = torch::autograd::impl::post_acc_grad_hooks(leaf);
  auto* hooks = dynamic_cast<PostAccumulateHooks*>(existing.get());
  TORCH_CHECK(hooks || !existing, "the tensor has a post-accumulate hook of another owner");
  if (!hooks) {
    auto made = std::make_unique<PostAccumulateHooks>();
    hooks = made.get();
    torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::move(made));
  }
  auto& entries = hooks->entries;
  entries.erase(
      std::remove_if(entries.begin(), entries.end(), [](auto& e) { return !e.slot->get(); }), entries.end());
  entries.push_back(std::move(entry));
}

} // namespace isobar

using namespace isobar;

extern "C" {

// Take `closure` in every case; return a handle for isobar_hook_remove and isobar_hook_free.
std::shared_ptr<Slot>* isobar_register_hook(
    const Tensor* tensor, void* closure, void (*drop)(void*), Hook hook, Error* error) {
  auto slot = std::make_shared<Slot>(std::make_shared<Closure>(closure, drop));
  return guarded(error, [&]() -> std::shared_ptr<Slot>* {
    drop_empty_places(*tensor);
    // Of the base class, which keeps the functor as it is: drop_empty_places looks for it.
    tensor->TensorBase::register_hook(TensorHook{slot, hook});
    return new std::shared_ptr<Slot>(slot);
  });
}

std::shared_ptr<Slot>* isobar_register_post_accumulate_hook(
    const Tensor* leaf, void* closure, void (*drop)(void*), Hook hook, Error* error) {
  auto slot = std::make_shared<Slot>(std::make_shared<Closure>(closure, drop));
  return guarded(error, [&]() -> std::shared_ptr<Slot>* {
    add_post_accumulate(*leaf, {slot, hook});
    return new std::shared_ptr<Slot>(slot);
  });
}

void isobar_hook_remove(const std::shared_ptr<Slot>* slot) {
  (*slot)->remove();
}

void isobar_hook_free(std::shared_ptr<Slot>* slot) {
  delete slot;
}

// Takes `closure` in every case; `run` is called once, at the end of the backward pass that is running.
void isobar_after_backward(
    void* closure, void (*drop)(void*), void (*run)(void* box, Failure* failure), Error* error) {
  auto shared = std::make_shared<Closure>(closure, drop);
  guarded(error, [&] {
    Callback callback = [shared, run] {
      shared->call([&](void* box, Failure* failure) { run(box, failure); });
    };
    if (deferred)
      deferred->push_back(std::move(callback));
    else
      torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
  });
}

// A pass within a function's backward, whose leaves count as the outer pass's.
void isobar_backward_within(
    const Tensor* const* roots, size_t count, const Tensor* const* grads, Error* error) {
  guarded(error, [&] {
    auto& engine = torch::autograd::Engine::get_default_engine();
    TORCH_CHECK(
        engine.is_checkpoint_valid(),
        "what is computed again in backward adds to the gradients of all leaves, but this pass wants those of some "
        "inputs only");
    std::vector<Callback> callbacks;
    auto* outer = deferred;
    {
      struct Restore {
        std::vector<Callback>* outer;
        ~Restore() { deferred = outer; }
      } restore{outer};
      deferred = &callbacks;
      torch::autograd::backward(tensors(roots, count), tensors(grads, count), false, false, {});
    }
    for (auto& callback : callbacks) {
      if (outer)
        outer->push_back(std::move(callback));
      else
        engine.queue_callback(std::move(callback));
    }
  });
}

} // extern "C"
