// The flight recorder: keeps the last operations of a group, for analysis after a failure. It is
// always on and on the path of each call, so it takes no lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "core/types/dtype.h"
#include "core/types/reduce_op.h"

namespace dscomm {

// Describes an operation in records. title must outlive the recorder (a literal).
struct OperationInfo {
  const char* title = "";  // "all_reduce", "send"
  DType dtype = DType::kUInt8;
  bool has_op = false;  // whether op is valid
  ReduceOp op = ReduceOp::kSum;
  int64_t count = 0;  // elements of this rank's input
  int peer = -1;      // root, destination or source; -1: none
  int tag = 0;
  bool asynchronous = false;
};

enum class OperationState : uint8_t { kQueued, kRunning, kCompleted, kFailed };

const char* operation_state_name(OperationState state);

// An operation read from the recorder. Times are ns since the epoch; 0: not yet.
struct RecordedOperation {
  uint64_t id = 0;        // from 1, among all operations of the recorder
  uint64_t sequence = 0;  // as passed to queued() or started()
  OperationInfo info;
  OperationState state = OperationState::kQueued;
  int64_t queued_ns = 0, started_ns = 0, finished_ns = 0;
};

class Recorder {
 public:
  explicit Recorder(size_t entries) : ring_(entries), made_(read_clocks()) {}

  // Returns the ticket of the entry. Thread-safe. Returns 0 if the operation is not kept: the ring
  // is empty, or the entry is being written for another operation (a whole ring apart). `sequence`
  // is the number of a collective in its group.
  uint64_t queued(const OperationInfo& info, uint64_t sequence = 0) {
    return write(info, sequence, OperationState::kQueued);
  }
  // Like queued(), for an operation that starts at once.
  uint64_t started(const OperationInfo& info, uint64_t sequence = 0) {
    return write(info, sequence, OperationState::kRunning);
  }
  void running(uint64_t ticket) {
    change(ticket, OperationState::kQueued, OperationState::kRunning, &Entry::started);
  }
  void finished(uint64_t ticket, bool ok) {
    change(ticket, OperationState::kRunning,
           ok ? OperationState::kCompleted : OperationState::kFailed, &Entry::finished);
  }

  // The operations, oldest first. Thread-safe. Entries that are being overwritten are left out.
  // To get right sequences, pass the highest one given to queued() or started(), or slightly more.
  std::vector<RecordedOperation> operations(uint64_t last_sequence = 0) const;

  // The operations as a JSON array: id, title, dtype, op, count, peer, tag, async, state and the
  // times at which each was queued, started and finished, in ns since the epoch (0: not yet).
  std::string json() const;

 private:
  // A stamp is a ticket and a state, so that a state change affects only its own operation; or
  // kBeingWritten. Tickets start at 1; 0 means that the operation is not kept.
  static constexpr uint64_t kBeingWritten = 0, kNeverWritten = 1;
  static constexpr uint64_t stamp_of(uint64_t ticket, OperationState state) {
    return ticket << 2 | static_cast<uint64_t>(state);
  }
  static constexpr uint64_t ticket_of(uint64_t stamp) { return stamp >> 2; }
  static constexpr OperationState state_of(uint64_t stamp) {
    return static_cast<OperationState>(stamp & 3);
  }

  // Written by the thread that has exchanged the stamp for kBeingWritten, until it stores a new
  // stamp. Its release stores pair with the acquires in read(): a thread that reads a field newer
  // than its stamp then sees that the stamp has changed. Only times are also written later, see
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
    std::atomic<uint32_t> sequence{0};  // lower half only, so that an entry is one cache line
  };
  static_assert(sizeof(Entry) == 64);
  // The same moment by three clocks.
  struct Moment {
    int64_t ticks, monotonic_ns, wall_clock_ns;
  };
  static Moment read_clocks();
  uint64_t write(const OperationInfo& info, uint64_t sequence, OperationState state);
  void change(uint64_t ticket, OperationState from, OperationState to,
              std::atomic<int64_t> Entry::* time);
  RecordedOperation read(uint64_t ticket) const;

  std::vector<Entry> ring_;
  std::atomic<uint64_t> last_ticket_{0};
  const Moment made_;
};

}  // namespace dscomm
