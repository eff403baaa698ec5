#include "core/engine/recorder.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

#include "core/base/deadline.h"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace dscomm {
namespace {

// Every call asks twice what time it is, which takes 22 ns of clock_gettime(), or 9 ns of the
// processor's time stamp counter (Zen 4). That counts time where the kernel itself keeps time by
// it: at one rate, and alike on all cores.
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

const char* state_name(OperationState state) {
  switch (state) {
    case OperationState::kQueued:
      return "queued";
    case OperationState::kRunning:
      return "running";
    case OperationState::kCompleted:
      return "completed";
    case OperationState::kFailed:
      return "failed";
  }
  return "unknown";
}

}  // namespace

// The thread may be taken off its core between two clocks: of some tries, the shortest.
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

Recorder::Entry* Recorder::find(uint64_t ticket) {
  if (ring_.empty()) return nullptr;
  Entry& entry = ring_[ticket % ring_.size()];
  return entry.ticket == ticket ? &entry : nullptr;  // overwritten since
}

uint64_t Recorder::queued(const OperationInfo& info) {
  if (ring_.empty()) return 0;
  int64_t now = ticks();
  std::lock_guard lock(mutex_);
  uint64_t ticket = ++next_ticket_;
  ring_[ticket % ring_.size()] = {ticket, info, OperationState::kQueued, now, 0, 0};
  return ticket;
}

uint64_t Recorder::started(const OperationInfo& info) {
  if (ring_.empty()) return 0;
  int64_t now = ticks();
  std::lock_guard lock(mutex_);
  uint64_t ticket = ++next_ticket_;
  ring_[ticket % ring_.size()] = {ticket, info, OperationState::kRunning, now, now, 0};
  return ticket;
}

void Recorder::running(uint64_t ticket) {
  std::lock_guard lock(mutex_);
  if (Entry* entry = find(ticket)) {
    entry->state = OperationState::kRunning;
    entry->started = ticks();
  }
}

void Recorder::finished(uint64_t ticket, bool ok) {
  std::lock_guard lock(mutex_);
  if (Entry* entry = find(ticket)) {
    entry->state = ok ? OperationState::kCompleted : OperationState::kFailed;
    entry->finished = ticks();
  }
}

std::string Recorder::json() const {
  std::lock_guard lock(mutex_);
  const Moment now = read_clocks();
  const double tick_ns = static_cast<double>(now.monotonic_ns - made_.monotonic_ns) /
                         static_cast<double>(std::max<int64_t>(now.ticks - made_.ticks, 1));
  // By the wall clock of now, even if it was set meanwhile.
  auto epoch_ns = [&](int64_t at) -> long long {
    if (at == 0) return 0;
    return now.wall_clock_ns - static_cast<int64_t>(static_cast<double>(now.ticks - at) * tick_ns);
  };
  std::string text = "[";
  uint64_t first = next_ticket_ > ring_.size() ? next_ticket_ - ring_.size() + 1 : 1;
  for (uint64_t ticket = first; ticket <= next_ticket_ && !ring_.empty(); ++ticket) {
    const Entry& entry = ring_[ticket % ring_.size()];
    char line[512];
    std::snprintf(
        line, sizeof line,
        "%s{\"id\": %llu, \"title\": \"%s\", \"dtype\": \"%s\", \"op\": %s%s%s, \"count\": %lld, "
        "\"peer\": %d, \"tag\": %d, \"async\": %s, \"state\": \"%s\", \"queued_ns\": %lld, "
        "\"started_ns\": %lld, \"finished_ns\": %lld}",
        text.size() > 1 ? ", " : "", static_cast<unsigned long long>(ticket), entry.info.title,
        dtype_name(entry.info.dtype), entry.info.has_op ? "\"" : "",
        entry.info.has_op ? reduce_op_name(entry.info.op) : "null", entry.info.has_op ? "\"" : "",
        static_cast<long long>(entry.info.count), entry.info.peer, entry.info.tag,
        entry.info.asynchronous ? "true" : "false", state_name(entry.state), epoch_ns(entry.queued),
        epoch_ns(entry.started), epoch_ns(entry.finished));
    text += line;
  }
  return text + "]";
}

}  // namespace dscomm
