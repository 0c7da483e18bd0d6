#include "error.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include <ATen/Version.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

namespace isobar {

static char* copy_text(const char* text) noexcept {
  size_t length = std::strlen(text) + 1;
  auto* copy = static_cast<char*>(std::malloc(length));
  if (copy) std::memcpy(copy, text, length);
  return copy;
}

void report_current_exception(Error* error) noexcept {
  try {
    throw;
  } catch (const RustException& e) {
    error->box = e.take();
    if (!error->box) error->message = copy_text(e.what());
  } catch (const c10::Error& e) {
    error->message = copy_text(e.what_without_backtrace());
  } catch (const std::exception& e) {
    error->message = copy_text(e.what());
  } catch (...) {
    error->message = copy_text("an exception of unknown type");
  }
}

} // namespace isobar

extern "C" void isobar_free_text(char* text) {
  std::free(text);
}

extern "C" const char* isobar_libtorch_version() {
  return TORCH_VERSION;
}

extern "C" const char* isobar_cpu_capability() {
  static const std::string capability = [] {
    try {
      return at::get_cpu_capability();
    } catch (...) {
      return std::string("unknown");
    }
  }();
  return capability.c_str();
}
