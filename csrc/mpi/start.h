// MpiStart: the part of bring-up that depends on the MPI library. It serves MPI_Init_thread, sets
// its environment, and guards its ports. open_mpi/ and mpich/ implement it; a module is built for
// one.
#pragma once

#include <memory>
#include <string>

#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/store/store.h"
#include "core/store/store_exchange.h"
#include "core/transport/transport.h"
#include "mpi/environment.h"
#include "mpi/plan.h"

namespace dscomm {

// What bring-up knows. Lasts as long as bring-up.
struct StartContext {
  const TransportRequest& request;
  std::shared_ptr<Store> store;
  const Deadline& deadline;
  const std::string& helper_path;
  const std::string prefix;  // of the keys in the store
  StoreExchange& exchange;
  Plan plan;  // once all have agreed on it
};

// Called in this order, by one thread. Those that return a status fail with this rank's own reason,
// or with another's where context.exchange.is_told().
class MpiStart {
 public:
  virtual ~MpiStart() = default;

  // "Open MPI v4.1.4": all ranks have the same.
  virtual std::string version() const = 0;
  // Adds to what this rank says of itself: the version, and what a launcher has told it.
  virtual void describe(MemberEntry* entry) const = 0;

  // If dscomm is the starter: starts the server that MPI_Init_thread will ask. The name is for
  // messages: "dscomm-pmix".
  virtual const char* helper_name() const = 0;
  virtual Status get_ready(StartContext& context) = 0;
  // Sets the environment of MPI_Init_thread, for as long as the result lives.
  virtual std::unique_ptr<EnvironmentForStart> make_environment(const StartContext& context) = 0;
  // Asked every few milliseconds while MPI_Init_thread runs, and serves it: a reason to give up.
  virtual Status look(StartContext& context) = 0;
  // The hosts that MPI_Init_thread waits for: "a, b", or empty where that is not known.
  virtual std::string waiting_for() const { return ""; }
  // If the server of any host does not answer: a sentence, else empty. Asks the store.
  virtual std::string silent_helper(const StartContext&) const { return ""; }
  // MPI_Init_thread has returned.
  virtual void has_started(const StartContext& context) = 0;

  // Whether MPI's connections over TCP can require a token. Rank 0 makes one if all can; all ranks
  // then admit it, or "" for none.
  virtual bool carries_token(const StartContext&) const { return false; }
  virtual std::string make_token() const { return ""; }
  virtual void admit(const std::string&) {}
  // Whether the first message to a rank blocks until that rank answers. If so, ranks connect in
  // advance, because a stopped rank would block others.
  virtual bool blocks_to_connect() const { return false; }
  // MPI is up on all ranks. `are_all_connected`: each rank has a connection to each other rank.
  virtual void has_met(bool are_all_connected) = 0;
  // Which networks MPI uses, for a message.
  virtual std::string networks_used() const = 0;

  // See MpiWorld.
  virtual void leave() {}
  virtual void close_descriptors() {}
};

// Of the library that this is built for.
std::unique_ptr<MpiStart> make_mpi_start();

}  // namespace dscomm
