#include "core/detector/links.h"

#include <algorithm>
#include <set>

namespace dscomm {
namespace {

constexpr int kPairsBelow = 6;

// To whom the one in position `p` is linked, of those before it.
std::set<int> positions_before(int p) {
  std::set<int> before;
  if (p == 0) return before;
  before.insert(p - 1);
  const int pair = p / 2;
  if (pair > 0) {
    const int parents = (pair - 1) / kPairsBelow;
    before.insert(2 * parents);
    before.insert(2 * parents + 1);
  }
  return before;
}

using Hosts = std::vector<std::vector<int>>;  // their members, by position

std::set<int> linked_before(const Hosts& hosts, int host, int position) {
  std::set<int> ranks;
  for (int before : positions_before(position))
    ranks.insert(hosts[static_cast<size_t>(host)][static_cast<size_t>(before)]);
  if (position > 1) return ranks;
  for (int before : positions_before(host)) {
    const std::vector<int>& there = hosts[static_cast<size_t>(before)];
    ranks.insert(there.begin(), there.begin() + std::min<ptrdiff_t>(2, std::ssize(there)));
  }
  return ranks;
}

}  // namespace

Links links_of(const std::vector<TransportMember>& members, int rank) {
  Hosts hosts;
  for (size_t k = 0; k < members.size(); ++k) {
    const auto host = static_cast<size_t>(members[k].host);
    if (hosts.size() <= host) hosts.resize(host + 1);
    hosts[host].push_back(static_cast<int>(k));
  }
  std::erase_if(hosts, [](const std::vector<int>& host) { return host.empty(); });
  Links links;
  for (size_t host = 0; host < hosts.size(); ++host)
    for (size_t position = 0; position < hosts[host].size(); ++position) {
      const int other = hosts[host][position];
      const std::set<int> before =
          linked_before(hosts, static_cast<int>(host), static_cast<int>(position));
      if (other == rank)
        links.up.assign(before.begin(), before.end());
      else if (before.contains(rank))
        links.down.push_back(other);
    }
  std::sort(links.down.begin(), links.down.end());
  return links;
}

}  // namespace dscomm
