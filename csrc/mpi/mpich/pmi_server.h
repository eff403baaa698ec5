// PmiServer: serves PMI-1 to the MPI of its own process, which takes it for a launcher. What ranks
// tell each other in a barrier goes to the other processes by way of whoever owns the server.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/status.h"

namespace dscomm {

class PmiServer {
 public:
  // `node_map`: see PmiDialogue. Starts a thread that answers. It and its socket stay until the
  // process ends, since MPI may ask as long.
  static Result<std::unique_ptr<PmiServer>> start(int size, std::string node_map);

  // MPI's end of the socket, for PMI_FD. It is MPI's to close.
  int client() const;

  // Once MPI waits in a barrier: what this rank has put for the others.
  std::optional<std::string> entered_barrier();
  // What all ranks have put, by rank; MPI leaves the barrier.
  Status end_barrier(const std::vector<std::string>& said);
  // From now on MPI waits in no barrier. MPI_Finalize has one, in which nobody needs to wait.
  void let_through();

  // In a forked child: closes what it inherited.
  void close_descriptors();

 private:
  struct State;
  explicit PmiServer(std::shared_ptr<State> state) : state_(std::move(state)) {}

  const std::shared_ptr<State> state_;  // the thread's too
};

}  // namespace dscomm
