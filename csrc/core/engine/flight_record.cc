#include "core/engine/flight_record.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <string_view>
#include <thread>

#include "core/base/deadline.h"
#include "core/base/format.h"
#include "core/base/log.h"
#include "core/base/owned.h"
#include "core/base/thread.h"

namespace dscomm {
namespace {

// Version of the layout that torch 2.13 writes and reads.
constexpr const char* kVersion = "2.10";
// Most operations in a file, the newest ones: about 5 MB.
constexpr size_t kMostOperations = 10'000;
constexpr int64_t kLeastIntervalNs = 100'000'000;

// Descriptor to which the signal handler writes; -1: none. Relaxed: set before the handler is
// installed, and in the only thread of a forked child.
std::atomic<int> wake_fd{-1};

void on_signal(int) {
  const int saved = errno;
  const uint64_t one = 1;
  const int fd = wake_fd.load(std::memory_order_relaxed);
  // Does not block: the counter would be full only after 2^64 signals.
  if (fd >= 0) [[maybe_unused]]
    ssize_t written = ::write(fd, &one, sizeof one);
  errno = saved;
}

bool is_own_handler() {
  struct sigaction now = {};
  return ::sigaction(SIGUSR2, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 &&
         now.sa_handler == &on_signal;
}

std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (const char letter : text) {
    if (static_cast<unsigned char>(letter) < 0x20) {
      out += format_text("\\u{:04x}", static_cast<unsigned>(letter));
      continue;
    }
    if (letter == '"' || letter == '\\') out += '\\';
    out += letter;
  }
  return out + '"';
}

// The name of an operation in torch's analyser, and how the number of its output elements follows
// from that of its input elements.
struct Kind {
  const char* name;
  bool gathers = false;   // output elements = input elements times ranks
  bool scatters = false;  // input elements = output elements times ranks
};

Kind kind_of(std::string_view title) {
  if (title == "all_reduce_caching") return {"all_reduce"};
  if (title == "all_reduce_coalesced") return {"allreduce_coalesced"};
  if (title == "all_gather") return {"all_gather", true};
  if (title == "all_gather_into_tensor") return {"_all_gather_base", true};
  if (title == "all_gather_coalesced") return {"ALLGATHER_coalesced", true};
  if (title == "all_gather_into_tensor_coalesced")
    return {"all_gather_into_tensor_coalesced", true};
  if (title == "reduce_scatter") return {"reduce_scatter", false, true};
  if (title == "reduce_scatter_tensor") return {"_reduce_scatter_base", false, true};
  if (title == "reduce_scatter_tensor_coalesced")
    return {"reduce_scatter_tensor_coalesced", false, true};
  if (title == "gather") return {"gather", true};
  for (const char* same :
       {"all_reduce", "broadcast", "reduce", "scatter", "all_to_all", "all_to_all_single"})
    if (title == same) return {same};
  return {"barrier"};
}

bool is_message(const RecordedOperation& operation) {
  const std::string_view title = operation.info.title;
  return title == "send" || title == "recv" || title == "recvAnySource";
}

std::string own_facts(const RecordedOperation& operation) {
  const OperationInfo& info = operation.info;
  return format_text(
      R"("dscomm": {{"title": "{}", "op": {}, "peer": {}, "tag": {}, "async": {}, "state": "{}"}})",
      info.title, info.has_op ? json_text(reduce_op_name(info.op)) : "null", info.peer, info.tag,
      info.asynchronous, operation_state_name(operation.state));
}

std::string time_or_null(int64_t at_ns) { return at_ns == 0 ? "null" : std::to_string(at_ns); }

// An operation in the format of torch's flight recorder.
std::string entry_text(const GroupRecord& group, const RecordedOperation& operation,
                       size_t group_index, size_t record_id) {
  const OperationInfo& info = operation.info;
  const Kind kind = kind_of(info.title);
  const auto size = static_cast<int64_t>(group.global_ranks.size());
  const int64_t out = kind.gathers    ? info.count * size
                      : kind.scatters ? info.count / size
                                      : info.count;
  // Torch's format has no failed state: a failed operation is one that has not completed.
  const bool is_done = operation.state == OperationState::kCompleted;
  const bool has_begun = operation.state != OperationState::kQueued;
  const char* state = is_done ? "completed" : has_begun ? "started" : "scheduled";
  return format_text(
      R"({{"record_id": {}, "pg_id": {}, "process_group": [{}, "undefined"], )"
      R"("collective_seq_id": {}, "p2p_seq_id": 0, "op_id": {}, "profiling_name": "gloo:{}", )"
      R"("time_created_ns": {}, "input_sizes": [[{}]], "input_dtypes": ["{}"], )"
      R"("output_sizes": [[{}]], "output_dtypes": ["{}"], "state": "{}", )"
      R"("time_discovered_started_ns": {}, "time_discovered_completed_ns": {}, )"
      R"("retired": {}, "timeout_ms": {}, "is_p2p": false, "frames": [], {}}})",
      record_id, group_index, json_text(group.name), operation.sequence, operation.id, kind.name,
      operation.queued_ns, info.count, dtype_name(info.dtype), out, dtype_name(info.dtype), state,
      time_or_null(has_begun ? operation.started_ns : 0),
      time_or_null(is_done ? operation.finished_ns : 0), is_done, group.timeout_ms,
      own_facts(operation));
}

std::string message_text(const GroupRecord& group, const RecordedOperation& operation) {
  return format_text(R"({{"process_group": {}, "count": {}, "dtype": "{}", "time_created_ns": {}, )"
                     R"("time_completed_ns": {}, {}}})",
                     json_text(group.name), operation.info.count, dtype_name(operation.info.dtype),
                     operation.queued_ns, time_or_null(operation.finished_ns),
                     own_facts(operation));
}

// The last collectives that were queued, started and completed.
std::string progress_text(const GroupRecord& group) {
  uint64_t begun = 0, completed = 0;
  for (const RecordedOperation& operation : group.operations) {
    if (is_message(operation)) continue;
    if (operation.state != OperationState::kQueued) begun = std::max(begun, operation.sequence);
    if (operation.state == OperationState::kCompleted)
      completed = std::max(completed, operation.sequence);
  }
  return format_text(R"({{"last_enqueued_collective": {}, "last_started_collective": {}, )"
                     R"("last_completed_collective": {}}})",
                     group.called, begun, completed);
}

Status write_file(const std::string& path, const std::string& text) {
  const std::string draft = format_text("{}.{}.tmp", path, getpid());
  UniqueFd file(::open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  const auto failed = [&](const char* what) {
    const int error = errno;
    ::unlink(draft.c_str());
    return make_status(Code::kResource, "{}: {} failed: {}", path, what, std::strerror(error));
  };
  if (!file.valid()) return failed("open");
  for (size_t done = 0; done < text.size();) {
    const ssize_t written = ::write(file.get(), text.data() + done, text.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return failed("write");
    done += static_cast<size_t>(written);
  }
  file.reset();
  if (::rename(draft.c_str(), path.c_str()) != 0) return failed("rename");
  return {};
}

}  // namespace

std::string flight_record_text(const std::vector<GroupRecord>& groups, const std::string& reason) {
  struct Line {
    const RecordedOperation* operation;
    size_t group;
  };
  std::vector<Line> lines;
  for (size_t k = 0; k < groups.size(); ++k)
    for (const RecordedOperation& operation : groups[k].operations)
      lines.push_back({&operation, k});
  std::ranges::stable_sort(lines, {}, [](const Line& line) { return line.operation->queued_ns; });
  const size_t left_out = lines.size() > kMostOperations ? lines.size() - kMostOperations : 0;
  lines.erase(lines.begin(), lines.begin() + static_cast<std::ptrdiff_t>(left_out));

  std::string configuration, status, failures, entries, messages;
  for (size_t k = 0; k < groups.size(); ++k) {
    const GroupRecord& group = groups[k];
    const std::string comma = k == 0 ? "" : ", ";
    const std::string name = json_text(group.name);
    configuration += format_text(R"({}{}: {{"name": {}, "desc": "undefined", "ranks": "[{}]"}})",
                                 comma, name, name, join_text(group.global_ranks, ", "));
    status += format_text("{}{}: {}", comma, name, progress_text(group));
    failures += format_text("{}{}: {}", comma, name,
                            group.failure.ok() ? "null" : json_text(group.failure.message()));
  }
  size_t record_id = 0;
  for (const Line& line : lines) {
    const GroupRecord& group = groups[line.group];
    if (is_message(*line.operation)) {
      messages += (messages.empty() ? "\n" : ",\n") + message_text(group, *line.operation);
      continue;
    }
    entries += (entries.empty() ? "\n" : ",\n") +
               entry_text(group, *line.operation, line.group, record_id++);
  }
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  return format_text(R"({{"version": "{}",
"pg_config": {{{}}},
"pg_status": {{{}}},
"entries": [{}],
"dscomm": {{"reason": {}, "rank": {}, "pid": {}, "host": {}, "written_ns": {}, )"
                     R"("operations_left_out": {},
"failures": {{{}}},
"messages": [{}]}}}}
)",
                     kVersion, configuration, status, entries, json_text(reason),
                     groups.empty() ? -1 : groups.front().global_rank, getpid(), json_text(host),
                     wall_clock_ns(), left_out, failures, messages);
}

void FlightRecord::add(std::weak_ptr<const RecordedGroup> group) {
  if (!enabled()) return;
  std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& known) { return known.expired(); });
  groups_.push_back(std::move(group));
}

void FlightRecord::write_after_failure(const std::string& reason) {
  if (!enabled()) return;
  {
    std::lock_guard lock(mutex_);
    const int64_t now_ns = monotonic_ns();
    if (last_written_ns_ != 0 && now_ns - last_written_ns_ < kLeastIntervalNs) return;
    last_written_ns_ = now_ns;
  }
  write(reason);
}

void FlightRecord::write(const std::string& reason) {
  if (!enabled()) return;
  std::vector<std::shared_ptr<const RecordedGroup>> groups;  // destroyed without the lock
  std::lock_guard lock(mutex_);
  for (const auto& known : groups_)
    if (auto group = known.lock()) groups.push_back(std::move(group));
  // Ranks that are threads of one process have one file each.
  std::map<int, std::vector<GroupRecord>> by_rank;
  for (const auto& group : groups) {
    GroupRecord record;
    if (group->fill(&record)) by_rank[record.global_rank].push_back(std::move(record));
  }
  if (::mkdir(directory_.c_str(), 0777) != 0 && errno != EEXIST)
    log_line(LogLevel::kWarn, "{}: mkdir failed: {}", directory_, std::strerror(errno));
  for (const auto& [rank, records] : by_rank) {
    const std::string path = format_text("{}/flight_record_{}.json", directory_, rank);
    const Status written = write_file(path, flight_record_text(records, reason));
    if (written.ok())
      log_line(LogLevel::kWarn, "the flight record is in {}", path);
    else
      log_line(LogLevel::kWarn, "no flight record: {}", written.message());
  }
}

Status FlightRecord::write_on_signal(FlightRecord* record) {
  struct sigaction before = {};
  if (::sigaction(SIGUSR2, nullptr, &before) != 0) return system_error("sigaction");
  if ((before.sa_flags & SA_SIGINFO) != 0 || before.sa_handler != SIG_DFL) {
    log_line(LogLevel::kWarn, "SIGUSR2 has a handler or is ignored, so it writes no flight record");
    return {};
  }
  const int wake = ::eventfd(0, EFD_CLOEXEC);
  if (wake < 0) return system_error("eventfd");
  Result<std::thread> thread = start_thread("the flight record", [record, wake] {
    uint64_t times = 0;
    // The thread ends with the process; the signal handler wakes it.
    while (::read(wake, &times, sizeof times) == sizeof times || errno == EINTR)
      record->write("SIGUSR2");
  });
  if (!thread.ok()) {
    ::close(wake);
    return thread.status();
  }
  std::move(thread).value().detach();
  wake_fd.store(wake, std::memory_order_relaxed);
  struct sigaction action = {};
  action.sa_handler = &on_signal;
  action.sa_flags = SA_RESTART;
  if (::sigaction(SIGUSR2, &action, nullptr) != 0) return system_error("sigaction");
  return {};
}

void FlightRecord::after_fork_in_child() {
  const int wake = wake_fd.exchange(-1, std::memory_order_relaxed);
  if (wake < 0) return;
  ::close(wake);
  if (is_own_handler()) ::signal(SIGUSR2, SIG_DFL);
}

}  // namespace dscomm
