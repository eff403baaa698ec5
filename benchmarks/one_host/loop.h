// The measurement, the same for every peer and operation, in one of two modes.
//
//   tight  the same buffer again and again, nothing between the calls
//   touch  before each call every rank rewrites its whole buffer and all meet; neither is timed
//
// Every result is checked: after each call or, in a tight loop, after a round of calls, each of
// which changes the expected result. all_reduce.h and ping_pong.h are the operations.
//
// A sample is the time of one call or, for short calls in a tight loop, the mean of a batch,
// because reading the clock takes some 20 ns. For each sample, the time of the slowest rank counts.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <sstream>
#include <vector>

#include "meeting.h"

namespace one_host {

// One operation at one size, on one rank. Its buffers are the caller's.
class Operation {
 public:
  virtual ~Operation() = default;
  // Sets the buffers to zeros, on which any number of calls may follow.
  virtual void clear() = 0;
  // Writes new contents, different for every rank and round.
  virtual void fill(uint32_t round) = 0;
  // A failure ends the process.
  virtual void call() = 0;
  // How many elements of this rank are wrong after so many calls since fill().
  virtual uint64_t wrong(uint32_t round, int calls) const = 0;
  // How many calls may follow fill() before results are no longer exact.
  virtual int most_calls() const = 0;
  // Whether this rank's time counts.
  virtual bool is_timed() const { return true; }
};

constexpr int kWarmUps = 8;              // calls after new values were written
constexpr size_t kLargeBytes = 1 << 20;  // from this size on, one warm-up call is enough
constexpr size_t kFewestSamples = 5;
constexpr double kShortestSampleUs = 2;
constexpr int kLongestBatch = 20;

inline double now_us() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class Case {
 public:
  Case(const Options& options, Meeting& meeting, Operation& operation, size_t bytes)
      : options_(options), modex_(meeting), operation_(operation), bytes_(bytes) {}

  // Returns the number of samples that every rank has written to Meeting::samples().
  size_t run(bool touch) {
    wrong_ = 0;
    warm_up();
    const size_t samples = touch ? run_touch() : run_tight();
    if (!operation_.is_timed()) std::fill_n(modex_.samples(options_.rank), samples, 0.0);
    modex_.wrong(options_.rank) = wrong_;
    modex_.meet();
    return samples;
  }

 private:
  // Lasts for half the budget, so that a peer has touched all memory that it uses in turns.
  void warm_up() {
    operation_.clear();
    const double end = now_us() + 1000 * options_.budget_ms / 2;
    const int calls = bytes_ < kLargeBytes ? kWarmUps : 1;
    do {
      for (int i = 0; i < calls; ++i) operation_.call();
    } while (modex_.meet(now_us() < end) != 0);
  }

  size_t run_tight() {
    const int longest = operation_.most_calls();
    const double call_us = pilot_us();
    const int batch =
        std::clamp(static_cast<int>(std::ceil(kShortestSampleUs / call_us)), 1, kLongestBatch);
    const size_t wanted =
        std::clamp(static_cast<size_t>(options_.budget_ms * 1000 / (call_us * batch)),
                   kFewestSamples, kMostSamples);
    const int warm_ups = call_us < 1000 ? kWarmUps : 1;
    double* samples = modex_.samples(options_.rank);
    size_t taken = 0;
    for (uint32_t round = 0; taken < wanted; ++round) {
      operation_.fill(round);
      modex_.meet();
      int calls = warm_ups;
      for (int i = 0; i < warm_ups; ++i) operation_.call();
      for (; taken < wanted && calls + batch <= longest; calls += batch) {
        const double began = now_us();
        for (int i = 0; i < batch; ++i) operation_.call();
        samples[taken++] = (now_us() - began) / batch;
      }
      wrong_ += operation_.wrong(round, calls);
    }
    return taken;
  }

  size_t run_touch() {
    double* samples = modex_.samples(options_.rank);
    pilot_us();
    const double end = now_us() + 1000 * options_.budget_ms * 2;  // untimed work takes time, too
    size_t taken = 0;
    for (uint32_t round = 0;; ++round) {
      operation_.fill(round);
      const bool more = taken < kFewestSamples || (taken < kMostSamples && now_us() < end);
      if (modex_.meet(more) == 0) return taken;  // rank 0 decides
      const double began = now_us();
      operation_.call();
      samples[taken++] = now_us() - began;
      wrong_ += operation_.wrong(round, 1);
    }
  }

  // The approximate time of a call; the same on all ranks.
  double pilot_us() {
    double us = 0;
    for (uint32_t round = 0; round < 3; ++round) {
      operation_.fill(round);
      modex_.meet();
      const double began = now_us();
      operation_.call();
      us = now_us() - began;
      wrong_ += operation_.wrong(round, 1);
    }
    return std::max(0.05,
                    static_cast<double>(modex_.meet(static_cast<uint64_t>(us * 1000))) / 1000);
  }

  const Options& options_;
  Meeting& modex_;
  Operation& operation_;
  size_t bytes_;
  uint64_t wrong_ = 0;
};

// The smallest number that at least `percent` of the numbers do not exceed.
inline double nearest_rank(std::vector<double> numbers, double percent) {
  std::sort(numbers.begin(), numbers.end());
  auto place = static_cast<size_t>(std::ceil(static_cast<double>(numbers.size()) * percent / 100));
  return numbers[std::max<size_t>(place, 1) - 1];
}

inline void report(std::FILE* out, const Options& options, Meeting& meeting, DType dtype,
                   size_t bytes, bool touch, size_t samples, const std::string& probes) {
  std::vector<double> slowest(samples);
  uint64_t wrong = 0;
  for (int rank = 0; rank < options.ranks; ++rank) {
    wrong += meeting.wrong(rank);
    for (size_t i = 0; i < samples; ++i)
      slowest[i] = std::max(slowest[i], meeting.samples(rank)[i]);
  }
  std::fprintf(out,
               "{\"dtype\": \"%s\", \"size\": %zu, \"mode\": \"%s\", \"median_us\": %.4f, "
               "\"p99_us\": %.4f, \"samples\": %zu, \"wrong\": %llu%s}\n",
               name_of(dtype), bytes, touch ? "touch" : "tight", nearest_rank(slowest, 50),
               nearest_rank(slowest, 99), samples, static_cast<unsigned long long>(wrong),
               probes.c_str());
  std::fflush(out);
}

// Allocates at least `bytes`, aligned to pages; null if there is no memory.
using Allocate = std::function<std::shared_ptr<void>(size_t bytes)>;

inline std::shared_ptr<void> allocate_pages(size_t bytes) {
  return {std::aligned_alloc(4096, (bytes | 4095) + 1), std::free};
}

// Makes an operation of one dtype and size, the same on all ranks. Collective over the ranks.
using MakeOperation = std::function<std::unique_ptr<Operation>(DType dtype, size_t bytes)>;

// Measures all cases. Collective over the ranks.
inline void measure_cases(const Options& options, Meeting& meeting, const MakeOperation& make) {
  std::FILE* out = options.rank == 0 ? std::fopen(options.out.c_str(), "a") : nullptr;
  if (options.rank == 0 && out == nullptr) fail("cannot write " + options.out);
  // The cores may move between two cases, so they are probed before and after each case.
  const auto probe = [&] { return options.cpu >= 0 ? meeting.exchange_ns() : 0; };
  double before = probe();
  for (DType dtype : options.dtypes) {
    for (size_t bytes : options.sizes) {
      const std::unique_ptr<Operation> operation = make(dtype, bytes);
      for (bool touch : options.touch) {
        const size_t samples = Case(options, meeting, *operation, bytes).run(touch);
        const double after = probe();
        std::ostringstream probes;
        if (options.cpu >= 0)
          probes << ", \"before_ns\": " << before << ", \"after_ns\": " << after;
        before = after;
        if (out != nullptr)
          report(out, options, meeting, dtype, bytes, touch, samples, probes.str());
        meeting.meet();  // the samples have been read, and may be overwritten
      }
    }
  }
  if (out != nullptr) std::fclose(out);
}

// A buffer for the largest of the sizes. Ends the process if there is no memory.
inline std::shared_ptr<void> allocate_largest(const Options& options, const Allocate& allocate) {
  const size_t most = *std::max_element(options.sizes.begin(), options.sizes.end());
  std::shared_ptr<void> data = allocate(most);
  if (data == nullptr) fail("no memory");
  return data;
}

}  // namespace one_host
