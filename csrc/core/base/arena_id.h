// ArenaId: names the arena of a process, and thereby the process itself, on every host.
#pragma once

#include <compare>
#include <cstdint>

namespace dscomm {

// 128 random bits; they travel through the store and are read back from memory.
struct ArenaId {
  uint64_t high = 0, low = 0;
  bool operator==(const ArenaId&) const = default;
  auto operator<=>(const ArenaId&) const = default;
};

}  // namespace dscomm
