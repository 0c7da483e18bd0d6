// Mixed precision: libtorch's own autocast, which is a state of the thread.
#include <ATen/autocast_mode.h>

#include "error.h"
#include "tensor.h"

using namespace isobar;

namespace {

struct State {
  bool enabled;
  int kind;
  bool cached;
};

} // namespace

extern "C" {

void isobar_autocast_get(int device, State* state, Error* error) {
  guarded(error, [&] {
    auto type = static_cast<at::DeviceType>(device);
    state->enabled = at::autocast::is_autocast_enabled(type);
    state->kind = static_cast<int>(at::autocast::get_autocast_dtype(type));
    state->cached = at::autocast::is_autocast_cache_enabled();
  });
}

void isobar_autocast_set(int device, const State* state, Error* error) {
  guarded(error, [&] {
    auto type = static_cast<at::DeviceType>(device);
    at::autocast::set_autocast_enabled(type, state->enabled);
    at::autocast::set_autocast_dtype(type, static_cast<at::ScalarType>(state->kind));
    at::autocast::set_autocast_cache_enabled(state->cached);
  });
}

} // extern "C"
