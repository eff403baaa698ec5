// Links: which members of a transport are connected, so that all hear what one has noticed,
// whoever is gone.
//
// The hosts are numbered, and so are the members of a host. In both, 2i and 2i + 1 are pair i.
// Both of pair i are linked to both of pair (i - 1) / 6, and everyone to the one before it:
//
//     0 - 1 - 2 - 3 - ... - 13 - 14 - ...
//     2 ... 13 are linked to 0 and to 1; 14 ... 25 to 2 and to 3
//
// A link between hosts joins the first two members of one with the first two of the other. The
// other members of two hosts that follow each other are linked one to one, or one to several, so
// that a host that goes down takes none with it whose death nobody sees (of more than 8 members to
// one of that other host, 8 are linked).
//
// So the rest stays connected whichever member, or whole host, is gone, and mostly when many are;
// the way from one to any other is some 2 log6 of the hosts and of the members of a host; and
// nobody has more than kMostLinks.
#pragma once

#include <vector>

#include "core/transport/transport.h"

namespace dscomm {

// Two members of each of 3 hosts before it and of 13 behind it, 13 behind it in its own host, the
// one before, and 7 others of each of the hosts beside its own.
inline constexpr int kMostLinks = 60;

struct Links {
  std::vector<int> up;    // whom it connects to; empty for the first member of the first host alone
  std::vector<int> down;  // who connects to it
};

// Of all members, by rank; both lists ascending.
std::vector<Links> links_of(const std::vector<TransportMember>& members);

}  // namespace dscomm
