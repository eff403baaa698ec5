// The leader's side of dscomm-pmix: starts it, describes the job to it, and carries the fences of
// MPI_Init to the other hosts through the store.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/store/store.h"
#include "pmix/messages.h"

namespace dscomm {

class PmixHelper {
 public:
  // Starts the program at `path` and waits until it is ready, the deadline passes, or `look`, which
  // is asked every few milliseconds, has another reason to give up. Keys in the store begin with
  // `prefix`, the same on all hosts.
  static Result<std::unique_ptr<PmixHelper>> start(
      const std::string& path, const PmixDescription& description, std::shared_ptr<Store> store,
      const std::string& prefix, const Deadline& deadline, const std::function<Status()>& look);
  ~PmixHelper();  // quits

  // By client of the description.
  const PmixEnvironments& environments() const { return environments_; }

  // Starts the thread that carries fences. It asks the store only while a fence waits or the helper
  // does not answer, in single short questions.
  Status serve();

  // MPI is up on all ranks: removes from the store what this host put there, and probes the helper
  // no more.
  void remove_keys();

  // A helper of any host that does not answer, in a sentence; empty if all do. Any rank.
  static std::string silent_helper(Store& store, const std::string& prefix);

  // The hosts that a fence waits for: "a, b", or empty.
  std::string waiting_for() const;
  // Why fences are not carried any more, or OK.
  Status fault() const;

  // Nothing new will be asked for: ends the thread. The helper stays for as long as ranks live that
  // have used it. If it is stopped, it is continued, so that it ends. Bounded by a second.
  // Idempotent.
  void quit();

  // In a forked child: closes what it inherited. Nothing else works on this object there, but its
  // destructor.
  void close_descriptors();

 private:
  struct State;
  explicit PmixHelper(std::shared_ptr<State> state) : state_(std::move(state)) {}

  std::shared_ptr<State> state_;  // the thread's too: it may be left behind in a stuck store
  PmixEnvironments environments_;
  std::thread service_;
  bool left_behind_ = false;
};

}  // namespace dscomm
