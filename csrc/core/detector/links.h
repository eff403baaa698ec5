// Links: the graph of connections between the members of a transport, over which failure notices
// spread. The graph stays connected if any one member or host is gone.
//
// The hosts are numbered, and so are the members of each host, from 0. In both numberings, 2i and
// 2i + 1 are pair i. Each number is linked to the number before it; and both numbers of pair i > 0
// are linked to both of pair (i - 1) / 6:
//
//     0 - 1 - 2 - 3 - ... - 13 - 14 - ...
//     2 ... 13 are linked to 0 and to 1; 14 ... 25 to 2 and to 3
//
// A link between two hosts links the first two members of one to the first two of the other. Also,
// members of two consecutive hosts are linked one to one, or one to at most 8. So if a host goes
// down with at most 8 times as many members as a neighbour, survivors notice each of its deaths.
//
// The path between two members has some 2 log6 h + 2 log6 m links, for h hosts of m members. No
// member has more than kMostLinks. The graph mostly stays connected even if many are gone.
#pragma once

#include <vector>

#include "core/transport/transport.h"

namespace dscomm {

// Two members of each of 3 hosts before the member's host and of 13 after it; in the host, 13
// members after it and one before; and 7 more of each of the 2 neighbouring hosts.
inline constexpr int kMostLinks = 60;

struct Links {
  std::vector<int> up;    // it connects to these; empty only for the first member of the first host
  std::vector<int> down;  // these connect to it
};

// The links of all members, by rank; both lists are ascending.
std::vector<Links> make_links(const std::vector<TransportMember>& members);

}  // namespace dscomm
