// A kernel filter for a listening socket, which drops packets from all but the given addresses.
// Other hosts see a firewalled port.
#pragma once

#include <linux/filter.h>

#include <cstddef>
#include <string>
#include <vector>

#include "core/base/status.h"

namespace dscomm {

// The classic BPF program that keeps TCP packets from the `addresses` of one `family` (AF_INET or
// AF_INET6), and drops others. If it needs more than `most` instructions, neighbouring addresses
// are merged into blocks. Empty if even the blocks are too many.
std::vector<sock_filter> address_filter(int family, const std::vector<std::string>& addresses,
                                        size_t most = BPF_MAXINSNS);

// From now on only packets from `addresses` reach `socket` (IPv4 or IPv6) and the connections made
// to it; no packets if no address is of the socket's family. kUnsupported if the kernel has no
// filters, or if there are too many addresses.
Status admit_only(int socket, const std::vector<std::string>& addresses);

}  // namespace dscomm
