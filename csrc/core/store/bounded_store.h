// BoundedStore: a store whose calls return by a deadline, even if the store behind it hangs.
//
// A TCPStore whose host is cut off, or whose process is stopped, blocks its callers until it is
// back. So each call runs on a thread, which is abandoned at the deadline. The store then counts as
// lost: later calls fail at once, because the abandoned thread may hold the store's lock.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/store/store.h"

namespace dscomm {

// Thread-safe. Calls of several threads do not wait for each other.
class BoundedStore final : public Store {
 public:
  // A call returns within a second after the latest of: `deadline`, the start of the call, and the
  // deadline of get(). A call that begins more than a second after `deadline` has a minute.
  // kResource if the store does not answer.
  BoundedStore(std::shared_ptr<Store> store, const Deadline& deadline);
  ~BoundedStore() override;

  Status set(const std::string& key, std::string_view value) override;
  Result<std::string> get(const std::string& key, const Deadline& deadline) override;
  Result<bool> has(const std::string& key) override;
  Result<std::optional<std::string>> find(const std::string& key) override;
  Result<bool> has_all(const std::vector<std::string>& keys) override;
  Result<std::optional<std::vector<std::string>>> find_all(
      const std::vector<std::string>& keys) override;
  Status set_all(const KeysAndValues& values) override;
  Result<int64_t> add(const std::string& key, int64_t amount) override;
  Status remove(const std::string& key) override;

 private:
  class CallThread;

  // The deadline of a call that begins now and may take `own_ns`.
  Deadline bound(int64_t own_ns = 0) const;
  // Calls the store. The call may be abandoned, so `body` owns all that it uses.
  template <typename Body>
  std::invoke_result_t<Body, Store&> call(const char* what, const std::string& key,
                                          const Deadline& bound, Body body);
  Status run(const char* what, const std::string& key, const Deadline& bound,
             std::function<void()> body);
  std::shared_ptr<CallThread> take_call_thread();

  const std::shared_ptr<Store> store_;
  const Deadline deadline_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<CallThread>> idle_;
  Status lost_;  // OK while the store answers
};

}  // namespace dscomm
