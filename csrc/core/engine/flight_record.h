// FlightRecord: the flight recorders of a process's groups as a file, written when a group fails or
// a signal asks for it.
//
// One JSON file for each rank, "flight_record_<global rank>.json", in the layout of torch's own
// flight recorder, so that torch's analyser can compare the ranks
// (deepspeed_comm/flight_record.py). It is written as a whole or not at all, and replaces the
// rank's earlier one. Its size is bounded.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/engine/recorder.h"

namespace dscomm {

// What one group tells.
struct GroupRecord {
  std::string name;
  int rank = 0;
  std::vector<int> global_ranks;
  int64_t timeout_ms = 0;
  uint64_t called = 0;  // collectives
  Status failure;
  std::vector<RecordedOperation> operations;
};

class RecordedGroup {
 public:
  virtual ~RecordedGroup() = default;
  // Any thread. False for a group that has been closed, and had not failed.
  virtual bool tell(GroupRecord* record) const = 0;
};

class FlightRecord {
 public:
  // Writes into `directory`, which is made if it is missing; nowhere where that is empty.
  explicit FlightRecord(std::string directory) : directory_(std::move(directory)) {}

  bool enabled() const { return !directory_.empty(); }

  // A group to be written; one that is gone by then is left out.
  void add(std::weak_ptr<const RecordedGroup> group);

  // Writes what all groups tell. A file that cannot be written is a warning in the log, and so is
  // where it lies. When many groups fail, only the first of each tenth of a second is written.
  void write_after_failure(const std::string& reason);
  void write(const std::string& reason);

  // Has SIGUSR2 write the record from now on, on a thread of its own; for the record of the
  // process, which lives to its end. Where the program has a handler for it, that stays, and the
  // log says so.
  static Status write_on_signal(FlightRecord* record);
  // In a forked child: the signal is the child's own again.
  static void after_fork_in_child();

 private:
  const std::string directory_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<const RecordedGroup>> groups_;
  int64_t last_written_ns_ = 0;
};

// The file of one rank, as text.
std::string flight_record_text(const std::vector<GroupRecord>& groups, const std::string& reason);

}  // namespace dscomm
