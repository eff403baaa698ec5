#include "core/engine/recorder.h"

#include <algorithm>
#include <fstream>
#include <iterator>

#include "core/base/deadline.h"
#include "core/base/format.h"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace dscomm {
namespace {

// Each call reads the time twice. This takes 22 ns with clock_gettime(), or 9 ns with the
// processor's time stamp counter (Zen 4). The counter is used if the kernel uses it as its clock
// source: then it has a constant rate and is synchronised on all cores.
#if defined(__x86_64__)
bool counter_counts_time() {
  static const bool does = [] {
    std::ifstream file("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    std::string name;
    return (file >> name) && name == "tsc";
  }();
  return does;
}

int64_t ticks() { return counter_counts_time() ? static_cast<int64_t>(__rdtsc()) : monotonic_ns(); }
#else
int64_t ticks() { return monotonic_ns(); }
#endif

}  // namespace

const char* operation_state_name(OperationState state) {
  // Indexed by the value of the enumerator.
  static constexpr const char* kNames[] = {"queued", "running", "completed", "failed"};
  static_assert(std::size(kNames) == static_cast<size_t>(OperationState::kFailed) + 1);
  return kNames[static_cast<size_t>(state)];
}

// The thread may be preempted between two clocks, so the shortest of several tries is used.
Recorder::Moment Recorder::read_clocks() {
  Moment best{};
  int64_t shortest = INT64_MAX;
  for (int i = 0; i < 5; ++i) {
    const int64_t before = ticks();
    const int64_t monotonic = monotonic_ns(), wall_clock = wall_clock_ns();
    const int64_t after = ticks();
    if (after - before >= shortest) continue;
    shortest = after - before;
    best = {before + shortest / 2, monotonic, wall_clock};
  }
  return best;
}

uint64_t Recorder::write(const OperationInfo& info, uint64_t sequence, OperationState state) {
  if (ring_.empty()) return 0;
  const int64_t now = ticks();
  const uint64_t ticket = last_ticket_.fetch_add(1, std::memory_order_relaxed) + 1;
  Entry& entry = ring_[ticket % ring_.size()];
  constexpr auto release = std::memory_order_release;            // of these stores: see Entry
  uint64_t stamp = entry.stamp.load(std::memory_order_relaxed);  // the exchange orders
  // Acquire: writes under the older stamp come before the writes below.
  do {
    if (stamp == kBeingWritten || ticket_of(stamp) > ticket) return 0;
  } while (!entry.stamp.compare_exchange_weak(stamp, kBeingWritten, std::memory_order_acquire,
                                              std::memory_order_relaxed));
  entry.title.store(info.title, release);
  entry.count.store(info.count, release);
  entry.queued.store(now, release);
  entry.started.store(now, release);  // after queued(), change() corrects it
  entry.peer.store(info.peer, release);
  entry.tag.store(info.tag, release);
  entry.dtype.store(info.dtype, release);
  entry.op.store(info.op, release);
  entry.has_op.store(info.has_op, release);
  entry.asynchronous.store(info.asynchronous, release);
  entry.sequence.store(static_cast<uint32_t>(sequence), release);
  entry.stamp.store(stamp_of(ticket, state), release);
  return ticket;
}

// Does nothing if the entry has been overwritten. If it is overwritten during this call, a later
// operation may show this one's time.
void Recorder::change(uint64_t ticket, OperationState from, OperationState to,
                      std::atomic<int64_t> Entry::* time) {
  if (ticket == 0) return;
  Entry& entry = ring_[ticket % ring_.size()];
  uint64_t stamp = stamp_of(ticket, from);
  if (entry.stamp.load(std::memory_order_relaxed) != stamp) return;  // orders nothing
  (entry.*time).store(ticks(), std::memory_order_release);           // pairs with read()
  // Release: a thread that sees the state, in read(), sees the time.
  entry.stamp.compare_exchange_strong(stamp, stamp_of(ticket, to), std::memory_order_release,
                                      std::memory_order_relaxed);
}

// The operation, with times in ticks and the lower half of its sequence. Its id is 0 if the entry
// is not written yet, or has been overwritten.
RecordedOperation Recorder::read(uint64_t ticket) const {
  const Entry& entry = ring_[ticket % ring_.size()];
  constexpr auto acquire = std::memory_order_acquire;  // of these loads: see Entry
  const uint64_t stamp = entry.stamp.load(acquire);
  if (ticket_of(stamp) != ticket) return {};
  RecordedOperation operation;
  operation.id = ticket;
  operation.state = state_of(stamp);
  operation.info.title = entry.title.load(acquire);
  operation.info.count = entry.count.load(acquire);
  operation.queued_ns = entry.queued.load(acquire);
  if (operation.state != OperationState::kQueued)
    operation.started_ns = entry.started.load(acquire);
  if (operation.state == OperationState::kCompleted || operation.state == OperationState::kFailed)
    operation.finished_ns = entry.finished.load(acquire);
  operation.info.peer = entry.peer.load(acquire);
  operation.info.tag = entry.tag.load(acquire);
  operation.info.dtype = entry.dtype.load(acquire);
  operation.info.op = entry.op.load(acquire);
  operation.info.has_op = entry.has_op.load(acquire);
  operation.info.asynchronous = entry.asynchronous.load(acquire);
  operation.sequence = entry.sequence.load(acquire);
  if (ticket_of(entry.stamp.load(std::memory_order_relaxed)) != ticket) return {};
  return operation;
}

std::vector<RecordedOperation> Recorder::operations(uint64_t last_sequence) const {
  const Moment now = read_clocks();
  const double tick_ns = static_cast<double>(now.monotonic_ns - made_.monotonic_ns) /
                         static_cast<double>(std::max<int64_t>(now.ticks - made_.ticks, 1));
  // Uses the current wall clock, even if the clock was set after the operation.
  auto epoch_ns = [&](int64_t at) -> int64_t {
    if (at == 0) return 0;
    return now.wall_clock_ns - static_cast<int64_t>(static_cast<double>(now.ticks - at) * tick_ns);
  };
  // Read newest first, because a busy group overwrites the oldest entries.
  const uint64_t last = last_ticket_.load(std::memory_order_relaxed);  // orders nothing
  const uint64_t first = last > ring_.size() ? last - ring_.size() + 1 : 1;
  std::vector<RecordedOperation> operations;
  operations.reserve(ring_.size());
  for (uint64_t ticket = last; ticket >= first && !ring_.empty(); --ticket)
    if (const RecordedOperation operation = read(ticket); operation.id != 0)
      operations.push_back(operation);
  std::ranges::reverse(operations);
  for (RecordedOperation& operation : operations) {
    // The upper half of a sequence is that of the last sequence, or one less.
    const uint64_t behind = last_sequence - operation.sequence;
    operation.sequence = last_sequence - (behind & UINT32_MAX);
    operation.queued_ns = epoch_ns(operation.queued_ns);
    operation.started_ns = epoch_ns(operation.started_ns);
    operation.finished_ns = epoch_ns(operation.finished_ns);
  }
  return operations;
}

std::string Recorder::json() const {
  std::string text = "[";
  for (const RecordedOperation& operation : operations()) {
    const OperationInfo& info = operation.info;
    text += format_text(
        R"({}{{"id": {}, "title": "{}", "dtype": "{}", "op": {}, "count": {}, "peer": {}, )"
        R"("tag": {}, "async": {}, "state": "{}", "queued_ns": {}, "started_ns": {}, )"
        R"("finished_ns": {}}})",
        text.size() > 1 ? ", " : "", operation.id, info.title, dtype_name(info.dtype),
        info.has_op ? format_text("\"{}\"", reduce_op_name(info.op)) : "null", info.count,
        info.peer, info.tag, info.asynchronous, operation_state_name(operation.state),
        operation.queued_ns, operation.started_ns, operation.finished_ns);
  }
  return text + "]";
}

}  // namespace dscomm
