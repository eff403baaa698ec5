// The host leader's side of dscomm-pmix: starts it, describes the job to it, carries the fences of
// MPI_Init to other hosts through the store.
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
  // Starts the program at `path` and waits until it is ready, the deadline passes, or `check`,
  // which is polled every few milliseconds, fails. Store keys begin with `prefix`, the same on all
  // hosts.
  static Result<std::unique_ptr<PmixHelper>> start(
      const std::string& path, const PmixDescription& description, std::shared_ptr<Store> store,
      const std::string& prefix, const Deadline& deadline, const std::function<Status()>& check);
  ~PmixHelper();  // calls quit()

  // By client of the description.
  const PmixEnvironments& environments() const { return environments_; }

  // Starts the thread that carries fences. It uses the store only while a fence waits or the helper
  // does not answer, in short requests.
  Status serve();

  // Call it when MPI is up on all ranks: removes this host's store keys and stops the probes.
  void remove_keys();

  // A sentence about a helper that does not answer, on any host; empty if all do. For any rank.
  static std::string silent_helper(Store& store, const std::string& prefix);

  // The hosts that a fence waits for: "a, b", or empty.
  std::string waiting_for() const;
  // Why fences are no longer carried, or OK.
  Status fault() const;

  // Ends the thread: fences are no longer carried. The helper ends after the last rank that has
  // used it; a stopped helper is continued, so that it can end. Takes at most a second. Idempotent.
  void quit();

  // In a forked child: closes inherited descriptors. Only the destructor may be called afterwards.
  void close_descriptors();

 private:
  struct State;
  explicit PmixHelper(std::shared_ptr<State> state) : state_(std::move(state)) {}

  std::shared_ptr<State> state_;  // shared with the thread, which may be abandoned in a stuck store
  PmixEnvironments environments_;
  std::thread service_;
  bool left_behind_ = false;
};

}  // namespace dscomm
