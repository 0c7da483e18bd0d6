// CUDA streams and events without a CUDA header: through libtorch's device-generic interface.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "error.h"

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Event;
using c10::Stream;

namespace isobar {

constexpr auto kCuda = DeviceType::CUDA;

static Stream stream(int64_t id, int device) {
  return Stream::unpack3(id, static_cast<DeviceIndex>(device), kCuda);
}

static Device cuda(int device) {
  return Device(kCuda, static_cast<DeviceIndex>(device));
}

static c10::impl::VirtualGuardImpl implementation() {
  return c10::impl::VirtualGuardImpl(kCuda);
}

} // namespace isobar

using namespace isobar;

extern "C" {

int64_t isobar_cuda_current_stream(int device, Error* error) {
  return guarded(error, [&] { return implementation().getStream(cuda(device)).id(); });
}

int64_t isobar_cuda_stream_from_pool(int device, bool high_priority, Error* error) {
  return guarded(error, [&] { return implementation().getStreamFromGlobalPool(cuda(device), high_priority).id(); });
}

void* isobar_cuda_stream_handle(int64_t id, int device, Error* error) {
  return guarded(error, [&] { return stream(id, device).native_handle(); });
}

bool isobar_cuda_stream_query(int64_t id, int device, Error* error) {
  return guarded(error, [&] { return stream(id, device).query(); });
}

void isobar_cuda_stream_synchronize(int64_t id, int device, Error* error) {
  guarded(error, [&] { stream(id, device).synchronize(); });
}

// Makes the stream and its device current; returns what was.
int64_t isobar_cuda_enter_stream(int64_t id, int device, int* device_before, Error* error) {
  return guarded(error, [&] {
    *device_before = implementation().exchangeDevice(cuda(device)).index();
    return implementation().exchangeStream(stream(id, device)).id();
  });
}

void isobar_cuda_leave_stream(int64_t id_before, int device, int device_before, Error* error) {
  guarded(error, [&] {
    implementation().exchangeStream(stream(id_before, device));
    implementation().exchangeDevice(cuda(device_before));
  });
}

void isobar_cuda_record_stream(const Tensor* tensor, int64_t id, int device, Error* error) {
  guarded(error, [&] { tensor->record_stream(stream(id, device)); });
}

Event* isobar_cuda_event_new(bool timing, Error* error) {
  return guarded(error, [&]() -> Event* {
    return new Event(kCuda, timing ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT);
  });
}

void isobar_cuda_event_free(Event* event) {
  delete event;
}

void isobar_cuda_event_record(Event* event, int64_t id, int device, Error* error) {
  guarded(error, [&] { event->record(stream(id, device)); });
}

void isobar_cuda_event_block(const Event* event, int64_t id, int device, Error* error) {
  guarded(error, [&] { event->block(stream(id, device)); });
}

bool isobar_cuda_event_query(const Event* event, Error* error) {
  return guarded(error, [&] { return event->query(); });
}

void isobar_cuda_event_synchronize(const Event* event, Error* error) {
  guarded(error, [&] { event->synchronize(); });
}

double isobar_cuda_event_elapsed_ms(const Event* from, const Event* to, Error* error) {
  return guarded(error, [&] { return from->elapsedTime(*to); });
}

Tensor* isobar_pinned(const int64_t* shape, size_t dims, int kind, Error* error) {
  return guarded(error, [&]() -> Tensor* {
    auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(kind)).pinned_memory(true);
    return new Tensor(at::empty(at::IntArrayRef(shape, dims), options));
  });
}

} // extern "C"
