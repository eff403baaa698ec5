// A filter in the kernel for a listening socket: packets from any other address than those given
// are dropped before they reach it. To all others the port looks like one behind a firewall.
#pragma once

#include <linux/filter.h>

#include <cstddef>
#include <string>
#include <vector>

#include "core/base/status.h"

namespace dscomm {

// The program of classic BPF that keeps the packets of TCP which come from `addresses`, all of IPv4
// or all of IPv6 (`family`), and drops the others. Addresses for which that takes more than `most`
// instructions are widened to blocks of neighbours. Empty if even the blocks are too many.
std::vector<sock_filter> address_filter(int family, const std::vector<std::string>& addresses,
                                        size_t most = BPF_MAXINSNS);

// From now on only `addresses` reach `socket`, of IPv4 or IPv6, and the connections that are made
// to it: none does where no address is of its family. kUnsupported where the kernel has no filters,
// or the addresses are too many.
Status admit_only(int socket, const std::vector<std::string>& addresses);

}  // namespace dscomm
