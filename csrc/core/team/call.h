// Which collective a call is, as ranks tell each other and as people read it.
#pragma once

#include <cstdint>

namespace dscomm {

// Values are part of a call's fingerprint: append, never renumber.
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
  switch (kind) {
    case Collective::kAllReduce:
      return "all_reduce";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kReduce:
      return "reduce";
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kReduceScatter:
      return "reduce_scatter";
    case Collective::kGather:
      return "gather";
    case Collective::kScatter:
      return "scatter";
    case Collective::kAllToAll:
      return "all_to_all";
    case Collective::kBarrier:
      return "barrier";
  }
  return "unknown";
}

// Whether a rank needs what every other rank puts in, so that the call fails without any one.
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
