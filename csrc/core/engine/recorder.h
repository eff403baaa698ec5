// The flight recorder: the last operations of a group, always on, read after something went wrong.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "core/types/dtype.h"
#include "core/types/reduce_op.h"

namespace dscomm {

// What an operation is, for people. title must outlive the recorder (a literal).
struct OperationInfo {
  const char* title = "";  // "all_reduce", "send"
  DType dtype = DType::kUInt8;
  bool has_op = false;  // whether op means something
  ReduceOp op = ReduceOp::kSum;
  int64_t count = 0;  // elements this rank puts in
  int peer = -1;      // root, destination or source; -1 where there is none
  int tag = 0;
  bool asynchronous = false;
};

enum class OperationState : uint8_t { kQueued, kRunning, kCompleted, kFailed };

class Recorder {
 public:
  explicit Recorder(size_t entries) : ring_(entries), made_(read_clocks()) {}

  // Returns the entry's ticket. Any thread.
  uint64_t queued(const OperationInfo& info);
  uint64_t started(const OperationInfo& info);  // queued and running at once
  void running(uint64_t ticket);
  void finished(uint64_t ticket, bool ok);

  // A JSON array, oldest first: id, title, dtype, op, count, peer, tag, async, state and the times
  // at which it was queued, started and finished, in ns since the epoch (0: not yet).
  std::string json() const;

 private:
  struct Entry {
    uint64_t ticket = 0;
    OperationInfo info;
    OperationState state = OperationState::kQueued;
    int64_t queued = 0, started = 0, finished = 0;  // ticks
  };
  // The same moment by three clocks.
  struct Moment {
    int64_t ticks, monotonic_ns, wall_clock_ns;
  };
  static Moment read_clocks();
  Entry* find(uint64_t ticket);

  mutable std::mutex mutex_;
  std::vector<Entry> ring_;
  uint64_t next_ticket_ = 0;
  const Moment made_;
};

}  // namespace dscomm
