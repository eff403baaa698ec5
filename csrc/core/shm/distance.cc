#include "core/shm/distance.h"

#include <algorithm>

namespace dscomm {
namespace {

// On Zen 4: some 30 ns from a core with the same L3, 100 to 220 ns from another die. Between
// sockets of other processors it is 100 ns and more.
constexpr int64_t kFarNs = 75;

// From the core's own caches a load takes some 5 ns at most, as little as the clock can tell apart,
// so the mean of several loads is looked at; of the next core's it is 15 ns and more.
constexpr double kSameCoreNs = 9;
constexpr int kLoads = 16;

}  // namespace

void Distance::add(int member, int64_t load_ns) {
  Member& m = members_[member];
  const bool far = load_ns >= kFarNs;
  const bool believed = m.has_last && m.last == far;
  m.last = far;
  m.has_last = true;
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
  if (m.far) m.loads = 0;  // what is near next need not be what was
  m.same = m.known && !m.far && m.loads == kLoads && m.mean_ns < kSameCoreNs;
  if (m.same) ++same_;
}

}  // namespace dscomm
