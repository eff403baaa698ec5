#include "core/shm/mailbox/cache_distance.h"

#include <algorithm>

namespace dscomm {
namespace {

// On Zen 4, a load from a core with the same L3 takes some 30 ns, from another die 100 to 220 ns;
// between sockets of other processors, 100 ns and more.
constexpr int64_t kFarNs = 75;

// A load from the core's own caches takes at most some 5 ns, from the next core's 15 ns and more.
// The clock hardly resolves that, so the mean of several loads decides.
constexpr double kSameCoreNs = 9;
constexpr int kLoads = 16;

}  // namespace

void CacheDistance::add(int member, int64_t load_ns) {
  Member& m = members_[member];
  const bool far = load_ns >= kFarNs;
  const bool believed = m.last == far;
  m.last = far;
  if (m.same) --same_;
  if (!far) {
    m.loads = std::min(m.loads + 1, kLoads);
    m.mean_ns += (static_cast<double>(load_ns) - m.mean_ns) / m.loads;
  }
  if (believed && (!m.known || m.far != far)) {
    if (m.known) --(m.far ? far_ : near_);
    m.known = true;
    m.far = far;
    ++(far ? far_ : near_);
  }
  if (m.far) m.loads = 0;  // once it is near again, it may run on another core
  m.same = m.known && !m.far && m.loads == kLoads && m.mean_ns < kSameCoreNs;
  if (m.same) ++same_;
}

}  // namespace dscomm
