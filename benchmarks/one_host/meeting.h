// How the ranks of a benchmark meet: a barrier through shared memory, independent of the peer, so
// that all peers are timed after the same barrier; and the results of ranks for rank 0.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "exchange.h"

namespace one_host {

constexpr int kMostRanks = 16;
constexpr size_t kMostSamples = 1024;

// The contents of the file, at first zeros.
struct MeetingPlace {
  struct alignas(128) Line {
    std::atomic<uint64_t> arrived;  // how often this rank came; released by it, acquired by others
    uint64_t word[2];               // rank 0's, of the last two meetings
    uint64_t wrong;                 // elements
  };
  Line lines[kMostRanks];
  ExchangeLine exchange[2];  // of rank 0, and of the rank with which it exchanges
  double samples[kMostRanks][kMostSamples];

  static constexpr size_t kBytes = 1 << 20;
};
static_assert(sizeof(MeetingPlace) <= MeetingPlace::kBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

class Meeting {
 public:
  explicit Meeting(const Options& options) : rank_(options.rank), ranks_(options.ranks) {
    // Ranks that share cores must yield them to each other soon.
    pauses_ = options.cpu >= 0 ? 100'000 : 20;
    if (ranks_ > kMostRanks) fail("too many ranks");
    int file = ::open(options.meet.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) fail("cannot open " + options.meet);
    void* memory =
        ::mmap(nullptr, MeetingPlace::kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) fail("cannot map " + options.meet);
    ::close(file);
    place_ = static_cast<MeetingPlace*>(memory);
  }

  // Returns rank 0's `word` on every rank, once all are there. Ends the process after a minute.
  uint64_t meet(uint64_t word = 0) {
    ++meetings_;
    // Two words alternate: rank 0 overwrites a word only after all ranks have come to the next
    // meeting, and so have read it.
    if (rank_ == 0) place_->lines[0].word[meetings_ % 2] = word;
    // Pairs with the acquire below: data written before the store is visible after it.
    place_->lines[rank_].arrived.store(meetings_, std::memory_order_release);
    for (int rank = 0; rank < ranks_; ++rank) wait_for(rank);
    return place_->lines[0].word[meetings_ % 2];
  }

  // The time in ns in which rank 0's core exchanges a cache line with the farthest other core, as
  // rank 0 measures it. Collective; each rank must have a core.
  double exchange_ns() {
    double farthest = 0;
    for (int other = 1; other < ranks_; ++other)
      farthest = std::max(farthest, exchange_ns_with(other));
    return farthest;
  }

  double* samples(int rank) { return place_->samples[rank]; }
  uint64_t& wrong(int rank) { return place_->lines[rank].wrong; }

 private:
  using Clock = std::chrono::steady_clock;

  double exchange_ns_with(int other) {
    constexpr size_t kBatches = 21;
    constexpr int kExchanges = 50;
    const int end = rank_ == 0 ? 0 : 1;
    // Virtual cores that take turns on one core need much longer; one batch is enough to show it.
    const Clock::time_point enough = Clock::now() + std::chrono::milliseconds(5);
    std::vector<double> batches;
    while (meet(batches.empty() || (batches.size() < kBatches && Clock::now() < enough)) != 0) {
      const Clock::time_point began = Clock::now();
      for (uint64_t i = 1; (rank_ == 0 || rank_ == other) && i <= kExchanges; ++i)
        exchange(place_->exchange[end], place_->exchange[1 - end], exchanges_ + i);
      exchanges_ += kExchanges;
      const std::chrono::duration<double, std::nano> took = Clock::now() - began;
      batches.push_back(took.count() / kExchanges);
    }
    return middle(batches);
  }

  void wait_for(int rank) {
    int turns = 0;
    Clock::time_point end;
    // Pairs with the release above.
    while (place_->lines[rank].arrived.load(std::memory_order_acquire) < meetings_) {
      if (++turns <= pauses_) {
        pause();
        continue;
      }
      if (turns == pauses_ + 1) end = Clock::now() + std::chrono::minutes(1);
      if (Clock::now() > end) fail("rank " + std::to_string(rank) + " did not come in a minute");
      ::sched_yield();
    }
  }

  int rank_, ranks_;
  int pauses_ = 0;
  uint64_t meetings_ = 0, exchanges_ = 0;
  MeetingPlace* place_ = nullptr;
};

}  // namespace one_host
