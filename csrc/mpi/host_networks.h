// Chooses this host's networks for MPI.
#pragma once

#include <string>
#include <vector>

#include "core/transport/transport.h"

namespace dscomm {

// Whether the host has a network adapter that MPI drives through a separate library: InfiniBand,
// RoCE, Omni-Path, EFA, Slingshot, BXI.
bool has_fast_network();

// The networks between this rank and the others, as "network/prefix": those common to all hosts or,
// if there are none, this host's networks that routers may join to other hosts'.
std::vector<std::string> networks_between_hosts(const TransportRequest& request);

// The IPv4 networks among `networks`.
std::vector<std::string> only_ipv4(std::vector<std::string> networks);

// The names of this host's interfaces in `networks`, in the order of `networks`.
std::vector<std::string> interfaces_in(const std::vector<std::string>& networks);

}  // namespace dscomm
