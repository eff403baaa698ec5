#include "core/shm/distance.h"

namespace dscomm {
namespace {

// On Zen 4: some 30 ns from a core with the same L3, 100 to 220 ns from another die. Between
// sockets of other processors it is 100 ns and more.
constexpr int64_t kFarNs = 75;

}  // namespace

void Distance::add(int member, int64_t load_ns) {
  Member& m = members_[static_cast<size_t>(member)];
  const bool far = load_ns >= kFarNs;
  const bool believed = m.has_last && m.last == far;
  m.last = far;
  m.has_last = true;
  if (!believed || (m.known && m.far == far)) return;
  if (m.known) --(m.far ? far_ : near_);
  m.known = true;
  m.far = far;
  ++(far ? far_ : near_);
}

}  // namespace dscomm
