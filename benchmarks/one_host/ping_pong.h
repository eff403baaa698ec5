// The measured message, the same for every peer: from rank 0 to rank 1 and back. The time is that
// of the round trip on rank 0.
//
// Rank 0 receives into a second buffer, and sends from this buffer the next time; rank 1 sends from
// the buffer into which it has received. Before it sends, each rank adds one to the first word and
// to the last. So a message that is lost, late or delivered twice in a tight loop makes all later
// counts wrong. All words are compared after every round of calls.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "loop.h"

namespace one_host {

// Blocking calls over bytes. A failure ends the process.
struct Messages {
  std::function<void(const void* data, size_t bytes, int to)> send;
  std::function<void(void* data, size_t bytes, int from)> receive;
};

class PingPongOperation final : public Operation {
 public:
  PingPongOperation(const Options& options, const Messages& messages, void* data, void* spare,
                    size_t bytes)
      : messages_(messages),
        rank_(options.rank),
        data_(static_cast<uint64_t*>(data)),
        spare_(static_cast<uint64_t*>(spare)),
        words_(bytes / sizeof(uint64_t)) {}

  void clear() override {
    std::memset(data_, 0, words_ * sizeof(uint64_t));
    std::memset(spare_, 0, words_ * sizeof(uint64_t));
  }
  void fill(uint32_t round) override {
    if (spare_ != data_) std::memset(spare_, 0xff, words_ * sizeof(uint64_t));
    for (size_t i = 0; i < words_; ++i) data_[i] = word_at(i, rank_, round);
  }
  void call() override {
    const size_t bytes = words_ * sizeof(uint64_t);
    if (rank_ == 0) {
      count();
      messages_.send(data_, bytes, 1);
      messages_.receive(spare_, bytes, 1);
      std::swap(data_, spare_);
    } else {
      messages_.receive(data_, bytes, 0);
      count();
      messages_.send(data_, bytes, 0);
    }
  }
  // Both ranks have rank 0's words, and have counted once in each call.
  uint64_t wrong(uint32_t round, int calls) const override {
    const uint64_t counted = 2 * static_cast<uint64_t>(calls);
    uint64_t wrong = 0;
    for (size_t i = 0; i < words_; ++i)
      wrong += data_[i] != word_at(i, 0, round) + (i == 0 || i == words_ - 1 ? counted : 0);
    return wrong;
  }
  int most_calls() const override { return 4096; }  // then all words are compared
  bool is_timed() const override { return rank_ == 0; }

 private:
  // Words of different ranks and rounds differ by more than all calls of count() add.
  static uint64_t word_at(size_t place, int rank, uint32_t round) {
    const uint64_t shift = (uint64_t{round} << 24) + (static_cast<uint64_t>(rank) << 56);
    return (place + 1) * 0x9e3779b97f4a7c15 + shift;
  }
  // Counts in whole words: a wide load after a narrow store would wait for the store.
  void count() {
    ++data_[0];
    if (words_ > 1) ++data_[words_ - 1];
  }

  const Messages& messages_;
  int rank_;
  uint64_t* data_;   // what was received last
  uint64_t* spare_;  // where rank 0 receives next; on rank 1 the same as data_
  size_t words_;
};

inline void measure_messages(const Options& options, Meeting& meeting, const Messages& messages,
                             const Allocate& allocate = allocate_pages) {
  if (options.ranks != 2) fail("messages are measured between 2 ranks");
  for (size_t bytes : options.sizes)
    if (bytes == 0 || bytes % sizeof(uint64_t) != 0) fail("messages are of whole words");
  const std::shared_ptr<void> data = allocate_largest(options, allocate);
  const std::shared_ptr<void> spare =
      options.rank == 0 ? allocate_largest(options, allocate) : data;
  measure_cases(options, meeting, [&](DType, size_t bytes) {
    return std::make_unique<PingPongOperation>(options, messages, data.get(), spare.get(), bytes);
  });
}

}  // namespace one_host
