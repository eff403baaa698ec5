#include "core/detector/links.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <queue>
#include <random>
#include <set>

namespace dscomm::test {
namespace {

using Graph = std::vector<std::set<int>>;

// Ranks in the order of the hosts or, if is_dealt, round-robin over them.
std::vector<TransportMember> members_on(const std::vector<int>& sizes, bool is_dealt = false) {
  std::vector<TransportMember> members;
  std::vector<int> left = sizes;
  const auto add = [&](size_t host) {
    TransportMember member;
    member.host = static_cast<int>(host);
    members.push_back(member);
    --left[host];
  };
  if (is_dealt)
    while (std::any_of(left.begin(), left.end(), [](int count) { return count > 0; }))
      for (size_t host = 0; host < left.size(); ++host)
        if (left[host] > 0) add(host);
  for (size_t host = 0; host < left.size(); ++host)
    while (left[host] > 0) add(host);
  return members;
}

// Also checks that both ends of each link know it.
Graph graph_of(const std::vector<TransportMember>& members) {
  const std::vector<Links> links = make_links(members);
  Graph graph(members.size());
  size_t ups = 0, downs = 0;
  for (size_t rank = 0; rank < members.size(); ++rank) {
    ups += links[rank].up.size();
    downs += links[rank].down.size();
    for (int up : links[rank].up) {
      const std::vector<int>& back = links[static_cast<size_t>(up)].down;
      EXPECT_TRUE(std::binary_search(back.begin(), back.end(), static_cast<int>(rank)));
      graph[rank].insert(up);
      graph[static_cast<size_t>(up)].insert(static_cast<int>(rank));
    }
  }
  EXPECT_EQ(ups, downs);
  return graph;
}

// How many members are reachable from `start` without the members for which is_gone is true, and
// the most steps that this takes.
template <typename IsGone>
std::pair<size_t, int> reach(const Graph& graph, int start, const IsGone& is_gone) {
  std::vector<int> steps(graph.size(), -1);
  std::queue<int> next({start});
  steps[static_cast<size_t>(start)] = 0;
  size_t count = 0;
  int most = 0;
  while (!next.empty()) {
    const int rank = next.front();
    next.pop();
    ++count;
    most = std::max(most, steps[static_cast<size_t>(rank)]);
    for (int other : graph[static_cast<size_t>(rank)])
      if (steps[static_cast<size_t>(other)] < 0 && !is_gone(other)) {
        steps[static_cast<size_t>(other)] = steps[static_cast<size_t>(rank)] + 1;
        next.push(other);
      }
  }
  return {count, most};
}

// The graph stays connected without any one member, and without any one host.
void expect_survives(const std::vector<int>& sizes, bool is_dealt = false) {
  const std::vector<TransportMember> members = members_on(sizes, is_dealt);
  const Graph graph = graph_of(members);
  for (const std::set<int>& linked : graph) EXPECT_LE(linked.size(), size_t{kMostLinks});
  const auto first_but_for = [&](const auto& is_gone) {
    int rank = 0;
    while (rank < static_cast<int>(members.size()) && is_gone(rank)) ++rank;
    return rank;
  };
  const auto expect_whole = [&](const auto& is_gone) {
    size_t living = 0;
    for (size_t rank = 0; rank < members.size(); ++rank)
      living += is_gone(static_cast<int>(rank)) ? 0 : 1;
    if (living > 0) {
      EXPECT_EQ(reach(graph, first_but_for(is_gone), is_gone).first, living);
    }
  };
  // If a whole host fails, other hosts notice.
  for (size_t rank = 0; rank < members.size() && sizes.size() > 1; ++rank)
    EXPECT_TRUE(std::any_of(graph[rank].begin(), graph[rank].end(), [&](int other) {
      return members[static_cast<size_t>(other)].host != members[rank].host;
    })) << rank;
  expect_whole([](int) { return false; });
  for (int gone = 0; gone < static_cast<int>(members.size()); ++gone)
    expect_whole([&](int rank) { return rank == gone; });
  for (int host = 0; host < static_cast<int>(sizes.size()); ++host)
    expect_whole([&](int rank) { return members[static_cast<size_t>(rank)].host == host; });
}

TEST(Links, LossOfOneMemberOrHostKeepsGraphConnected) {
  for (int hosts : {1, 2, 3, 4, 5, 13, 14, 15, 40})
    for (int local : {1, 2, 3, 8})
      expect_survives(std::vector<int>(static_cast<size_t>(hosts), local));
  expect_survives({64});
  expect_survives({2, 2, 2}, /*is_dealt=*/true);
  std::mt19937 random(7);
  for (int round = 0; round < 40; ++round) {
    std::vector<int> sizes(std::uniform_int_distribution<size_t>(1, 30)(random));
    for (int& size : sizes)
      size = std::uniform_int_distribution<int>(round % 2 ? 1 : 3, round % 2 ? 3 : 16)(random);
    expect_survives(sizes, round % 3 == 0);
  }
}

// Two hosts of two members: any two survivors are linked.
TEST(Links, TwoHostsOfTwoMembersAreAllLinked) {
  for (const std::set<int>& linked : graph_of(members_on({2, 2}))) EXPECT_EQ(linked.size(), 3u);
}

TEST(Links, GraphOfThousandsHasFewLinksAndShortPaths) {
  for (const auto& [hosts, local] :
       std::vector<std::pair<size_t, int>>{{1024, 8}, {4, 256}, {1000, 1}}) {
    const std::vector<TransportMember> members = members_on(std::vector<int>(hosts, local));
    const Graph graph = graph_of(members);
    for (const std::set<int>& linked : graph) EXPECT_LE(linked.size(), size_t{kMostLinks});
    EXPECT_LE(reach(graph, 0, [](int) { return false; }).second,
              2 + std::log(static_cast<double>(members.size())) / std::log(6.0));
  }
}

}  // namespace
}  // namespace dscomm::test
