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

}  // namespace dscomm
