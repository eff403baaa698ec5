// The ranks of a group on this host, as far as known before they meet.
#pragma once

#include <string>
#include <vector>

namespace dscomm {

struct LocalRanks {
  std::vector<int> ranks;  // in the group, ascending, including this one; empty: unknown
  std::string group;       // a name that only this group has on this host
  // The lowest rank of each host, ascending, as far as this rank knows; empty: unknown.
  std::vector<int> leaders;
};

// A rank's entry when a group forms: the part that its host's ranks mostly share, and the rest.
struct MemberEntry {
  std::string common, own;
};

// The ranks of a job's first group according to torchrun, which gives consecutive ranks to a host.
// Empty for another group, or if this process is no worker of torchrun.
LocalRanks local_ranks_of_launcher(int rank, int size, const std::string& group);

}  // namespace dscomm
