// LatencyProbes: in some calls, this rank times a load of a member's latency probe. The times show
// the cache distance to the readers of this rank's data.
#pragma once

#include <array>

#include "core/shm/mailbox/cache_distance.h"
#include "core/shm/mailbox/members.h"

namespace dscomm {

class LatencyProbes {
 public:
  explicit LatencyProbes(const Members& members) : members_(members), distance_(members.size()) {}

  // Call it at the start of a call of `count` elements. Decides whether the call uses a probe.
  void choose(uint64_t count) {
    const uint64_t sequence = members_.sequence, ranks = members_.entries.size();
    const bool is_short = sequence < kFirstCalls || count >= kLargeCount;
    const uint64_t period = is_short ? kShortPeriod : kPeriod;
    const uint64_t turn = sequence / period, place = sequence % period;
    writes_ = place == 0 && ranks > 1;
    if (writes_) {
      probe_ = mix_hash(0, turn) % kLatencyProbes;
      observed_ =
          static_cast<int>((static_cast<uint64_t>(members_.rank) + 1 + turn % (ranks - 1)) % ranks);
    } else if (place == 1) {
      read(observed_);  // a root waited for no member, so it reads only now
    }
  }

  // Call it right before publishing data, so that a rank that sees the data finds the probe fresh.
  void write() {
    if (writes_)
      members_.own->latency_probes[probe_].written_ns.store(monotonic_ns(),
                                                            std::memory_order_relaxed);
  }

  // Times `member`'s probe, if due. Call it when the member has published data. -1: no member.
  void read(int member) {
    if (member < 0 || member != observed_) return;
    const LatencyProbe& probe = members_.views[member]->latency_probes[probe_];
    const TimedLoad load =
        time_load([&] { return probe.written_ns.load(std::memory_order_relaxed); });
    // A probe that was not written since its last load may lie in this core's cache.
    const bool is_new = load.value > timed_ns_[probe_];
    timed_ns_[probe_] = load.began_ns;
    if (!is_new || load.began_ns - load.value > kFreshNs) return;
    observed_ = -1;
    distance_.add(member, load.took_ns);
  }

  const CacheDistance& distance() const { return distance_; }

 private:
  // Once in kPeriod calls, each rank writes a latency probe and times a load of one member's probe.
  // The period is kShortPeriod in a group's first calls and in large calls, so that the distance is
  // known early.
  static constexpr uint64_t kPeriod = 32, kShortPeriod = 2;
  static constexpr uint64_t kFirstCalls = 64;
  static constexpr uint64_t kLargeCount = 64 << 10;  // elements
  // Older probes do not count: they may have left their owner's cache. The limit is not lower,
  // because a rank that mistakes far for near arrives late and must still find fresh probes.
  static constexpr int64_t kFreshNs = 100'000;

  const Members& members_;
  CacheDistance distance_;
  size_t probe_ = 0;
  bool writes_ = false;  // in this call
  int observed_ = -1;    // the member whose probe is to be timed; -1: none
  std::array<int64_t, kLatencyProbes> timed_ns_ = {};  // by probe: its last load, of any member
};

}  // namespace dscomm
