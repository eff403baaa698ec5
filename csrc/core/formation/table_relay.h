// TableRelay: how the leaders of many hosts get the member table without all asking the store.
//
// The leaders, and ranks that speak for themselves, form a tree in the order of their ranks. Each
// listens before it puts its entry into the store, and rank 0 tells each its place: the parent's
// address, and its children's numbers. A leader fetches the table from its parent and passes it on.
// The store has the table, too: for the root of the tree, if that is not rank 0, for leaders that
// cannot listen, and for those that do not get it from their parent in time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/give_up_check.h"
#include "core/base/status.h"

namespace dscomm {

inline constexpr int kRelayChildren = 8;

// A leader's position in the tree.
struct RelayNode {
  std::string parent;         // the result of the parent's listen(); empty: none
  int number = 0;             // among the parent's children, from 1
  int depth = 0;              // 0: the root
  std::vector<int> children;  // their numbers
};

// The positions of all leaders; addresses[k] is the result of leader k's listen(). If it is empty,
// leader k is not in the tree.
std::vector<RelayNode> relay_nodes(const std::vector<std::string>& addresses);

// Used by one leader, on one thread.
class TableRelay {
 public:
  virtual ~TableRelay() = default;

  // Listens, anew if called again. Returns text by which a child finds this relay.
  virtual Result<std::string> listen() = 0;
  // Gets the table of a meeting, of at most most_bytes, from the parent. kTimeout at `limit`, or
  // the reason of `check`.
  virtual Result<std::string> fetch(const RelayNode& node, uint64_t meeting, size_t most_bytes,
                                    const GiveUpCheck& check, const Deadline& limit) = 0;
  // Sends the table to the children. Returns when all have it, at `limit`, or if `check` fails.
  virtual void pass_on(const RelayNode& node, uint64_t meeting, const std::string& table,
                       const GiveUpCheck& check, const Deadline& limit) = 0;
  // Stops listening.
  virtual void close() = 0;
};

}  // namespace dscomm
