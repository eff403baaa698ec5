// How long two cores take to exchange a cache line: each stores its own and waits for the other's.
//
//   one_host_probe CPU CPU...
//
// Prints the median in ns between the first cpu and each of the others, as a list of JSON.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "meeting.h"

namespace {

constexpr int kBatches = 201;
constexpr uint64_t kExchanges = 200;      // in a batch
constexpr uint64_t kSpins = 100'000'000;  // seconds, after which the other core is not there

struct alignas(128) Line {
  std::atomic<uint64_t> round{0};  // released by its owner, acquired by the other
};

void run_on(int cpu) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(cpu, &cpus);
  if (pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus) != 0)
    one_host::fail("cannot run on cpu " + std::to_string(cpu));
}

void exchange(Line& mine, const Line& theirs, uint64_t round) {
  mine.round.store(round, std::memory_order_release);  // pairs with the load below, of the other
  for (uint64_t spins = 0; theirs.round.load(std::memory_order_acquire) < round; ++spins) {
    one_host::pause();
    if (spins == kSpins) one_host::fail("the other core did not answer");
  }
}

double median_ns(int one, int other) {
  Line lines[2];
  constexpr uint64_t kRounds = kBatches * kExchanges;
  std::thread answers([&] {
    run_on(other);
    for (uint64_t round = 1; round <= kRounds; ++round) exchange(lines[1], lines[0], round);
  });
  run_on(one);
  std::vector<double> batches;
  uint64_t round = 0;
  for (int batch = 0; batch < kBatches; ++batch) {
    const auto began = std::chrono::steady_clock::now();
    for (uint64_t i = 0; i < kExchanges; ++i) exchange(lines[0], lines[1], ++round);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
    batches.push_back(took.count() / static_cast<double>(kExchanges));
  }
  answers.join();
  std::nth_element(batches.begin(), batches.begin() + kBatches / 2, batches.end());
  return batches[kBatches / 2];
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) one_host::fail("usage: one_host_probe CPU CPU...");
  std::printf("[");
  for (int i = 2; i < count; ++i)
    std::printf("%s%.1f", i == 2 ? "" : ", ",
                median_ns(std::atoi(arguments[1]), std::atoi(arguments[i])));
  std::printf("]\n");
  return 0;
}
