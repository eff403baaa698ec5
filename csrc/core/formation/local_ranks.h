// Which ranks of a group are on this host, as far as that is known before they meet.
#pragma once

#include <string>
#include <vector>

namespace dscomm {

struct LocalRanks {
  std::vector<int> ranks;  // in the group, ascending, this one among them; empty: not known
  std::string group;       // the same on all of them, and of no other group on this host
  // The lowest rank of each host, ascending, as far as this rank knows; empty: not known.
  std::vector<int> leaders;
};

// What a rank says of itself when a group is formed: what most ranks of a host have in common, and
// what each has alone.
struct MemberText {
  std::string common, own;
};

// Of a job's first group, as torchrun tells its workers: on each host it has ranks that follow each
// other. Empty where another group is meant, or this process is not torchrun's.
LocalRanks local_ranks_of_launcher(int rank, int size, const std::string& group);

}  // namespace dscomm
