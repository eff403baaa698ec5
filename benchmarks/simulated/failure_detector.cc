// The cost of the failure detector on thousands of ranks: its own code (Links, Flooding) on a
// simulated network, in which a message takes HOP_US to another process, which takes HANDLE_US to
// handle the message.
//
//   simulated_failure_detector HOSTS LOCAL [HOP_US] [HANDLE_US] [SEED]
//
// Prints a line for each of: a death of the first rank, of another one, of a whole host, of a
// hundredth of all at random; a Team that ends; a question that all answer.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "simulated_network.h"

namespace dscomm {
namespace {

using test::SimulatedNetwork;

void print(SimulatedNetwork& network, const char* what, double began_us, double over_us) {
  const SimulatedNetwork::Traffic traffic = network.take_traffic();
  uint64_t all = 0, most = 0;
  for (uint64_t count : traffic.messages) {
    all += count;
    most = std::max(most, count);
  }
  std::printf("%-26s %9.2f ms %8.1f messages a rank, %6llu at most, of %6.1f bytes\n", what,
              (over_us - began_us) / 1000, static_cast<double>(all) / network.size(),
              static_cast<unsigned long long>(most),
              all == 0 ? 0.0 : static_cast<double>(traffic.bytes) / static_cast<double>(all));
}

// Kills `dead`, and runs until every living rank has heard of all of them.
void deaths(SimulatedNetwork& network, const char* what, const std::vector<int>& dead) {
  const double began_us = network.now_us();
  network.kill(dead);
  size_t awaited = 0;
  std::vector<size_t> missing(static_cast<size_t>(network.size()), dead.size());
  for (int rank = 0; rank < network.size(); ++rank) awaited += network.lives(rank) ? 1 : 0;
  std::vector<uint64_t> before;
  for (int rank = 0; rank < network.size(); ++rank) before.push_back(network.node(rank).count());
  const double over_us = network.run([&](int rank) {
    const auto k = static_cast<size_t>(rank);
    if (missing[k] != 0 && network.node(rank).count() - before[k] == dead.size()) {
      missing[k] = 0;
      --awaited;
    }
    return awaited == 0;
  });
  print(network, what, began_us, over_us);
  if (over_us < 0) std::printf("%-28s %zu ranks have not heard of all\n", "", awaited);
}

int simulate(int hosts, int local, double hop_us, double handle_us, unsigned seed) {
  SimulatedNetwork network(hosts, local, hop_us, handle_us);
  const int size = network.size();
  std::printf(
      "%d hosts x %d ranks, %.0f us a hop, %.0f us to handle a message: %zu links at most\n", hosts,
      local, hop_us, handle_us, network.most_links());

  double began_us = network.now_us();
  network.node(size / 2).end(7, Status(Code::kTimeout, std::string(200, 'x')));
  network.send_from(size / 2, began_us);
  int awaited = size - 1;
  double over_us = network.run([&](int) { return --awaited == 0; });
  awaited = 0;
  for (int rank = 0; rank < size; ++rank) awaited += network.node(rank).ended(7).ok() ? 1 : 0;
  if (awaited != 0) std::abort();
  print(network, "a Team ends", began_us, network.now_us());

  began_us = network.now_us();
  const uint64_t question = network.node(1).ask(7, 1);
  network.send_from(1, began_us);
  over_us = network.run([&](int rank) {
    if (rank != 1) return false;
    const std::vector<Answer>& answers = network.node(1).answers(question);
    return std::find(answers.begin(), answers.end(), Answer::kSilent) == answers.end();
  });
  print(network, "all answer a question", began_us, over_us);

  const auto kill = [&](const char* what, const std::vector<int>& dead) {
    SimulatedNetwork fresh(hosts, local, hop_us, handle_us);
    deaths(fresh, what, dead);
  };
  kill("the first rank dies", {0});
  kill("the last rank dies", {size - 1});
  std::vector<int> host(static_cast<size_t>(local));
  std::iota(host.begin(), host.end(), local);
  kill("the second host dies", host);
  std::vector<int> some(static_cast<size_t>(size));
  std::iota(some.begin(), some.end(), 0);
  std::mt19937 random(seed);
  std::shuffle(some.begin(), some.end(), random);
  some.resize(static_cast<size_t>(std::max(1, size / 100)));
  kill("a hundredth die at once", some);
  return 0;
}

}  // namespace
}  // namespace dscomm

int main(int count, char** values) {
  if (count < 3) {
    std::fprintf(stderr, "usage: %s HOSTS LOCAL [HOP_US] [HANDLE_US] [SEED]\n", values[0]);
    return 2;
  }
  const auto number = [&](int k, double other) { return count > k ? std::atof(values[k]) : other; };
  return dscomm::simulate(std::atoi(values[1]), std::atoi(values[2]), number(3, 50), number(4, 5),
                          static_cast<unsigned>(number(5, 1)));
}
