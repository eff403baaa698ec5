// MpiStart: the part of bring-up that depends on the MPI library. It serves MPI_Init_thread, sets
// its environment and guards MPI's ports. open_mpi/ and mpich/ implement it; a module is built for
// one of them.
#pragma once

#include <memory>
#include <string>

#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/store/store.h"
#include "core/store/store_exchange.h"
#include "core/transport/transport.h"
#include "mpi/environment.h"
#include "mpi/start_plan.h"

namespace dscomm {

// The state of bring-up; lasts as long as bring-up.
struct StartContext {
  const TransportRequest& request;
  std::shared_ptr<Store> store;
  const Deadline& deadline;
  const std::string& helper_path;
  const std::string prefix;  // of the store keys
  StoreExchange& exchange;
  StartPlan plan;  // valid once all ranks have agreed on it
};

// Bring-up calls the functions in this order, on one thread. A failure that they return is this
// rank's own or, if context.exchange.has_read_failure(), another rank's.
class MpiStart {
 public:
  virtual ~MpiStart() = default;

  // "Open MPI v4.1.4": the same on all ranks.
  virtual std::string version() const = 0;
  // Adds the version and the launcher's variables to this rank's entry.
  virtual void describe(MpiMemberEntry* entry) const = 0;

  // If dscomm starts MPI: get_ready() starts the server that MPI_Init_thread uses. Messages call
  // the server helper_name(), such as "dscomm-pmix".
  virtual const char* helper_name() const = 0;
  virtual Status get_ready(StartContext& context) = 0;
  // Sets the environment of MPI_Init_thread for the lifetime of the result.
  virtual std::unique_ptr<EnvironmentForStart> make_environment(const StartContext& context) = 0;
  // Polled every few milliseconds while MPI_Init_thread runs, to serve it. A failure ends the wait.
  virtual Status check(StartContext& context) = 0;
  // The hosts that MPI_Init_thread waits for: "a, b", or empty if unknown.
  virtual std::string waiting_for() const { return ""; }
  // A sentence about a server that does not answer, on any host; else empty. Reads the store.
  virtual std::string silent_helper(const StartContext&) const { return ""; }
  // Called when MPI_Init_thread has succeeded. Not called if the program initialised MPI.
  virtual void has_started(const StartContext& context) = 0;

  // Whether this rank's MPI can require a token on its TCP connections, so that no stranger can
  // connect (tcp_hooks.h). If so on all ranks, rank 0 makes a token, and all ranks pass it to
  // admit(); otherwise all pass "".
  virtual bool carries_token(const StartContext&) const { return false; }
  virtual std::string make_token() const { return ""; }
  virtual void admit(const std::string&) {}
  // Whether the first message to a rank blocks until that rank answers. If so, ranks connect in
  // advance, because a stopped rank would block others.
  virtual bool blocks_to_connect() const { return false; }
  // Called when MPI is up on all ranks. `are_all_connected`: every pair of ranks is connected.
  virtual void has_met(bool are_all_connected) = 0;
  // The networks that MPI uses, for a message.
  virtual std::string networks_used() const = 0;

  // See MpiWorld.
  virtual void leave() {}
  virtual void close_descriptors() {}
};

// The implementation that this module is built for.
std::unique_ptr<MpiStart> make_mpi_start();

}  // namespace dscomm
