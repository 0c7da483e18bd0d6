// Rust closures held by libtorch.
#pragma once

#include <mutex>

#include "error.h"

namespace isobar {

// Owns a boxed Rust closure. It is `Fn + Send` but not `Sync`: calls take turns, and a call may reenter on its thread.
class Closure {
 public:
  Closure(void* box, void (*drop)(void*)) : box_(box), drop_(drop) {}
  Closure(const Closure&) = delete;
  Closure& operator=(const Closure&) = delete;
  ~Closure() { drop_(box_); }

  // `call` gets the box and a failure to fill, which is thrown.
  template <typename F>
  void call(F&& call) {
    std::lock_guard<std::recursive_mutex> turn(turn_);
    Failure failure{nullptr, nullptr, nullptr};
    call(box_, &failure);
    if (failure.box) throw RustException(failure);
  }

 private:
  std::recursive_mutex turn_;
  void* box_;
  void (*drop_)(void*);
};

} // namespace isobar
