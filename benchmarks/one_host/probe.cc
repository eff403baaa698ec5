// Measures the exchange of a cache line by two cores: each stores its own and awaits the other's.
//
//   one_host_probe CPU CPU...
//
// Prints the median in ns between the first cpu and each of the others, as a list of JSON.
#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "exchange.h"

namespace {

constexpr int kBatches = 201;
constexpr uint64_t kExchanges = 200;  // in a batch

void run_on(int cpu) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(cpu, &cpus);
  if (pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus) != 0)
    one_host::fail("cannot run on cpu " + std::to_string(cpu));
}

double median_ns(int one, int other) {
  one_host::ExchangeLine lines[2];
  constexpr uint64_t kRounds = kBatches * kExchanges;
  std::thread answers([&] {
    run_on(other);
    for (uint64_t round = 1; round <= kRounds; ++round)
      one_host::exchange(lines[1], lines[0], round);
  });
  run_on(one);
  std::vector<double> batches;
  uint64_t round = 0;
  for (int batch = 0; batch < kBatches; ++batch) {
    const auto began = std::chrono::steady_clock::now();
    for (uint64_t i = 0; i < kExchanges; ++i) one_host::exchange(lines[0], lines[1], ++round);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
    batches.push_back(took.count() / static_cast<double>(kExchanges));
  }
  answers.join();
  return one_host::middle(batches);
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
