// ShmTeams for ranks that are threads.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "core/formation/formation.h"
#include "in_process.h"
#include "pooled_team.h"

namespace dscomm::test {

// Small settings that exercise every path: buffers of a page, so that a few kilobytes take many
// rounds.
inline Settings small_settings() {
  Settings settings;
  settings.arena_bytes = 32 << 20;
  settings.pool_bytes = 32 << 20;
  settings.staging_chunk_bytes = 4096;
  settings.staging_bytes = 4 * 4096;
  settings.one_shot_bytes = 2048;
  return settings;
}

// The bytes that a memfd has taken from the kernel.
inline size_t backed_bytes(int fd) {
  struct stat file{};
  EXPECT_EQ(fstat(fd, &file), 0);
  return static_cast<size_t>(file.st_blocks) * 512;
}

// One rank's arena and directory in a world of threads; it forms groups from them.
class RankParty {
 public:
  RankParty(std::shared_ptr<Registry> registry, const Settings& settings) : settings_(settings) {
    directory = std::make_unique<InProcessDirectory>(std::move(registry));
    arena = Arena::create(static_cast<size_t>(settings.arena_bytes)).value();
    pool = TensorPool::create(static_cast<size_t>(settings.pool_bytes)).value();
    address_ = directory->publish(arena, pool, ArenaId{}).value();
  }

  Result<Formation> form(Store& store, int rank, int size, const std::string& name = "test",
                         std::chrono::milliseconds timeout = std::chrono::seconds(60),
                         std::vector<int> global_ranks = {}) {
    FormingProcess party{arena,      pool,        directory.get(), &address_,
                         &settings_, &topology(), host_identity,   networks};
    if (default_relays) {
      settings_.relay_hosts = 2;
      party.networks = {"127.0.2." + std::to_string(rank / per_host + 1) + "/8"};
    }
    FormationRequest request;
    request.prefix = name + "/";
    request.name = name;
    request.rank = rank;
    request.size = size;
    request.global_ranks = std::move(global_ranks);
    request.began_ns = began_ns;
    request.gone = gone;
    request.local = local_ranks(rank, size, name);
    return form_group(party, store, request, Deadline::after(timeout));
  }
  std::unique_ptr<ShmTeam> team(Store& store, int rank, int size,
                                const std::string& name = "test") {
    Result<Formation> formation = form(store, rank, size, name);
    EXPECT_TRUE(formation.ok()) << formation.status().message();
    Formation& f = formation.value();
    return std::make_unique<ShmTeam>(arena, f.group_id, name, rank, f.members, f.wait_policy,
                                     f.tuning, InPlace{pool, least_in_place});
  }

  std::shared_ptr<Arena> arena;
  std::shared_ptr<TensorPool> pool;
  int64_t least_in_place = 0;
  std::string host_identity;
  std::vector<std::string> networks;      // "address/prefix"
  int64_t began_ns = process_began_ns();  // see ModexRequest
  GiveUpCheck gone = [] { return Status(); };
  int per_host = default_per_host;  // ranks that believe to share a host; 1: none
  static inline int default_per_host = 1;
  // Groups of several hosts relay the member table along a tree.
  static inline bool default_relays = false;
  std::string host_of_local;  // identifies the host in which they meet
  std::unique_ptr<InProcessDirectory> directory;

 private:
  // Loaded once: it reads hundreds of files.
  static const Topology& topology() {
    static const std::unique_ptr<Topology> of_this_host = std::move(Topology::load("")).value();
    return *of_this_host;
  }

  LocalRanks local_ranks(int rank, int size, const std::string& name) const {
    LocalRanks local;
    if (per_host == 1) return local;
    const ::testing::TestInfo& test = *::testing::UnitTest::GetInstance()->current_test_info();
    local.group = std::to_string(getpid()) + test.test_suite_name() + test.name() + name +
                  std::to_string(rank / per_host) + host_of_local;
    const int first = rank / per_host * per_host;
    for (int k = first; k < std::min(first + per_host, size); ++k) local.ranks.push_back(k);
    for (int k = 0; k < size; k += per_host) local.leaders.push_back(k);
    return local;
  }

  Settings settings_;
  PeerAddress address_;
};

// Runs body(team) on every rank of a new group of threads. A random pooled_share of each rank's
// calls use tensors of its pool, which peers read in place whatever their size.
inline void run_shm_ranks(int ranks, const std::function<void(Team&)>& body,
                          const Settings& settings = small_settings(), double pooled_share = 0) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  run_ranks(ranks, [&](int rank) {
    RankParty party(registry, settings);
    std::unique_ptr<Team> team = party.team(store, rank, ranks);
    if (pooled_share > 0)
      team = std::make_unique<PooledTeam>(std::move(team), party.pool, pooled_share);
    body(*team);
    // No rank leaves before all have finished their checks of each other.
    EXPECT_TRUE(!team->failure().ok() ||
                team->barrier({Deadline::after(std::chrono::seconds(60))}).ok());
  });
}

}  // namespace dscomm::test
