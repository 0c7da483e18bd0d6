// Stand-in for a gloo header that libtorch's package leaves out: only pointers to the type are held.
#pragma once

#include <chrono>

namespace gloo {

class Context {
 public:
  virtual ~Context();
  void setTimeout(std::chrono::milliseconds timeout);
};

} // namespace gloo
