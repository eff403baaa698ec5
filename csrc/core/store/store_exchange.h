// StoreExchange: how some ranks agree through the store. In each step every rank says something,
// rank 0 decides, and all read the same decision.
//
// The first failure wins: whoever cannot go on says why under a key at which all look while they
// wait, and before they believe a failure notice. What was said is removed once it has been
// read, so an exchange that has ended well leaves nothing in the store.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/look.h"
#include "core/base/status.h"
#include "core/store/store.h"

namespace dscomm {

struct ExchangeRequest {
  std::string prefix;  // of its keys: no other exchange's, ever
  int rank = 0;
  int size = 1;
  std::function<std::string(int rank)> name;  // of a rank, for messages
  Look look = [] { return Status(); };        // a reason of the caller's to give up waiting
  // What the caller adds to the message of a timeout.
  std::function<std::string()> suspicion = [] { return std::string(); };
};

// Of one rank, on one thread.
class StoreExchange {
 public:
  // `store` and `deadline` outlive it.
  StoreExchange(Store& store, ExchangeRequest request, const Deadline& deadline);

  // What all are told, made of what each has said, by rank. A status fails the step on all ranks.
  using Decide = std::function<Result<std::string>(const std::vector<std::string>& said)>;

  // Collective: one step. The decision, or the first failure. `decide` is called on rank 0 alone.
  Result<std::string> agree(const std::string& step, std::string_view own, const Decide& decide);

  // Something for others to await.
  Status publish(const std::string& name, std::string_view value);
  // It, if it is there now.
  Result<std::optional<std::string>> find(const std::string& name) {
    return store_.find(key(name));
  }
  // What a rank publishes; the first failure, if that comes before it. kTimeout at `deadline`.
  Result<std::string> await(const std::string& name, const Deadline& deadline);
  void remove(const std::string& name);  // once all have read it

  // In place of what the others wait for: they raise `cause` soon. Returns what this rank raises,
  // which is the cause that came first. A rank other than 0 that timed out leaves rank 0 a moment
  // to say whom all waited for.
  Status fail(const Status& cause);
  // Why somebody failed, or OK. Asks the store.
  Status failure();
  // The same, asked now and then, and the caller's own reason to give up, while something else is
  // waited for.
  Status look();

  // Whether a failure is there that another rank told of.
  bool is_told() const { return told_; }

  // Rank 0, while it waits: all ranks shall begin again, in another exchange. Their steps fail.
  void call_off();
  bool is_called_off() const { return called_off_; }

  // The rank for which agree() waits now; -1: none.
  int awaited() const { return awaited_; }

  // After the last step, by every rank: the last one removes what is left.
  void finish();

 private:
  std::string key(const std::string& name) const { return request_.prefix + name; }
  Result<std::vector<std::string>> gather(const std::string& step, std::string_view own);
  using Find = std::function<Result<std::optional<std::string>>()>;
  Result<std::string> await(const std::string& name, const Find& find, const Deadline& deadline);
  void find_awaited(const std::vector<std::string>& keys);
  Result<std::string> fail_unless(const std::string& name, const Status& cause);
  void publish_failure(const Status& cause);  // OK: called off
  std::string missing(const std::string& step);
  Status timed_out(const std::string& waiting_for) const;

  Store& store_;
  const ExchangeRequest request_;
  const Deadline& deadline_;
  const int pace_;  // by which its pauses are longer where ranks are many
  int64_t look_again_ns_ = 0, find_again_ns_ = 0;
  int step_ = 0;
  int awaited_ = -1;
  bool told_ = false, called_off_ = false;
  std::string decided_;  // the name of what all may still have to read
};

}  // namespace dscomm
