// The flight recorder: the last operations of a group, always on, read after something went wrong.
// In the way of every call, so it takes no lock.
#pragma once

#include <atomic>
#include <cstdint>
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

const char* operation_state_name(OperationState state);

// An operation as the recorder tells it. Times are ns since the epoch, 0 where they are still to
// come.
struct RecordedOperation {
  uint64_t id = 0;        // from 1, among all operations of the recorder
  uint64_t sequence = 0;  // as it was given
  OperationInfo info;
  OperationState state = OperationState::kQueued;
  int64_t queued_ns = 0, started_ns = 0, finished_ns = 0;
};

class Recorder {
 public:
  explicit Recorder(size_t entries) : ring_(entries), made_(read_clocks()) {}

  // Returns the entry's ticket. Any thread. An operation whose entry is being written for another
  // one, as many operations apart as there are entries, is not kept. `sequence` is the number of a
  // collective among those of its group.
  uint64_t queued(const OperationInfo& info, uint64_t sequence = 0);
  // Queued and running at once.
  uint64_t started(const OperationInfo& info, uint64_t sequence = 0);
  void running(uint64_t ticket);
  void finished(uint64_t ticket, bool ok);

  // Oldest first. Any thread; an entry that is being overwritten is left out. `last_sequence` is
  // the highest one that was given so far, or a little more.
  std::vector<RecordedOperation> operations(uint64_t last_sequence = 0) const;

  // The same as a JSON array: id, title, dtype, op, count, peer, tag, async, state and the times
  // at which it was queued, started and finished, in ns since the epoch (0: not yet).
  std::string json() const;

 private:
  // A ticket and a state, so that a state is changed only of the operation it is meant for; or that
  // the entry is being written. Tickets are from 1, and 0 is that of who keeps nothing.
  static constexpr uint64_t kBeingWritten = 0, kNeverWritten = 1;
  static constexpr uint64_t stamp_of(uint64_t ticket, OperationState state) {
    return ticket << 2 | static_cast<uint64_t>(state);
  }
  static constexpr uint64_t ticket_of(uint64_t stamp) { return stamp >> 2; }
  static constexpr OperationState state_of(uint64_t stamp) {
    return static_cast<OperationState>(stamp & 3);
  }

  // Written by the thread that has exchanged the stamp for kBeingWritten, until it stores another
  // one: releases, which pair with the acquires of read(). Who reads anything newer than the stamp
  // that it read first sees that the stamp has changed. Only times are written later as well, see
  // change().
  struct alignas(64) Entry {
    std::atomic<uint64_t> stamp{kNeverWritten};
    std::atomic<const char*> title{""};
    std::atomic<int64_t> count{0};
    std::atomic<int64_t> queued{0}, started{0}, finished{0};  // ticks
    std::atomic<int32_t> peer{0}, tag{0};
    std::atomic<DType> dtype{};
    std::atomic<ReduceOp> op{};
    std::atomic<bool> has_op{false}, asynchronous{false};
    std::atomic<uint32_t> sequence{0};  // its lower half, so that an entry is a cache line
  };
  static_assert(sizeof(Entry) == 64);
  // What an entry says.
  struct Record {
    uint64_t stamp = kNeverWritten;
    OperationInfo info;
    uint32_t sequence = 0;
    int64_t queued = 0, started = 0, finished = 0;
  };
  // The same moment by three clocks.
  struct Moment {
    int64_t ticks, monotonic_ns, wall_clock_ns;
  };
  static Moment read_clocks();
  uint64_t write(const OperationInfo& info, uint64_t sequence, OperationState state);
  void change(uint64_t ticket, OperationState from, OperationState to,
              std::atomic<int64_t> Entry::* time);
  Record read(uint64_t ticket) const;

  std::vector<Entry> ring_;
  std::atomic<uint64_t> last_ticket_{0};
  const Moment made_;
};

}  // namespace dscomm
