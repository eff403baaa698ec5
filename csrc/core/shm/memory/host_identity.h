// Identifies the host of a process. Only a hint about which processes to attach to: attaching
// proves that they share memory.
#pragma once

#include <string>

namespace dscomm {

// The kernel's boot id and the network namespace: equal for two processes that can reach each
// other's abstract Unix sockets. At most 95 characters.
std::string host_identity();

}  // namespace dscomm
