// PmiServer: serves PMI-1 to the MPI of its own process, as a launcher would. Its owner carries the
// data of a barrier to and from the other processes.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/status.h"

namespace dscomm {

class PmiServer {
 public:
  // Starts a thread that answers MPI's requests. `node_map`: see PmiSession. Thread and socket
  // last until the process ends, since MPI may send requests until then.
  static Result<std::unique_ptr<PmiServer>> start(int size, std::string node_map);

  // MPI's end of the socket, for PMI_FD. MPI closes it.
  int client() const;

  // This rank's data for the others, once MPI waits in a barrier.
  std::optional<std::string> entered_barrier();
  // Passes on the data of all ranks, by rank, and lets MPI leave the barrier.
  Status end_barrier(const std::vector<std::string>& said);
  // From now on MPI does not wait in barriers. MPI_Finalize has one that is not needed.
  void let_through();

  // In a forked child: closes inherited descriptors.
  void close_descriptors();

 private:
  struct State;
  explicit PmiServer(std::shared_ptr<State> state) : state_(std::move(state)) {}

  const std::shared_ptr<State> state_;  // shared with the thread
};

}  // namespace dscomm
