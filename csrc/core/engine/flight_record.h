// FlightRecord: writes the flight recorders of a process's groups to a file, when a group fails or
// on a signal.
//
// One JSON file for each rank, "flight_record_<global rank>.json", in the layout of torch's own
// flight recorder, so that torch's analyser can compare the ranks
// (deepspeed_comm/flight_record.py). The file is written atomically, and replaces the rank's
// earlier one. Its size is bounded.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/engine/recorder.h"

namespace dscomm {

// The record of one group.
struct GroupRecord {
  std::string name;
  int global_rank = 0;            // of this process
  std::vector<int> global_ranks;  // of every member
  int64_t timeout_ms = 0;
  uint64_t called = 0;  // number of collectives called so far
  Status failure;
  std::vector<RecordedOperation> operations;
};

class RecordedGroup {
 public:
  virtual ~RecordedGroup() = default;
  // Fills the record, on any thread. Returns false if the record must be left out: in a forked
  // child, and for a group that has been closed without a failure.
  virtual bool fill(GroupRecord* record) const = 0;
};

class FlightRecord {
 public:
  // Writes into `directory`, and creates it if it is missing. If the name is empty, writes nothing.
  explicit FlightRecord(std::string directory) : directory_(std::move(directory)) {}

  bool enabled() const { return !directory_.empty(); }

  // Adds a group. Files that are written after the group has been destroyed leave it out.
  void add(std::weak_ptr<const RecordedGroup> group);

  // Writes the records of all groups. The log gets a warning with the path of the file, or with the
  // reason if it cannot be written. If many groups fail at once, write_after_failure() writes only
  // once in a tenth of a second.
  void write_after_failure(const std::string& reason);
  void write(const std::string& reason);

  // From now on, SIGUSR2 writes the record, on a separate thread. The record must live until the
  // process ends. If the program handles SIGUSR2 itself, logs a warning and changes nothing.
  static Status write_on_signal(FlightRecord* record);
  // In a forked child: restores the default action of the signal.
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
