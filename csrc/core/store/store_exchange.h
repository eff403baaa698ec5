// StoreExchange: how ranks agree through the store. In each step every rank publishes a value, rank
// 0 decides, and all read the same decision.
//
// The first failure wins: a rank that cannot go on publishes its cause under a key. All ranks read
// that key while they wait, and before they give up for another reason. Values are removed once
// they have been read, so a successful exchange leaves nothing in the store.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/give_up_check.h"
#include "core/base/status.h"
#include "core/store/store.h"

namespace dscomm {

struct ExchangeRequest {
  std::string prefix;  // of this exchange's keys; no other exchange may ever use it
  int rank = 0;
  int size = 1;
  std::function<std::string(int rank)> name;    // names a rank in messages
  GiveUpCheck check = [] { return Status(); };  // the caller's reason to give up, or OK
  // Text that the caller adds to the message of a timeout.
  std::function<std::string()> timeout_hint = [] { return std::string(); };
};

// Used by one rank, on one thread.
class StoreExchange {
 public:
  // `store` and `deadline` must outlive the StoreExchange.
  StoreExchange(Store& store, ExchangeRequest request, const Deadline& deadline);

  // Makes the decision from the values of all ranks, by rank. An error fails the step on all ranks.
  using Decide = std::function<Result<std::string>(const std::vector<std::string>& said)>;

  // Collective: one step. Returns the decision, or the first failure. Only rank 0 calls `decide`.
  Result<std::string> agree(const std::string& step, std::string_view own, const Decide& decide);

  // Publishes a value for others to await.
  Status publish(const std::string& name, std::string_view value);
  // A published value, if it is there now.
  Result<std::optional<std::string>> find(const std::string& name) {
    return store_.find(key(name));
  }
  // Waits for a published value, or the first failure if that comes before. kTimeout at `deadline`.
  Result<std::string> await(const std::string& name, const Deadline& deadline);
  void remove(const std::string& name);  // once all have read it

  // Publishes `cause` instead of the awaited value: the other ranks soon raise it. Returns the
  // first cause, which this rank must raise. After a timeout, a rank other than 0 first leaves rank
  // 0 a moment to name the missing ranks.
  Status fail(const Status& cause);
  // The failure that a rank has published, or OK. Asks the store.
  Status failure();
  // For loops that wait for something else: a published failure, else the caller's reason to give
  // up, else OK. Asks the store only now and then, but always if the caller has a reason.
  Status check();

  // Whether a rank has published a failure, and this rank has read it.
  bool has_read_failure() const { return has_read_failure_; }

  // On rank 0, while it waits: fails the step on all ranks, which then begin another exchange.
  void restart_all();
  bool is_restarted() const { return is_restarted_; }

  // The rank that agree() waits for now; -1: none.
  int awaited() const { return awaited_; }

  // Call on every rank after the last step: the last caller removes the remaining keys.
  void finish();

 private:
  std::string key(const std::string& name) const { return request_.prefix + name; }
  Result<std::vector<std::string>> gather(const std::string& step, std::string_view own);
  using Find = std::function<Result<std::optional<std::string>>()>;
  Result<std::string> await(const std::string& name, const Find& find, const Deadline& deadline);
  void find_awaited(const std::vector<std::string>& keys);
  Result<std::string> fail_or_read(const std::string& name, const Status& cause);
  void publish_failure(const Status& cause);  // OK: calls the exchange off
  std::string missing(const std::string& step);
  Status timed_out(const std::string& waiting_for) const;

  Store& store_;
  const ExchangeRequest request_;
  const Deadline& deadline_;
  const int pause_factor_;  // factor on the pauses of waits; grows with the number of ranks
  int64_t check_again_ns_ = 0, find_again_ns_ = 0;
  int step_ = 0;
  int awaited_ = -1;
  bool has_read_failure_ = false, is_restarted_ = false;
  std::string decided_;  // name of the last decision, which ranks may still have to read
};

}  // namespace dscomm
