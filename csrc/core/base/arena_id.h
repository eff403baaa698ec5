// ArenaId: identifies the arena of a process, and so the process itself, across all hosts.
#pragma once

#include <compare>
#include <cstdint>

namespace dscomm {

// 128 random bits. Part of a rank's address; a peer compares them with those in the mapped arena.
struct ArenaId {
  uint64_t high = 0, low = 0;
  bool operator==(const ArenaId&) const = default;
  auto operator<=>(const ArenaId&) const = default;
};

}  // namespace dscomm
