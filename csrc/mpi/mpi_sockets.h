// The known sockets of MPI's connections: a wait can sleep until one of them has data.
#pragma once

#include "core/base/socket_sleep.h"

namespace dscomm {

SocketList& mpi_sockets();

}  // namespace dscomm
