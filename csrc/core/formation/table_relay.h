// TableRelay: how the member table gets to the leaders of many hosts without the store sending it
// to each of them.
//
// The leaders, and ranks that speak for themselves, form a tree in the order of their ranks. Each
// listens before it puts its entry into the store, and rank 0 tells each its place: where its
// parent listens, and which children will come. So a leader fetches the table from its parent, and
// passes it on. The store has the table too: for the root of the tree, if that is not rank 0, for
// leaders that cannot listen, and for those that do not get it from their parent in time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/look.h"
#include "core/base/status.h"

namespace dscomm {

inline constexpr int kRelayChildren = 8;

// A leader's place in the tree.
struct RelayPlace {
  std::string parent;         // as its listen() returned it; empty: there is none
  int number = 0;             // among the parent's children, from 1
  int depth = 0;              // 0: the root
  std::vector<int> children;  // their numbers
};

// The places of all leaders, from the results of listen(). Empty addresses are left out of the
// tree.
std::vector<RelayPlace> relay_places(const std::vector<std::string>& addresses);

// Of one leader, on one thread.
class TableRelay {
 public:
  virtual ~TableRelay() = default;

  // Listens anew. Returns the text by which a child finds this relay.
  virtual Result<std::string> listen() = 0;
  // The table of a meeting, of so many bytes at most, from the parent. kTimeout at `limit`, or the
  // reason of `look`.
  virtual Result<std::string> fetch(const RelayPlace& place, uint64_t meeting, size_t most_bytes,
                                    const Look& look, const Deadline& limit) = 0;
  // To the children. Returns when they have it, at `limit`, or when `look` has a reason.
  virtual void pass_on(const RelayPlace& place, uint64_t meeting, const std::string& table,
                       const Look& look, const Deadline& limit) = 0;
  // Listens no longer.
  virtual void close() = 0;
};

}  // namespace dscomm
