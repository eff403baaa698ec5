// What MPI is told of the networks of this host.
#pragma once

#include <string>
#include <vector>

#include "core/transport/transport.h"

namespace dscomm {

// A network adapter that MPI drives by a library of its own: InfiniBand, RoCE, Omni-Path, EFA,
// Slingshot, BXI.
bool has_fast_network();

// The networks, as "network/prefix", by which this rank reaches the others: those common to all
// hosts, or, where routers join the hosts, this host's own.
std::vector<std::string> networks_between_hosts(const TransportRequest& request);

// The names of this host's interfaces that are in one of `networks`, in the order of these.
std::vector<std::string> interfaces_in(const std::vector<std::string>& networks);

}  // namespace dscomm
