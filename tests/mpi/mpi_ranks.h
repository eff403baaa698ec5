// Ranks that are processes: the job that mpirun has started, for the tests of csrc/mpi.
//
// Every process runs the same tests in the same order, and makes each Team on all ranks that join
// it. The Board holds state that ranks share without MPI.
#pragma once

#include <mpi.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/detector/failure_detector.h"
#include "core/team/mismatch.h"
#include "mpi/mpi_team.h"

namespace dscomm::testing {

// Memory shared by all ranks: the tests run on one host.
struct Board {
  static constexpr size_t kEntries = 4096;
  static constexpr size_t kRanks = 64;
  static constexpr size_t kTeams = 256;  // whose positions are stored at the same time
  static constexpr size_t kCalls = 32;   // of one Team and rank
  struct Entry {
    uint64_t team_id;
    uint64_t unfinished_call;
    uint32_t code;
    char message[1500];
  };

  std::atomic<int> lock;
  std::atomic<uint64_t> count;
  std::array<std::atomic<int>, kRanks> gone;    // Code, by rank
  std::array<std::atomic<int>, kRanks> raised;  // whether it noted that a ValueError ends it
  std::atomic<int> entered;
  std::array<std::atomic<int>, kRanks> pids;  // by rank
  std::atomic<uint64_t> teams[kTeams][kRanks], positions[kTeams][kRanks];
  struct Calls {
    uint64_t team_id;
    uint64_t noted;
    CallRecord last[kCalls];
    char name[200], group[200];
  };
  Calls calls[kTeams][kRanks];  // guarded by lock
  size_t entry_count;           // guarded by lock
  Entry entries[kEntries];
};

class BoardLock {
 public:
  explicit BoardLock(Board& board) : board_(board) {
    while (board_.lock.exchange(1) != 0) usleep(10);
  }
  ~BoardLock() { board_.lock.store(0); }

 private:
  Board& board_;
};

// FailureDetector over the Board.
class BoardDetector final : public FailureDetector {
 public:
  BoardDetector(Board& board, int rank, int size) : board_(board), rank_(rank), size_(size) {}

  uint64_t count() const override { return board_.count.load(); }
  Status gone(int rank) const override {
    switch (auto code = static_cast<Code>(board_.gone[static_cast<size_t>(rank)].load())) {
      case Code::kOk:
        return {};
      case Code::kPeerDied:
        return make_status(code, "rank {} died or exited without leaving", rank);
      default:
        return make_status(code, "rank {} has left", rank);
    }
  }
  Departure departure(int rank) const override {
    Departure departure;
    if (board_.raised[static_cast<size_t>(rank)].load() != 0) departure.exception = "ValueError";
    return departure;
  }
  void note_end(const std::string&) override {}
  Status death_if_cut_off(const std::vector<int>&, int64_t) const override { return {}; }
  Status ended(uint64_t team_id, uint64_t call = kAnyCall) const override {
    BoardLock lock(board_);
    for (size_t i = 0; i < board_.entry_count; ++i)
      if (board_.entries[i].team_id == team_id && call >= board_.entries[i].unfinished_call)
        return Status(static_cast<Code>(board_.entries[i].code), board_.entries[i].message);
    return {};
  }
  void end(uint64_t team_id, const Status& cause, uint64_t unfinished_call) override {
    BoardLock lock(board_);
    for (size_t i = 0; i < board_.entry_count; ++i) {
      Board::Entry& entry = board_.entries[i];
      if (entry.team_id != team_id) continue;
      // The first cause stays, but the first unfinished call is the least of all ranks'.
      if (unfinished_call < entry.unfinished_call) {
        entry.unfinished_call = unfinished_call;
        board_.count.fetch_add(1);
      }
      return;
    }
    Board::Entry& entry = board_.entries[board_.entry_count++ % Board::kEntries];
    entry.team_id = team_id;
    entry.unfinished_call = unfinished_call;
    entry.code = static_cast<uint32_t>(cause.code());
    std::strncpy(entry.message, cause.message().c_str(), sizeof entry.message - 1);
    board_.count.fetch_add(1);
  }
  void note_position(uint64_t team_id, uint64_t position) override {
    const size_t slot = team_id % Board::kTeams, rank = static_cast<size_t>(rank_);
    board_.positions[slot][rank].store(0);
    board_.teams[slot][rank].store(team_id);
    board_.positions[slot][rank].store(position);
  }
  void forget(uint64_t team_id) override {
    const size_t slot = team_id % Board::kTeams, rank = static_cast<size_t>(rank_);
    if (board_.teams[slot][rank].load() == team_id) board_.positions[slot][rank].store(0);
  }
  uint64_t ask(uint64_t team_id, uint64_t position) override {
    std::lock_guard lock(mutex_);
    questions_.emplace_back(team_id, position);
    return questions_.size() - 1;
  }
  std::vector<Answer> answers(uint64_t question) const override {
    std::lock_guard lock(mutex_);
    const auto [team_id, position] = questions_[question];
    const size_t slot = team_id % Board::kTeams;
    std::vector<Answer> answers;
    for (size_t rank = 0; rank < static_cast<size_t>(size_); ++rank) {
      const bool has_reached = board_.teams[slot][rank].load() == team_id &&
                               board_.positions[slot][rank].load() >= position;
      answers.push_back(!runs(board_.pids[rank].load()) ? Answer::kSilent
                        : has_reached                   ? Answer::kReached
                                                        : Answer::kBehind);
    }
    return answers;
  }
  void close_question(uint64_t) override {}
  void note_call(uint64_t team_id, const CallRecord& call, const CallerName& caller) override {
    BoardLock lock(board_);
    Board::Calls& calls = calls_of(team_id, rank_);
    if (calls.team_id != team_id) calls = {.team_id = team_id};
    std::strncpy(calls.name, caller.name.c_str(), sizeof calls.name - 1);
    std::strncpy(calls.group, caller.group.c_str(), sizeof calls.group - 1);
    calls.last[calls.noted++ % Board::kCalls] = call;
  }
  // Reads the other ranks' records directly.
  void compare_calls(uint64_t team_id, bool) override {
    uint64_t number = 0;
    const std::string mismatch = find_mismatch(team_id, &number);
    if (!mismatch.empty()) end(team_id, Status(Code::kMismatch, mismatch), number);
  }
  // Records that a rank has died or left.
  void report(int rank, Code code, bool raised = false) {
    board_.raised[static_cast<size_t>(rank)].store(raised);
    board_.gone[static_cast<size_t>(rank)].store(static_cast<int>(code));
    board_.count.fetch_add(1);
  }

 private:
  // Describes the first call that differs.
  std::string find_mismatch(uint64_t team_id, uint64_t* number) {
    BoardLock lock(board_);
    const Board::Calls& own = calls_of(team_id, rank_);
    std::string mismatch;
    for (int rank = 0; rank < size_; ++rank) {
      const Board::Calls& other = calls_of(team_id, rank);
      if (own.team_id != team_id || other.team_id != team_id) continue;
      for (const CallRecord& mine : own.last)
        for (const CallRecord& theirs : other.last) {
          if (theirs.number() != mine.number() || hash_call(0, theirs) == hash_call(0, mine) ||
              (!mismatch.empty() && mine.number() >= *number))
            continue;
          *number = mine.number();
          mismatch = describe_mismatch({rank_, mine, own.name}, {rank, theirs, other.name});
        }
    }
    return mismatch;
  }
  Board::Calls& calls_of(uint64_t team_id, int rank) const {
    return board_.calls[team_id % Board::kTeams][static_cast<size_t>(rank)];
  }
  // Whether the process is neither dead nor stopped.
  static bool runs(int pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string text;
    std::getline(file, text);
    const size_t end = text.rfind(')');
    return end != std::string::npos && end + 2 < text.size() && text[end + 2] != 'T' &&
           text[end + 2] != 'Z';
  }

  Board& board_;
  const int rank_, size_;
  mutable std::mutex mutex_;
  std::vector<std::pair<uint64_t, uint64_t>> questions_;
};

// This process in the job; a singleton.
class Job {
 public:
  static Job& get() {
    static Job* job = new Job();
    return *job;
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  Board& board() { return *board_; }
  BoardDetector& detector() { return *detector_; }

  // Waits until all ranks have come, while polling MPI.
  void meet() {
    MPI_Request request;
    MPI_Ibarrier(MPI_COMM_WORLD, &request);
    for (int done = 0; !done; usleep(200)) MPI_Test(&request, &done, MPI_STATUS_IGNORE);
  }
  // Clears the recorded deaths and ended Teams.
  void forget_all() {
    meet();
    if (rank_ == 0) {
      for (std::atomic<int>& code : board_->gone) code.store(0);
      for (std::atomic<int>& raised : board_->raised) raised.store(0);
      board_->entry_count = 0;
      board_->entered.store(0);
      board_->count.fetch_add(1);
    }
    meet();
  }

  // Collective over `ranks`. Teams are made in the same order everywhere, so that their ids agree.
  std::unique_ptr<MpiTeam> make_team(const std::vector<int>& ranks, MpiTeamOptions options,
                                     uint64_t id) {
    options.id = id;
    if (options.name.empty()) options.name = "test";
    options.wait_policy.by_sockets = true;  // test_mpi_team.py allows no other connections
    for (int rank : ranks) options.members.push_back({rank, name_of(rank)});
    const bool is_few = static_cast<int>(ranks.size()) <= options.few_ranks;
    MPI_Comm data = subset(ranks), check = is_few ? MPI_COMM_NULL : subset(ranks);
    return std::make_unique<MpiTeam>(data, check, *detector_, std::move(options));
  }
  // A Team of all ranks.
  std::unique_ptr<MpiTeam> make_team(MpiTeamOptions options = {}) {
    std::vector<int> everyone(static_cast<size_t>(size_));
    std::iota(everyone.begin(), everyone.end(), 0);
    return make_team(everyone, std::move(options), ++teams_of_all_);
  }
  uint64_t next_id() { return ++teams_of_all_; }

  std::string name_of(int rank) const {
    return "rank " + std::to_string(rank) + " (pid " +
           std::to_string(pids_[static_cast<size_t>(rank)]) + ")";
  }

 private:
  Job() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    pids_.resize(static_cast<size_t>(size_));
    int pid = getpid();
    MPI_Allgather(&pid, 1, MPI_INT, pids_.data(), 1, MPI_INT, MPI_COMM_WORLD);

    MPI_Win window;
    MPI_Aint bytes = rank_ == 0 ? sizeof(Board) : 0;
    void* memory = nullptr;
    MPI_Win_allocate_shared(bytes, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &window);
    int unit = 0;
    MPI_Win_shared_query(window, 0, &bytes, &unit, &memory);
    if (rank_ == 0) std::memset(memory, 0, sizeof(Board));
    board_ = static_cast<Board*>(memory);
    detector_ = std::make_unique<BoardDetector>(*board_, rank_, size_);
    meet();
    board_->pids[static_cast<size_t>(rank_)].store(pid);
    meet();
  }

  MPI_Comm subset(const std::vector<int>& ranks) {
    MPI_Group all, some;
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some);
    MPI_Comm comm;
    MPI_Comm_create_group(MPI_COMM_WORLD, some, /*tag=*/0, &comm);
    MPI_Group_free(&some);
    MPI_Group_free(&all);
    return comm;
  }

  int rank_ = 0, size_ = 0;
  std::vector<int> pids_;
  Board* board_ = nullptr;
  std::unique_ptr<BoardDetector> detector_;
  uint64_t teams_of_all_ = 1000;
};

}  // namespace dscomm::testing
