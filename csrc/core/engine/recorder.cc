#include "core/engine/recorder.h"

#include <cstdio>

#include "core/base/deadline.h"

namespace dscomm {
namespace {

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

Recorder::Entry* Recorder::find(uint64_t ticket) {
  if (ring_.empty()) return nullptr;
  Entry& entry = ring_[ticket % ring_.size()];
  return entry.ticket == ticket ? &entry : nullptr;  // overwritten since
}

uint64_t Recorder::queued(const OperationInfo& info) {
  if (ring_.empty()) return 0;
  int64_t now = wall_clock_ns();
  std::lock_guard lock(mutex_);
  uint64_t ticket = ++next_ticket_;
  ring_[ticket % ring_.size()] = {ticket, info, OperationState::kQueued, now, 0, 0};
  return ticket;
}

uint64_t Recorder::started(const OperationInfo& info) {
  if (ring_.empty()) return 0;
  int64_t now = wall_clock_ns();
  std::lock_guard lock(mutex_);
  uint64_t ticket = ++next_ticket_;
  ring_[ticket % ring_.size()] = {ticket, info, OperationState::kRunning, now, now, 0};
  return ticket;
}

void Recorder::running(uint64_t ticket) {
  std::lock_guard lock(mutex_);
  if (Entry* entry = find(ticket)) {
    entry->state = OperationState::kRunning;
    entry->started_ns = wall_clock_ns();
  }
}

void Recorder::finished(uint64_t ticket, bool ok) {
  std::lock_guard lock(mutex_);
  if (Entry* entry = find(ticket)) {
    entry->state = ok ? OperationState::kCompleted : OperationState::kFailed;
    entry->finished_ns = wall_clock_ns();
  }
}

std::string Recorder::json() const {
  std::lock_guard lock(mutex_);
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
        entry.info.asynchronous ? "true" : "false", state_name(entry.state),
        static_cast<long long>(entry.queued_ns), static_cast<long long>(entry.started_ns),
        static_cast<long long>(entry.finished_ns));
    text += line;
  }
  return text + "]";
}

}  // namespace dscomm
