// The sockets of MPI's connections, as far as they are known: a wait can sleep until one has data.
#pragma once

#include "core/base/socket_sleep.h"

namespace dscomm {

SocketList& mpi_sockets();

}  // namespace dscomm
