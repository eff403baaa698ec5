// The key-value store through which ranks meet. The glue adapts c10d's store to it; tests use one
// in memory. Values are bytes in a fixed format of ours, never pickles.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/deadline.h"
#include "core/base/status.h"

namespace dscomm {

class Store {
 public:
  virtual ~Store() = default;
  virtual Status set(const std::string& key, std::string_view value) = 0;
  // Blocks until the key is there or the deadline passes (kTimeout).
  virtual Result<std::string> get(const std::string& key, const Deadline& deadline) = 0;
  // Whether the key is there now. Does not block.
  virtual Result<bool> has(const std::string& key) = 0;
  // Its value if it is there now. Does not block, also where it is removed meanwhile.
  virtual Result<std::optional<std::string>> find(const std::string& key) {
    Result<bool> there = has(key);
    if (!there.ok()) return there.status();
    if (!there.value()) return std::optional<std::string>();
    Result<std::string> value = get(key, Deadline::after(std::chrono::milliseconds(1000)));
    if (value.ok()) return std::optional<std::string>(std::move(value).value());
    if (value.status().code() == Code::kTimeout) return std::optional<std::string>();
    return value.status();
  }
  // Adds to a counter and returns its new value.
  virtual Result<int64_t> add(const std::string& key, int64_t amount) = 0;
  // OK also where there was no such key, which may be a counter's. Some stores cannot.
  virtual Status remove(const std::string& key) = 0;
};

}  // namespace dscomm
