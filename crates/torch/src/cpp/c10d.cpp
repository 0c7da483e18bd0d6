// torch's gloo group.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
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

// Pool of threads, each blocked in the `wait` of one operation. Idle threads are used again: starting a thread takes longer than
// most messages.
class Waiters {
 public:
  static Waiters& all() {
    // Never destroyed: its threads may outlive `main`.
    static auto* waiters = new Waiters;
    return *waiters;
  }

  void run(std::function<void()> wait) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (waiting_.size() < free_) {
      waiting_.push_back(std::move(wait));
      came_.notify_one();
    } else {
      std::thread([this, wait = std::move(wait)]() mutable { serve(std::move(wait)); }).detach();
    }
  }

 private:
  static constexpr auto kIdle = std::chrono::seconds(10);

  void serve(std::function<void()> wait) {
    while (true) {
      wait();
      std::unique_lock<std::mutex> lock(mutex_);
      ++free_;
      bool found = came_.wait_for(lock, kIdle, [this] { return !waiting_.empty(); });
      --free_;
      if (!found) return;
      wait = std::move(waiting_.front());
      waiting_.pop_front();
    }
  }

  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<std::function<void()>> waiting_;
  // Number of idle threads; `waiting_` never holds more operations.
  size_t free_ = 0;
};

// Longer than any program runs, yet no overflow when gloo adds it to the clock. c10d's own `kNoTimeout` means the timeout of
// the group, at which gloo closes all connections of the process.
static constexpr auto kEndless = milliseconds(std::chrono::hours(24 * 365 * 50));

// An operation under way.
//
// libtorch's sends and receives learn of their end only in `wait`, whose timeout breaks the connection. The first call of
// `is_completed` therefore hands the wait to a thread of the pool.
class Work {
 public:
  Work(c10::intrusive_ptr<c10d::Work> work, bool point_to_point)
      : work_(std::move(work)), point_to_point_(point_to_point) {}

  ~Work() {
    if (!waited_for_) return;
    if (!ended()) {
      try {
        work_->abort();
      } catch (...) {
        // The waiter ends with the connection.
      }
    }
    std::unique_lock<std::mutex> lock(mutex_);
    end_.wait(lock, [this] { return ended_; });
  }

  // Ends the pool thread's wait, and leaves the operation to gloo. Returns whether it has ended; if not, the object must live for
  // ever, since gloo may still read and write the tensor.
  bool abandon() {
    if (ended()) return true;
    if (waited_for_) work_->abort();
    return false;
  }

  bool is_completed() {
    if (!point_to_point_) return work_->isCompleted();
    if (!waited_for_ && !ended()) {
      Waiters::all().run([this] { wait_for_end(kEndless); });
      waited_for_ = true;
    }
    return ended();
  }

  void wait(milliseconds timeout) {
    if (!point_to_point_) {
      TORCH_CHECK(work_->wait(timeout), "the operation was aborted");
      return;
    }
    if (!waited_for_ && !ended()) wait_for_end(timeout);
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
    // Holds the lock until it returns: the destructor continues once it gets the lock.
    std::lock_guard<std::mutex> lock(mutex_);
    error_ = error;
    ended_ = true;
    end_.notify_all();
  }

  c10::intrusive_ptr<c10d::Work> work_;
  bool point_to_point_;
  // True once a thread of the pool has taken over the wait.
  bool waited_for_ = false;
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

// Frees the work only if it has ended.
void isobar_work_abandon(Work* work, Error* error) {
  guarded(error, [&] {
    if (work->abandon()) delete work;
  });
}

void isobar_work_free(Work* work) {
  delete work;
}

} // extern "C"
