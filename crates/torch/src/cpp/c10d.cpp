// torch's gloo group.
#include <condition_variable>
#include <cstring>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "error.h"
#include "store.h"
#include "tensor.h"

using at::Tensor;
using std::chrono::milliseconds;

namespace isobar {

using Gloo = c10::intrusive_ptr<c10d::ProcessGroupGloo>;

// An operation under way.
//
// libtorch's sends and receives learn of their end only in `wait`, whose timeout breaks the connection; the first
// question whether one has ended therefore starts a thread that waits for it.
class Work {
 public:
  Work(c10::intrusive_ptr<c10d::Work> work, bool point_to_point)
      : work_(std::move(work)), point_to_point_(point_to_point) {}

  ~Work() {
    if (!waiter_.joinable()) return;
    if (!ended()) {
      try {
        work_->abort();
      } catch (...) {
        // The waiter ends at the group's timeout.
      }
    }
    waiter_.join();
  }

  bool is_completed() {
    if (!point_to_point_) return work_->isCompleted();
    if (!waiter_.joinable() && !ended()) waiter_ = std::thread([this] { wait_for_end(kNoTimeout); });
    return ended();
  }

  void wait(milliseconds timeout) {
    if (!point_to_point_) {
      TORCH_CHECK(work_->wait(timeout), "the operation was aborted");
      return;
    }
    if (!waiter_.joinable() && !ended()) wait_for_end(timeout);
    std::unique_lock<std::mutex> lock(mutex_);
    bool in_time = end_.wait_for(lock, timeout, [this] { return ended_; });
    TORCH_CHECK(in_time, "timed out after ", timeout.count(), " ms");
    if (error_) std::rethrow_exception(error_);
  }

 private:
  bool ended() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ended_;
  }

  void wait_for_end(milliseconds timeout) noexcept {
    std::exception_ptr error;
    try {
      TORCH_CHECK(work_->wait(timeout), "the operation was aborted");
    } catch (...) {
      error = std::current_exception();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    error_ = error;
    ended_ = true;
    end_.notify_all();
  }

  c10::intrusive_ptr<c10d::Work> work_;
  bool point_to_point_;
  std::thread waiter_;
  std::mutex mutex_;
  std::condition_variable end_;
  bool ended_ = false;
  std::exception_ptr error_;
};

static std::shared_ptr<::gloo::transport::Device> device(const char* interface, const char* host) {
  if (interface) return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  if (host) return c10d::ProcessGroupGloo::createDeviceForHostname(host);
  return c10d::ProcessGroupGloo::createDefaultDevice();
}

static void check_memory(const Tensor& tensor) {
  TORCH_CHECK(
      tensor.defined() && tensor.device().is_cpu() && tensor.is_contiguous(),
      "gloo moves contiguous CPU tensors only");
}

} // namespace isobar

using namespace isobar;

extern "C" {

// Owns the boxed store in every case.
Gloo* isobar_gloo_new(
    void* store, void (*drop)(void*), Ask ask, const char* prefix, int rank, int size, int64_t timeout_ms,
    const char* interface, const char* host, Error* error) {
  return guarded(error, [&]() -> Gloo* {
    auto timeout = milliseconds(timeout_ms);
    auto owned = c10::make_intrusive<RustStore>(store, drop, ask, timeout);
    auto options = c10d::ProcessGroupGloo::Options::create(timeout);
    options->devices.push_back(device(interface, host));
    auto prefixed = c10::make_intrusive<c10d::PrefixStore>(prefix, owned);
    return new Gloo(c10::make_intrusive<c10d::ProcessGroupGloo>(prefixed, rank, size, options));
  });
}

void isobar_gloo_free(Gloo* gloo) {
  delete gloo;
}

Work* isobar_gloo_send(const Gloo* gloo, const Tensor* tensor, int to, int tag, Error* error) {
  return guarded(error, [&]() -> Work* {
    check_memory(*tensor);
    std::vector<Tensor> tensors{tensor->detach()};
    return new Work((*gloo)->send(tensors, to, tag), true);
  });
}

Work* isobar_gloo_recv(const Gloo* gloo, const Tensor* tensor, int from, int tag, Error* error) {
  return guarded(error, [&]() -> Work* {
    check_memory(*tensor);
    std::vector<Tensor> tensors{tensor->detach()};
    return new Work((*gloo)->recv(tensors, from, tag), true);
  });
}

// Counts are in extents of dim 0, one a rank.
Work* isobar_gloo_all_to_all(
    const Gloo* gloo, const Tensor* output, const Tensor* input, const int64_t* output_counts,
    const int64_t* input_counts, size_t ranks, Error* error) {
  return guarded(error, [&]() -> Work* {
    check_memory(*output);
    check_memory(*input);
    Tensor to = output->detach(), from = input->detach();
    std::vector<int64_t> to_counts(output_counts, output_counts + ranks);
    std::vector<int64_t> from_counts(input_counts, input_counts + ranks);
    return new Work((*gloo)->alltoall_base(to, from, to_counts, from_counts), false);
  });
}

Work* isobar_gloo_all_reduce(const Gloo* gloo, const Tensor* tensor, int op, Error* error) {
  static const c10d::ReduceOp ops[] = {
      c10d::ReduceOp::SUM, c10d::ReduceOp::PRODUCT, c10d::ReduceOp::MIN, c10d::ReduceOp::MAX};
  return guarded(error, [&]() -> Work* {
    check_memory(*tensor);
    std::vector<Tensor> tensors{tensor->detach()};
    c10d::AllreduceOptions options;
    options.reduceOp = ops[op];
    return new Work((*gloo)->allreduce(tensors, options), false);
  });
}

Work* isobar_gloo_barrier(const Gloo* gloo, Error* error) {
  return guarded(error, [&]() -> Work* { return new Work((*gloo)->barrier(), false); });
}

bool isobar_work_is_completed(Work* work, Error* error) {
  return guarded(error, [&] { return work->is_completed(); });
}

void isobar_work_wait(Work* work, int64_t timeout_ms, Error* error) {
  guarded(error, [&] { work->wait(milliseconds(timeout_ms)); });
}

void isobar_work_free(Work* work) {
  delete work;
}

} // extern "C"
