// Stand-in for gloo headers that libtorch's package leaves out: only pointers to these types are held.
#pragma once

#include <memory>

namespace gloo::transport {

class Device {
 public:
  virtual ~Device() = 0;
};

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};

} // namespace gloo::transport
