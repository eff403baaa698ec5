// PmiServer: serves PMI-1 to the MPI of its own process, as a launcher would. Its owner
// exchanges the data of each barrier with the other processes.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/owned.h"
#include "core/base/status.h"
#include "mpi/mpich/pmi_session.h"

namespace dscomm {

class PmiServer {
 public:
  // Starts a thread that answers MPI's requests. `node_map`: see PmiSession. The thread runs until
  // MPI closes its end of the socket, which may be only when the process ends.
  static Result<std::shared_ptr<PmiServer>> start(int size, std::string node_map);

  // MPI's end of the socket, for PMI_FD. MPI closes it.
  int client() const { return client_; }

  // This rank's data for the others, once per barrier when MPI waits in it; else nullopt.
  std::optional<std::string> entered_barrier();
  // Passes on the data of all ranks, by rank, and lets MPI leave the barrier.
  Status end_barrier(const std::vector<std::string>& said);
  // From now on MPI does not wait in barriers: the barrier of MPI_Finalize is not needed.
  void let_through();

  // In a forked child: closes inherited descriptors.
  void close_descriptors() { server_.reset(); }

 private:
  PmiServer(int size, std::string node_map) : session_(size, std::move(node_map)) {}
  void serve();
  // Called with the mutex held.
  void answer(std::string_view line);
  void leave_barrier();
  void say(std::string_view text);

  UniqueFd server_;
  int client_ = -1;
  std::mutex mutex_;
  PmiSession session_;
  bool is_taken_ = false;  // the puts before MPI's current barrier have been taken
  bool lets_through_ = false;
};

}  // namespace dscomm
