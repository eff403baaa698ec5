// The collectives: their numbers (ranks exchange these) and their names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace dscomm {

// Values are part of a call's record: append, never renumber.
enum class Collective : uint8_t {
  kAllReduce = 1,
  kBroadcast = 2,
  kReduce = 3,
  kAllGather = 4,
  kReduceScatter = 5,
  kGather = 6,
  kScatter = 7,
  kAllToAll = 8,
  kBarrier = 9,
};

constexpr const char* collective_name(Collective kind) {
  constexpr const char* kNames[] = {"all_reduce", "broadcast",      "reduce",
                                    "all_gather", "reduce_scatter", "gather",
                                    "scatter",    "all_to_all",     "barrier"};
  static_assert(std::size(kNames) == static_cast<size_t>(Collective::kBarrier));
  const auto index = static_cast<size_t>(kind) - 1;
  return index < std::size(kNames) ? kNames[index] : "unknown";
}

// Whether a rank needs data from all other ranks, so that its call fails if any one is missing.
constexpr bool reads_everyone(Collective kind, bool is_root) {
  switch (kind) {
    case Collective::kBroadcast:
    case Collective::kScatter:
      return false;
    case Collective::kReduce:
    case Collective::kGather:
      return is_root;
    default:
      return true;
  }
}

}  // namespace dscomm
