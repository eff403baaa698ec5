// Computes domains from the bindings of ranks. The ranks of a domain reduce among themselves first.

#include <algorithm>
#include <map>

#include "core/base/format.h"
#include "core/base/status.h"
#include "core/topology/topology.h"

namespace dscomm {
namespace {

struct Level {
  const char* name;
  int CpuBinding::* index;
};
constexpr Level kNuma{"NUMA node", &CpuBinding::numa};
constexpr Level kL3{"L3", &CpuBinding::l3};

// If the ranks cannot or should not be split at this level, `ranks` is empty and `reason` says why.
Domains split(std::span<const CpuBinding> bindings, Level level, size_t least_with_two_ranks) {
  std::map<int, std::vector<int>> by_index;
  for (size_t rank = 0; rank < bindings.size(); ++rank) {
    int index = bindings[rank].*level.index;
    if (index < 0)
      return {{}, format_text("rank {} of this host is bound to no single {}", rank, level.name)};
    by_index[index].push_back(static_cast<int>(rank));
  }
  if (by_index.size() < 2)
    return {{}, format_text("the ranks of this host are bound to one {}", level.name)};

  Domains domains;
  for (auto& [index, ranks] : by_index) domains.ranks.push_back(std::move(ranks));
  std::sort(domains.ranks.begin(), domains.ranks.end());  // disjoint, so by lowest rank

  auto has_two = [](const std::vector<int>& ranks) { return ranks.size() >= 2; };
  auto with_two =
      static_cast<size_t>(std::count_if(domains.ranks.begin(), domains.ranks.end(), has_two));
  if (with_two < least_with_two_ranks)
    return {{},
            format_text("only {} of {} {}s hold more than one rank of this host", with_two,
                        domains.ranks.size(), level.name)};
  domains.reason =
      format_text("{} {}s hold the ranks of this host", domains.ranks.size(), level.name);
  return domains;
}

Domains one_domain(size_t rank_count, std::string reason) {
  std::vector<int> ranks(rank_count);
  for (size_t rank = 0; rank < rank_count; ++rank) ranks[rank] = static_cast<int>(rank);
  return {{std::move(ranks)}, std::move(reason)};
}

}  // namespace

Domains make_domains(std::span<const CpuBinding> bindings, std::string_view hierarchy) {
  if (hierarchy == "flat" || hierarchy == "hosts")
    return one_domain(bindings.size(), format_text("DSCOMM_HIERARCHY is {}", hierarchy));

  if (hierarchy == "numa" || hierarchy == "l3") {
    // Requested explicitly, so one domain with two ranks is enough for an inner level.
    Domains domains = split(bindings, hierarchy == "numa" ? kNuma : kL3, 1);
    if (!domains.ranks.empty()) return domains;
    return one_domain(bindings.size(),
                      format_text("DSCOMM_HIERARCHY is {}, but {}", hierarchy, domains.reason));
  }

  DSCOMM_CHECK(hierarchy == "auto", "the settings allow no other hierarchy");
  // With one domain of several ranks and others of one rank, a hierarchy saves little: the single
  // ranks exchange all data anyway.
  Domains by_numa = split(bindings, kNuma, 2);
  if (!by_numa.ranks.empty()) return by_numa;
  Domains by_l3 = split(bindings, kL3, 2);
  if (!by_l3.ranks.empty()) return by_l3;
  return one_domain(bindings.size(), by_numa.reason + "; " + by_l3.reason);
}

}  // namespace dscomm
