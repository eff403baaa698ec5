// Adapts c10d's key-value store to the core's Store.
#pragma once

#include <atomic>

#include "core/store/store.h"
#include "torch/compat.h"

namespace dscomm {

// The store under all prefixes: one object for a job's groups, but split_group() clones it.
c10::intrusive_ptr<c10d::Store> root_of(c10::intrusive_ptr<c10d::Store> store);

class StoreAdapter : public Store {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store);

  Status set(const std::string& key, std::string_view value) override;
  Result<std::string> get(const std::string& key, const Deadline& deadline) override;
  Result<bool> has(const std::string& key) override;
  Result<std::optional<std::string>> find(const std::string& key) override;
  Result<bool> has_all(const std::vector<std::string>& keys) override;
#if DSCOMM_TORCH_2  // stores of torch 1.13 take one key in a request
  Result<std::optional<std::vector<std::string>>> find_all(
      const std::vector<std::string>& keys) override;
  Status set_all(const KeysAndValues& values) override;
#endif
  Result<int64_t> add(const std::string& key, int64_t amount) override;
  Status remove(const std::string& key) override;

 private:
  // Returns the result of `call`, or failed() if it throws.
  template <typename Call>
  auto attempt(const char* what, const std::string& key, Call call) -> decltype(call());
  Status failed(const char* what, const std::string& key, const std::exception& error) const;

  c10::intrusive_ptr<c10d::Store> store_;
  std::string keeper_text_;  // for errors: ", which the launcher keeps at a:29500,"; "" if unknown
  std::atomic<bool> has_compare_set_{
      true};  // whether the store has compareSet(); relaxed, guards no data
};

}  // namespace dscomm
