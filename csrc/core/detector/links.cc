#include "core/detector/links.h"

#include <algorithm>
#include <set>

namespace dscomm {
namespace {

constexpr int kPairsBelow = 6;
// The most members of a neighbouring host that one member is linked to.
constexpr size_t kOfHostBeside = 8;

// The positions before `p` that `p` is linked to.
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

using Hosts = std::vector<std::vector<int>>;  // ranks, by host and position

std::set<int> linked_before(const Hosts& hosts, int host, int position) {
  std::set<int> ranks;
  for (int before : positions_before(position))
    ranks.insert(hosts[static_cast<size_t>(host)][static_cast<size_t>(before)]);
  if (host > 0) {
    // Links one to one. After the last member of the smaller host, its first one is next again.
    const std::vector<int>&here = hosts[static_cast<size_t>(host)],
          &there = hosts[static_cast<size_t>(host) - 1];
    const size_t last = std::min(std::max(here.size(), there.size()),
                                 kOfHostBeside * std::min(here.size(), there.size()));
    for (size_t k = static_cast<size_t>(position); k < last; k += here.size())
      ranks.insert(there[k % there.size()]);
  }
  if (position > 1) return ranks;
  for (int before : positions_before(host)) {
    const std::vector<int>& there = hosts[static_cast<size_t>(before)];
    ranks.insert(there.begin(), there.begin() + std::min<ptrdiff_t>(2, std::ssize(there)));
  }
  return ranks;
}

}  // namespace

std::vector<Links> make_links(const std::vector<TransportMember>& members) {
  Hosts hosts;
  for (size_t k = 0; k < members.size(); ++k) {
    const auto host = static_cast<size_t>(members[k].host);
    if (hosts.size() <= host) hosts.resize(host + 1);
    hosts[host].push_back(static_cast<int>(k));
  }
  std::erase_if(hosts, [](const std::vector<int>& host) { return host.empty(); });
  std::vector<Links> links(members.size());
  for (size_t host = 0; host < hosts.size(); ++host)
    for (size_t position = 0; position < hosts[host].size(); ++position) {
      const int rank = hosts[host][position];
      for (int before : linked_before(hosts, static_cast<int>(host), static_cast<int>(position))) {
        links[static_cast<size_t>(rank)].up.push_back(before);
        links[static_cast<size_t>(before)].down.push_back(rank);
      }
    }
  for (Links& each : links) std::sort(each.down.begin(), each.down.end());
  return links;
}

}  // namespace dscomm
