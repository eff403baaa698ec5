// Transports are loaded by name: the module libdscomm_sockets.so, of which the core knows nothing,
// carries Teams and groups. Hosts are loopback addresses of this machine.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/transport/load.h"
#include "in_process_host.h"
#include "processes.h"
#include "team_reference.h"

namespace dscomm::test {
namespace {

using std::chrono::milliseconds;
using testing::check_disagreements;
using testing::check_every_collective;
using testing::check_same_bits;
using testing::RankBody;
using testing::RunRanks;

constexpr milliseconds kLimit{60'000};

CallOptions within(milliseconds timeout) { return {Deadline::after(timeout)}; }

// Hosts cannot have the same addresses.
void give_addresses(TransportRequest* request) {
  for (TransportMember& member : request->members)
    member.networks = {"127.0.3." + std::to_string(member.host + 1) + "/8"};
}

// Each rank is on its own host.
TransportRequest request_of_host(int rank, int size, const std::string& transport = "sockets") {
  TransportRequest request;
  request.id = 0xfeedabcd;
  request.name = "world";
  request.rank = rank;
  request.prefix = "test/";
  request.settings.mpi = transport;
  for (int k = 0; k < size; ++k) {
    TransportMember& member = request.members.emplace_back();
    member.host = k;
    member.global_rank = 100 + k;
    member.host_name = "host" + std::to_string(k);
  }
  give_addresses(&request);
  return request;
}

// The dtype makes no difference to a transport, except for its width and for rounding.
testing::ReferenceOptions few_dtypes() {
  testing::ReferenceOptions options;
  options.dtypes = {DType::kFloat32, DType::kBFloat16};
  options.counts = {0, 1, 1000};
  return options;
}

std::unique_ptr<Team> team_of_all(Transport& transport, int size, uint64_t id) {
  TransportTeam team;
  for (int rank = 0; rank < size; ++rank) team.ranks.push_back(rank);
  team.group = team.ranks;
  team.id = id;
  team.name = "world";
  Result<std::unique_ptr<Team>> made = transport.make_team(team, Deadline::after(kLimit));
  EXPECT_TRUE(made.ok()) << made.status().message();
  return std::move(made).value();
}

std::shared_ptr<Transport> sockets_of(int rank, int size, std::shared_ptr<Store> store) {
  Result<std::shared_ptr<Transport>> made =
      load_transport(request_of_host(rank, size), std::move(store), Deadline::after(kLimit));
  EXPECT_TRUE(made.ok()) << made.status().message();
  return made.ok() ? made.value() : nullptr;
}

// Ranks are threads, each with a transport that serves all Teams of a test.
class SocketRanks {
 public:
  explicit SocketRanks(int size) : transports_(static_cast<size_t>(size)) {
    run_ranks(size, [&](int rank) {
      transports_[static_cast<size_t>(rank)] = sockets_of(rank, size, store_);
    });
  }
  ~SocketRanks() {
    run_ranks(static_cast<int>(transports_.size()),
              [&](int rank) { transports_[static_cast<size_t>(rank)]->leave(false); });
  }
  RunRanks with_new_teams() {
    return [this](const RankBody& body) {
      const uint64_t id = ++teams_;
      const int size = static_cast<int>(transports_.size());
      run_ranks(size, [&](int rank) {
        body(*team_of_all(*transports_[static_cast<size_t>(rank)], size, id));
      });
    };
  }

 private:
  std::shared_ptr<MemoryStore> store_ = std::make_shared<MemoryStore>();
  std::vector<std::shared_ptr<Transport>> transports_;
  uint64_t teams_ = 0;
};

// Ranks 0 and 2 are on one host, 1 and 3 on another. Runs bodies in new groups of all.
class TwoHosts {
 public:
  TwoHosts() {
    Settings settings = small_settings();
    settings.mpi = "sockets";
    settings.wire_halves = "float32";  // the reference rounds once
    const TransportFactory factory = [](TransportRequest request, std::shared_ptr<Store> store,
                                        const Deadline& deadline) {
      give_addresses(&request);
      return load_transport(request, std::move(store), deadline);
    };
    for (int rank = 0; rank < kRanks; ++rank)
      processes_.push_back(
          processes_of_all_.try_process(settings, factory, rank % 2 == 0 ? "even" : "odd").value());
  }
  RunRanks in_new_groups() {
    return [this](const RankBody& body) {
      const auto groups = processes_of_all_.groups(processes_, "g" + std::to_string(++groups_));
      EXPECT_NE(groups[0]->describe().find("sockets, 2 ranks"), std::string::npos)
          << groups[0]->describe();
      run_ranks(kRanks, [&](int rank) {
        const auto run = [&](Team& team, const CallOptions&) {
          body(team);
          return Status();
        };
        EXPECT_TRUE(groups[static_cast<size_t>(rank)]->run({}, run, kLimit).ok());
      });
    };
  }
  static constexpr int kRanks = 4;

 private:
  InProcessHost processes_of_all_;
  std::vector<std::shared_ptr<Context>> processes_;
  int groups_ = 0;
};

TEST(LoadTransport, ErrorOfUnavailableTransportSaysWhatToInstall) {
  const std::filesystem::path base =
      std::filesystem::read_symlink("/proc/self/exe").replace_filename("libdscomm_absent");
  const auto file = [&](const char* suffix) { return base.string() + suffix; };
  std::ofstream(file(".txt")) << "title: The Absent\nto_build: its headers\nto_run: its library\n";
  const auto reason = [] {
    const auto store = std::make_shared<MemoryStore>();
    const auto made =
        load_transport(request_of_host(0, 1, "absent"), store, Deadline::after(kLimit));
    EXPECT_EQ(made.status().code(), Code::kUnsupported);
    return made.status().message();
  };
  EXPECT_NE(reason().find("rank 100 (pid 0 on host host0): the group spans hosts, which needs The "
                          "Absent, and this dscomm was built without it: install its headers"),
            std::string::npos)
      << reason();
  std::ofstream(file(".so")) << "not a library";
  EXPECT_NE(reason().find("needs The Absent, and it cannot be loaded ("), std::string::npos);
  EXPECT_NE(reason().find("): install it (its library)"), std::string::npos) << reason();
  std::filesystem::remove(file(".so"));
  std::filesystem::remove(file(".txt"));
}

TEST(Sockets, EveryCollectiveMatchesReference) {
  SocketRanks ranks(3);
  check_every_collective(3, ranks.with_new_teams(), few_dtypes());
  check_same_bits(3, ranks.with_new_teams());
}

// More than the connections' buffers hold, so that all ranks send and receive at the same time.
TEST(Sockets, LongCollectivesMatchReference) {
  SocketRanks ranks(3);
  testing::ReferenceOptions options;
  options.dtypes = {DType::kFloat32};
  options.counts = {1'000'000};
  ranks.with_new_teams()([&](Team& team) {
    testing::ReferenceRank rank(team, options);
    rank.check_all_reduce({DType::kFloat32, ReduceOp::kSum}, 3'000'000, true);
  });
}

TEST(Sockets, MismatchedCallsFailOnAllRanks) {
  SocketRanks ranks(3);
  check_disagreements(3, ranks.with_new_teams());
}

TEST(Sockets, TimeoutNamesTheMissingRank) {
  SocketRanks ranks(3);
  std::atomic<int> finished = 0;
  ranks.with_new_teams()([&](Team& team) {
    if (team.rank() != 1) {
      const Status status = team.barrier(within(milliseconds(300)));
      EXPECT_EQ(status.code(), Code::kTimeout) << status.message();
      EXPECT_NE(status.message().find("waiting for rank 101 (pid 0 on host host1) (first seen by"),
                std::string::npos)
          << status.message();
      EXPECT_EQ(team.barrier(within(kLimit)).message(), status.message());
    }
    ++finished;
    while (finished < 3) std::this_thread::sleep_for(milliseconds(1));
  });
}

TEST(Sockets, AbortReachesAllRanks) {
  SocketRanks ranks(3);
  ranks.with_new_teams()([&](Team& team) {
    if (team.rank() == 2) team.abort(Status(Code::kAborted, "the test aborts"));
    EXPECT_EQ(team.barrier(within(kLimit)).code(), Code::kAborted);
  });
}

TEST(Sockets, DeathOfRankFailsBarrierOnAllOtherRanks) {
  Processes processes;
  processes.start(3, [](Store& store, int rank) {
    const auto transport = sockets_of(rank, 3, std::shared_ptr<Store>(&store, [](Store*) {}));
    const std::unique_ptr<Team> team = team_of_all(*transport, 3, 1);
    EXPECT_TRUE(team->barrier(within(kLimit)).ok());
    EXPECT_TRUE(store.set("ready" + std::to_string(rank), "").ok());
    if (rank == 1) pause();
    const Status status = team->barrier(within(kLimit));
    EXPECT_EQ(status.code(), Code::kPeerDied) << status.message();
    EXPECT_NE(status.message().find("rank 101"), std::string::npos) << status.message();
  });
  for (int rank = 0; rank < 3; ++rank) processes.await("ready", rank);
  processes.signal(1, SIGKILL);
  processes.expect_good_end(0);
  processes.expect_good_end(2);
}

TEST(Sockets, GroupOfTwoHostsMatchesReference) {
  TwoHosts hosts;
  check_every_collective(TwoHosts::kRanks, hosts.in_new_groups(), few_dtypes());
}

TEST(Sockets, MismatchedCallsFailOnAllRanksOfTwoHosts) {
  TwoHosts hosts;
  hosts.in_new_groups()([](Team& team) {
    int32_t value = 0;
    const Status status = team.rank() == 1
                              ? team.barrier(within(kLimit))
                              : team.broadcast(&value, 1, DType::kInt32, 0, within(kLimit));
    const Status next = status.ok() ? team.barrier(within(kLimit)) : status;
    EXPECT_EQ(next.code(), Code::kMismatch) << next.message();
  });
}

}  // namespace
}  // namespace dscomm::test
