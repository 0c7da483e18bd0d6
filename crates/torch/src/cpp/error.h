// The error channel between C++ and Rust, apart from torch-sys' thread-local one.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>

namespace isobar {

// A boxed Rust error and the function that frees it.
struct Failure {
  void* box;
  void (*drop)(void*);
  const char* text; // valid while the box is
};

// A Rust error on its way through C++ frames. Copies of the exception share the box; who asks first gets it.
class RustException : public std::runtime_error {
 public:
  explicit RustException(const Failure& failure)
      : std::runtime_error(failure.text), payload_(std::make_shared<Payload>(failure)) {}

  void* take() const { return payload_->box.exchange(nullptr); }

 private:
  struct Payload {
    explicit Payload(const Failure& f) : box(f.box), drop(f.drop) {}
    ~Payload() {
      if (void* left = box.exchange(nullptr)) drop(left);
    }
    std::atomic<void*> box;
    void (*drop)(void*);
  };
  std::shared_ptr<Payload> payload_;
};

// What a shim function reports: neither field set (success), a message, or a Rust error that comes home.
struct Error {
  char* message;
  void* box;
};

// Fills `error` from the exception in flight; to be called in a catch block only.
void report_current_exception(Error* error) noexcept;

// Runs `body`; an exception becomes a report and a default value.
template <typename F>
auto guarded(Error* error, F&& body) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (...) {
    report_current_exception(error);
    return decltype(body())();
  }
}

} // namespace isobar
