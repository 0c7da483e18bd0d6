// The store at which gloo's ranks meet, which Rust keeps.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "closure.h"

namespace isobar {

struct Bytes {
  const uint8_t* data;
  size_t size;
};

// Answers a request by a number, and by bytes given to `receive` where a value is asked for.
using Ask = int64_t (*)(
    void* box, uint8_t kind, int64_t number, const Bytes* parts, size_t part_count, void* target,
    void (*receive)(void* target, const uint8_t* data, size_t size), Failure* failure);

class RustStore final : public c10d::Store {
 public:
  using Key = std::string;
  using Value = std::vector<uint8_t>;
  using milliseconds = std::chrono::milliseconds;

  RustStore(void* box, void (*drop)(void*), Ask ask, milliseconds timeout)
      : Store(timeout), rust_(std::make_shared<Closure>(box, drop)), ask_(ask) {}

  c10::intrusive_ptr<Store> clone() override { return c10::make_intrusive<RustStore>(*this); }

  void set(const Key& key, const Value& value) override {
    ask(kSet, 0, {bytes(key), {value.data(), value.size()}});
  }

  Value get(const Key& key) override {
    Value value;
    ask(kGet, getTimeout().count(), {bytes(key)}, &value);
    return value;
  }

  int64_t add(const Key& key, int64_t amount) override { return ask(kAdd, amount, {bytes(key)}); }

  bool deleteKey(const Key& key) override { return ask(kDelete, 0, {bytes(key)}) == 1; }

  bool check(const std::vector<Key>& keys) override { return ask(kCheck, 0, all(keys)) == 1; }

  int64_t getNumKeys() override { return ask(kCount, 0, {}); }

  void wait(const std::vector<Key>& keys) override { wait(keys, getTimeout()); }

  void wait(const std::vector<Key>& keys, const milliseconds& timeout) override {
    ask(kWait, timeout.count(), all(keys));
  }

 private:
  // `Kind` in c10d/store/wire.rs.
  enum Kind : uint8_t { kSet = 1, kGet, kAdd, kWait, kCheck, kDelete, kCount };

  static Bytes bytes(const Key& key) { return {reinterpret_cast<const uint8_t*>(key.data()), key.size()}; }

  static std::vector<Bytes> all(const std::vector<Key>& keys) {
    std::vector<Bytes> parts;
    for (const Key& key : keys) parts.push_back(bytes(key));
    return parts;
  }

  static void receive(void* target, const uint8_t* data, size_t size) {
    if (target && size) static_cast<Value*>(target)->assign(data, data + size);
  }

  int64_t ask(Kind kind, int64_t number, const std::vector<Bytes>& parts, Value* value = nullptr) {
    int64_t answer = 0;
    rust_->call([&](void* box, Failure* failure) {
      answer = ask_(box, kind, number, parts.data(), parts.size(), value, receive, failure);
    });
    return answer;
  }

  std::shared_ptr<Closure> rust_;
  Ask ask_;
};

} // namespace isobar
