// The cost to form a group of thousands of ranks: the exchange's own code (Modex, StoreExchange),
// one thread for each host's leader, over a simulated store, in virtual time.
//
//   simulated_formation HOSTS LOCAL [HOP_US] [HANDLE_US] [GBIT] [DEAD]
//
// A question takes a hop to the store and one back. The store handles one question at a time, as
// c10d's does: it takes HANDLE_US, and 0.5 us for each further key, and sends the values at GBIT/s.
// From 33 hosts on the member table goes from leader to leader (TableRelay), over simulated
// connections of GBIT/s: a hop there and back to connect, and one for each message; slow start is
// left out. Leaders start at random within a second. DEAD leaders end when they have read the
// member table, and pass it on to nobody: the others give up at the timeout, 30 s. Messages from
// ranks to the leader of their host are not simulated: see benchmarks/many_ranks.py.
#include <time.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/settings.h"
#include "core/formation/modex.h"
#include "core/formation/table_relay.h"
#include "core/store/store.h"
#include "core/store/store_exchange.h"

namespace dscomm {
namespace {

constexpr std::chrono::seconds kTimeout{30};
constexpr int64_t kStartsNs = 1'000'000'000;
// Bytes of a rank's own entry, and of the part common to its host, as measured in a job.
constexpr size_t kOwnBytes = 78, kCommonBytes = 130;

// The length of a TableRelay's address.
constexpr size_t kRelayTextBytes = 160;

constexpr int64_t kKeyNs = 500, kLeastNapNs = 1'000;

struct Costs {
  int64_t hop_ns = 0, handle_ns = 0;
  double ns_per_byte = 0;
};

// Leaders take turns: the one with the earliest time goes on, and the others wait.
class World {
 public:
  World(int leaders, Costs costs) : costs_(costs), clocks_(static_cast<size_t>(leaders)) {}

  // Called on a leader's thread: waits until no other leader has anything to do before `at_ns`.
  void go_on_at(int leader, int64_t at_ns) {
    std::unique_lock lock(mutex_);
    Clock& clock = clocks_[static_cast<size_t>(leader)];
    clock.ns = at_ns;
    waiting_.insert({at_ns, leader});
    release_next();
    clock.turn.wait(lock, [&] { return clock.is_on; });
    clock.is_on = false;
  }
  void end(int leader) {
    std::lock_guard lock(mutex_);
    clocks_[static_cast<size_t>(leader)].has_ended = true;
    ++ended_;
    release_next();
  }
  int64_t now_ns(int leader) const { return clocks_[static_cast<size_t>(leader)].ns; }

  // Asks the store about `keys` keys, and waits for the answer. `handle` returns the bytes sent.
  template <typename Handle>
  void ask(int leader, size_t keys, Handle handle) {
    go_on_at(leader, now_ns(leader) + costs_.hop_ns);  // arrives after all earlier questions
    const size_t bytes = handle();
    const int64_t begins_ns = std::max(now_ns(leader), free_ns_);
    free_ns_ = begins_ns + costs_.handle_ns + static_cast<int64_t>(keys - 1) * kKeyNs +
               static_cast<int64_t>(static_cast<double>(bytes) * costs_.ns_per_byte);
    go_on_at(leader, free_ns_ + costs_.hop_ns);
    ++questions;
    bytes_sent += bytes;
  }

  std::map<std::string, std::string> values;
  std::map<std::string, int64_t> counters;
  uint64_t questions = 0, bytes_sent = 0;

  // Between leaders: the children connected to each parent, and the table sent to each child.
  struct Delivery {
    int64_t at_ns = 0;
    std::string table;
  };
  std::map<int, std::set<int>> callers;
  std::map<int, Delivery> deliveries;
  uint64_t most_passed_on = 0;  // bytes, by one leader
  const Costs& costs() const { return costs_; }

 private:
  struct Clock {
    int64_t ns = 0;
    bool is_on = false, has_ended = false;
    std::condition_variable turn;
  };

  // Once all leaders wait, releases one thread, so that a seed has one outcome.
  void release_next() {
    if (waiting_.size() + static_cast<size_t>(ended_) < clocks_.size() || waiting_.empty()) return;
    Clock& next = clocks_[static_cast<size_t>(waiting_.begin()->second)];
    waiting_.erase(waiting_.begin());
    next.is_on = true;
    next.turn.notify_one();
  }

  const Costs costs_;
  std::mutex mutex_;
  std::vector<Clock> clocks_;
  std::set<std::pair<int64_t, int>> waiting_;
  int ended_ = 0;
  int64_t free_ns_ = 0;  // when the store has handled all questions
};

// The world and the leader of this thread.
thread_local World* this_world = nullptr;
thread_local int this_leader = -1;

class SimulatedStore final : public Store {
 public:
  SimulatedStore(World& world, int leader) : world_(world), leader_(leader) {}

  Status set(const std::string& key, std::string_view value) override {
    ask([&] {
      world_.values[key] = std::string(value);
      return key.size() + value.size();
    });
    return {};
  }
  Result<std::string> get(const std::string& key, const Deadline&) override {
    Result<std::optional<std::string>> found = find(key);
    if (!found.value()) return Status(Code::kTimeout, "no key " + key);
    return std::move(*found.value());
  }
  Result<bool> has(const std::string& key) override { return find(key).value().has_value(); }
  Result<std::optional<std::string>> find(const std::string& key) override {
    std::optional<std::string> value;
    ask([&] {
      auto found = world_.values.find(key);
      if (found != world_.values.end()) value = found->second;
      return key.size() + (value ? value->size() : 0);
    });
    return value;
  }
  Result<bool> has_all(const std::vector<std::string>& keys) override {
    bool are_there = true;
    ask(keys.size(), [&] {
      size_t bytes = 0;
      for (const std::string& key : keys) {
        bytes += key.size();
        are_there = are_there && world_.values.count(key) > 0;
      }
      return bytes;
    });
    return are_there;
  }
  // Like c10d's: asks has_all(), and then for the values.
  Result<std::optional<std::vector<std::string>>> find_all(
      const std::vector<std::string>& keys) override {
    if (!has_all(keys).value()) return std::optional<std::vector<std::string>>();
    std::vector<std::string> values;
    ask(keys.size(), [&] {
      size_t bytes = 0;
      for (const std::string& key : keys) {
        values.push_back(world_.values[key]);
        bytes += key.size() + values.back().size();
      }
      return bytes;
    });
    return std::optional<std::vector<std::string>>(std::move(values));
  }
  Status set_all(const KeysAndValues& all) override {
    ask(all.size(), [&] {
      size_t bytes = 0;
      for (const auto& [key, value] : all) {
        bytes += key.size() + value.size();
        world_.values[key] = value;
      }
      return bytes;
    });
    return {};
  }
  Result<int64_t> add(const std::string& key, int64_t amount) override {
    int64_t sum = 0;
    ask([&] {
      sum = world_.counters[key] += amount;
      return key.size();
    });
    return sum;
  }
  Status remove(const std::string& key) override {
    ask([&] {
      world_.values.erase(key);
      world_.counters.erase(key);
      return key.size();
    });
    return {};
  }

  uint64_t questions = 0;

 private:
  template <typename Handle>
  void ask(Handle handle) {
    ask(1, handle);
  }
  template <typename Handle>
  void ask(size_t keys, Handle handle) {
    ++questions;
    world_.ask(leader_, keys, handle);
  }
  World& world_;
  const int leader_;
};

class SimulatedRelay final : public TableRelay {
 public:
  SimulatedRelay(World& world, int leader, bool dies)
      : world_(world), leader_(leader), dies_(dies) {}

  Result<std::string> listen() override {
    return std::to_string(leader_) + std::string(kRelayTextBytes, ' ');
  }
  Result<std::string> fetch(const RelayNode& node, uint64_t, size_t most_bytes, const GiveUpCheck&,
                            const Deadline& limit) override {
    nap(3);  // connected, and the first message has arrived
    world_.callers[std::stoi(node.parent)].insert(leader_);
    while (world_.deliveries.count(leader_) == 0) {
      if (limit.expired()) return Status(Code::kTimeout, "nothing came");
      nap(1);
    }
    World::Delivery delivery = std::move(world_.deliveries[leader_]);
    world_.go_on_at(leader_, std::max(world_.now_ns(leader_), delivery.at_ns));
    if (delivery.table.size() > most_bytes) return Status(Code::kInternal, "too long");
    return std::move(delivery.table);
  }
  void pass_on(const RelayNode& node, uint64_t, const std::string& table, const GiveUpCheck&,
               const Deadline& limit) override {
    const size_t children = node.children.size();
    if (dies_) return;
    int64_t free_ns = world_.now_ns(leader_);
    size_t served = 0;
    for (; served < children && !limit.expired(); nap(1)) {
      for (int child : std::exchange(world_.callers[leader_], {})) {
        free_ns =
            std::max(free_ns, world_.now_ns(leader_)) +
            static_cast<int64_t>(static_cast<double>(table.size()) * world_.costs().ns_per_byte);
        world_.deliveries[child] = {free_ns + world_.costs().hop_ns, table};
        ++served;
      }
    }
    world_.most_passed_on = std::max(world_.most_passed_on, uint64_t{table.size()} * served);
    world_.go_on_at(leader_, std::max(free_ns, world_.now_ns(leader_)));
  }
  void close() override {}

 private:
  void nap(int hops) {
    const int64_t hop_ns = std::max(world_.costs().hop_ns, kLeastNapNs);
    world_.go_on_at(leader_, world_.now_ns(leader_) + hops * hop_ns);
  }
  World& world_;
  const int leader_;
  const bool dies_;
};

struct Leader {
  int64_t began_ns = 0, over_ns = 0;
  uint64_t questions = 0;
  Status status;
};

// The steps of a leader in a formation; see core/formation/formation.cc.
Status form(Store& store, TableRelay* relay, int leader, int hosts, int local, bool dies) {
  const Deadline deadline = Deadline::after(kTimeout);
  deadline.expired();
  ModexRequest request;
  request.prefix = "dscomm/";
  request.rank = leader;
  request.size = hosts;
  request.began_ns = 0;
  for (int rank = 0; rank < hosts; ++rank) request.entry_owners.push_back(rank);
  if (hosts >= Settings().relay_hosts) request.relay = relay;
  Modex meeting(store, request, deadline);
  MemberEntry entry;
  entry.common.assign(kCommonBytes, static_cast<char>(leader));
  entry.own.assign(kOwnBytes * static_cast<size_t>(local), 'x');
  Result<Modex::Table> table = meeting.gather(entry);
  if (!table.ok()) return table.status();
  DSCOMM_RETURN_IF_ERROR(meeting.remove_own_entry());
  if (dies) return Status(Code::kAborted, "dead");
  ExchangeRequest exchange_request;
  exchange_request.prefix = meeting.prefix();
  exchange_request.rank = leader;
  exchange_request.size = hosts;
  exchange_request.name = [](int rank) { return "rank " + std::to_string(rank); };
  StoreExchange exchange(store, exchange_request, deadline);
  Result<std::string> verdict =
      exchange.agree("report", "fine",
                     [](const std::vector<std::string>&) { return Result<std::string>("fine"); });
  if (!verdict.ok()) return verdict.status();
  if (leader == 0) meeting.remove_tables();
  exchange.finish();
  return {};
}

int simulate(int hosts, int local, Costs costs, int dead) {
  World world(hosts, costs);
  std::mt19937 random(11);
  std::vector<Leader> leaders(static_cast<size_t>(hosts));
  std::set<int> dies;
  while (dies.size() < static_cast<size_t>(dead))
    dies.insert(std::uniform_int_distribution<int>(1, hosts - 1)(random));
  for (Leader& leader : leaders)
    leader.began_ns = std::uniform_int_distribution<int64_t>(0, kStartsNs)(random);
  leaders.back().began_ns = kStartsNs;  // all wait for the last
  std::vector<std::thread> threads;
  for (int k = 0; k < hosts; ++k)
    threads.emplace_back([&, k] {
      Leader& leader = leaders[static_cast<size_t>(k)];
      this_world = &world;
      this_leader = k;
      world.go_on_at(k, leader.began_ns);
      SimulatedStore store(world, k);
      SimulatedRelay relay(world, k, dies.count(k) > 0);
      leader.status = form(store, &relay, k, hosts, local, dies.count(k) > 0);
      leader.questions = store.questions;
      leader.over_ns = world.now_ns(k);
      this_world = nullptr;
      world.end(k);
    });
  for (std::thread& thread : threads) thread.join();

  int64_t over_ns = 0;
  uint64_t most = 0;
  std::map<std::string, int> outcomes;
  for (int k = 0; k < hosts; ++k) {
    const Leader& leader = leaders[static_cast<size_t>(k)];
    if (dies.count(k) > 0) continue;
    over_ns = std::max(over_ns, leader.over_ns);
    if (k != 0) most = std::max(most, leader.questions);
    ++outcomes[leader.status.ok() ? "formed" : leader.status.message()];
  }
  std::printf(
      "%5d hosts x %d ranks: over %8.1f ms after the last began; %5.1f questions a leader, %llu "
      "at most, %llu of rank 0; %.1f MB through the store, %.1f MB passed on by a leader at most; "
      "%zu keys left\n",
      hosts, local, static_cast<double>(over_ns - kStartsNs) / 1e6,
      static_cast<double>(world.questions) / hosts, static_cast<unsigned long long>(most),
      static_cast<unsigned long long>(leaders[0].questions),
      static_cast<double>(world.bytes_sent) / 1e6, static_cast<double>(world.most_passed_on) / 1e6,
      world.values.size() + world.counters.size());
  for (const auto& [outcome, count] : outcomes)
    if (outcome != "formed") std::printf("      %d: %.200s\n", count, outcome.c_str());
  return outcomes.count("formed") == (dead == 0 ? 1u : 0u) && outcomes.size() <= 2 ? 0 : 1;
}

}  // namespace
}  // namespace dscomm

// A leader's thread sees the world's time, which passes while the code under test waits.
extern "C" int clock_gettime(clockid_t, timespec* time) noexcept {
  using namespace dscomm;
  int64_t ns = 1;
  if (this_world != nullptr) ns += this_world->now_ns(this_leader);
  time->tv_sec = ns / 1'000'000'000;
  time->tv_nsec = ns % 1'000'000'000;
  return 0;
}
extern "C" int nanosleep(const timespec* time, timespec*) {
  using namespace dscomm;
  if (this_world == nullptr) return 0;
  this_world->go_on_at(this_leader, this_world->now_ns(this_leader) +
                                        int64_t{time->tv_sec} * 1'000'000'000 + time->tv_nsec);
  return 0;
}
extern "C" int clock_nanosleep(clockid_t, int, const timespec* time, timespec* left) {
  return nanosleep(time, left);
}

int main(int count, char** arguments) {
  const auto argument = [&](int k, double otherwise) {
    return k < count ? std::atof(arguments[k]) : otherwise;
  };
  const int hosts = static_cast<int>(argument(1, 0)), local = static_cast<int>(argument(2, 0));
  const int dead = static_cast<int>(argument(6, 0));
  if (hosts < 2 || local < 1 || dead >= hosts) {
    std::fputs("usage: simulated_formation HOSTS LOCAL [HOP_US] [HANDLE_US] [GBIT] [DEAD]\n",
               stderr);
    return 2;
  }
  dscomm::Costs costs;
  costs.hop_ns = static_cast<int64_t>(argument(3, 50) * 1000);
  costs.handle_ns = static_cast<int64_t>(argument(4, 10) * 1000);
  costs.ns_per_byte = 8 / argument(5, 10);
  return dscomm::simulate(hosts, local, costs, dead);
}
