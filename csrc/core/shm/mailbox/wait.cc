#include "core/shm/mailbox/wait.h"

#include <sched.h>

#include <algorithm>

#include "core/base/futex.h"

namespace dscomm {
namespace {

// A pause takes some 50 ns on Zen 4 and on Intel since Skylake. With a core for every rank, 5 us of
// pauses are cheaper than the first yield. With fewer cores, pauses delay the rank that is waited
// for (8 bytes, 4 ranks on 2 cores: 20 pauses 4.7 us, 200 pauses 13.6 us, 2000 pauses 101 us).
constexpr int kSpinWithCores = 100;
constexpr int kSpinWithoutCores = 20;
constexpr int64_t kFirstSliceNs = 1'000'000;

// A yield that took this long gave the core to a busy process. That other process would get a whole
// time slice at each yield, whereas a sleeper runs as soon as it is woken. So the thread's waits do
// not yield for a while, which doubles after each further long yield. (A DDP step of two ranks
// beside one busy process: 760 ms with yields, 390 without; gloo, which sleeps, 310.)
constexpr int64_t kLongYieldNs = 500'000;
constexpr int64_t kShortestPauseNs = 5'000'000, kLongestPauseNs = 320'000'000;
thread_local int64_t yields_again_ns = 0, without_yields_ns = 0;

void note_yield(int64_t began_ns, int64_t ended_ns) {
  if (ended_ns - began_ns < kLongYieldNs) {
    without_yields_ns = 0;
    return;
  }
  without_yields_ns = std::clamp(2 * without_yields_ns, kShortestPauseNs, kLongestPauseNs);
  yields_again_ns = ended_ns + without_yields_ns;
}

}  // namespace

WaitPolicy WaitPolicy::choose(const Settings& settings, int local_ranks, int usable_cores) {
  WaitPolicy policy;
  policy.spin_pauses = local_ranks <= usable_cores ? kSpinWithCores : kSpinWithoutCores;
  if (settings.spin_pauses >= 0) policy.spin_pauses = static_cast<int>(settings.spin_pauses);
  policy.yield_ns = settings.yield_us * 1000;
  policy.slice_ns = settings.sleep_slice_ms * 1'000'000;
  return policy;
}

Status wait_slowly(const std::atomic<uint64_t>& word, uint64_t target,
                   std::atomic<uint32_t>& sleepers, const WaitPolicy& policy,
                   const Deadline& deadline, WaitMonitor& monitor) {
  deadline.leave_out_time_since_last_look();
  int64_t now = monotonic_ns();
  const int64_t yield_end = now < yields_again_ns ? now : now + policy.yield_ns;
  while (now < yield_end) {
    sched_yield();
    const int64_t back = monotonic_ns();
    note_yield(now, back);
    deadline.note_slice(now, 0);
    if (word.load(std::memory_order_acquire) >= target)
      return {};  // pairs with the owner's exchange
    if (back < yields_again_ns) break;
    now = back;
  }
  int64_t slice = std::min(policy.slice_ns, kFirstSliceNs);
  TimeLeft time_left(deadline);
  int64_t asked = 0;
  while (true) {
    // Measured from one iteration to the next, so that time lost anywhere in the loop is noticed.
    if (policy.slice_ns > 0) deadline.note_slice(now, asked);
    DSCOMM_RETURN_IF_ERROR(monitor.check());
    now = monotonic_ns();
    const int64_t left = time_left.ns();
    // Dekker pair, all seq_cst: this thread increments the counter and then loads the word, the
    // owner exchanges the word and then loads the counter, so at least one of them sees the other.
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    uint64_t seen = word.load(std::memory_order_seq_cst);
    asked = policy.slice_ns == 0 ? 0 : std::min(slice, std::max<int64_t>(left, 0));
    if (seen < target && left > 0) {
      futex_sleep(word, seen, asked);
      if (asked > 0) deadline.note_slice(now, asked);
    }
    sleepers.fetch_sub(1, std::memory_order_relaxed);  // a late wake-up by the owner is harmless
    if (word.load(std::memory_order_acquire) >= target)
      return {};  // pairs with the owner's exchange
    if (left <= 0) return monitor.timed_out();
    slice = std::min(slice * 2, policy.slice_ns);
  }
}

}  // namespace dscomm
