// The key-value store through which ranks meet. csrc/torch adapts c10d's store to this interface;
// tests use a store in memory. Values are bytes in a fixed format of dscomm, never pickles.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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
  // The value of the key, or nothing if it is not there now. Overrides must not block; this default
  // waits up to a second for a key that is removed between has() and get().
  virtual Result<std::optional<std::string>> find(const std::string& key) {
    DSCOMM_ASSIGN_OR_RETURN(bool there, has(key));
    if (!there) return std::optional<std::string>();
    Result<std::string> value = get(key, Deadline::after(std::chrono::milliseconds(1000)));
    if (value.ok()) return std::optional<std::string>(std::move(value).value());
    if (value.status().code() == Code::kTimeout) return std::optional<std::string>();
    return value.status();
  }
  // Whether all of these keys are there now. This default makes one request for each key.
  virtual Result<bool> has_all(const std::vector<std::string>& keys) {
    for (const std::string& key : keys) {
      Result<bool> there = has(key);
      if (!there.ok() || !there.value()) return there;
    }
    return true;
  }
  // All values, in this order, if all keys are there now. Nobody may remove the keys during the
  // call, because some stores would then wait for them.
  virtual Result<std::optional<std::vector<std::string>>> find_all(
      const std::vector<std::string>& keys) {
    DSCOMM_ASSIGN_OR_RETURN(bool there, has_all(keys));
    std::vector<std::string> values;
    for (size_t k = 0; there && k < keys.size(); ++k) {
      DSCOMM_ASSIGN_OR_RETURN(std::optional<std::string> value, find(keys[k]));
      if (!value) break;
      values.push_back(std::move(*value));
    }
    if (values.size() < keys.size()) return std::optional<std::vector<std::string>>();
    return std::optional<std::vector<std::string>>(std::move(values));
  }
  using KeysAndValues = std::vector<std::pair<std::string, std::string>>;
  virtual Status set_all(const KeysAndValues& values) {
    for (const auto& [key, value] : values) DSCOMM_RETURN_IF_ERROR(set(key, value));
    return {};
  }
  // Adds to a counter and returns its new value.
  virtual Result<int64_t> add(const std::string& key, int64_t amount) = 0;
  // Removes a key, which may be a counter; OK if it does not exist. Some stores cannot remove.
  virtual Status remove(const std::string& key) = 0;
};

}  // namespace dscomm
