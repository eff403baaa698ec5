#include "mpi/mpi_sockets.h"

namespace dscomm {

SocketList& mpi_sockets() {
  // Never destroyed: MPI calls functions that add to it until the process ends.
  static auto* const sockets = new SocketList;
  return *sockets;
}

}  // namespace dscomm
