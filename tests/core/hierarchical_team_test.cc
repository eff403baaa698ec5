#include "core/team/hierarchical_team.h"

#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "core/base/log.h"
#include "team_reference.h"
#include "thread_team.h"

namespace dscomm::testing {
namespace {

using Domains = std::vector<std::vector<int>>;

struct Placement {
  const char* name;
  Domains domains;
};

int rank_count(const Domains& domains) {
  int count = 0;
  for (const std::vector<int>& domain : domains) count += static_cast<int>(domain.size());
  return count;
}

CallOptions within_ms(int64_t timeout_ms) {
  return {Deadline::after(std::chrono::milliseconds(timeout_ms))};
}

// Ranks are threads, and the sub-teams are ThreadTeams.
std::unique_ptr<HierarchicalTeam> make_over_threads(ThreadBoards& boards, int rank,
                                                    const Domains& domains,
                                                    HierarchyOptions options) {
  TeamFactory factory = [&boards, rank](std::span<const int> ranks, const std::string& name) {
    EXPECT_GE(ranks.size(), 2u) << name;
    return Result<std::unique_ptr<Team>>(boards.make(rank, ranks, name));
  };
  options.name = "test";
  auto team = HierarchicalTeam::make(rank, domains, factory, factory, std::move(options));
  EXPECT_TRUE(team.ok()) << team.status().message();
  return std::move(team).value();
}

RunRanks over_threads(const Domains& domains, HierarchyOptions options, bool take_chunks = false) {
  return [domains, options, take_chunks](const RankBody& body) {
    ThreadBoards boards(take_chunks);
    std::vector<std::thread> running;
    for (int rank = 0; rank < rank_count(domains); ++rank) {
      running.emplace_back([&, rank] { body(*make_over_threads(boards, rank, domains, options)); });
    }
    for (std::thread& thread : running) thread.join();
  };
}

RunRanks over_threads(const Domains& domains, size_t staging_bytes = size_t{1} << 20) {
  return over_threads(domains, HierarchyOptions{.name = {}, .staging_bytes = staging_bytes});
}

class Placements : public ::testing::TestWithParam<Placement> {};

std::vector<Placement> placements() {
  std::vector<Placement> chosen = {
      {"interleaved", {{0, 2}, {1, 3}}},
      {"one_and_three", {{0}, {1, 2, 3}}},
      {"two_three_one_interleaved", {{0, 4}, {1, 3, 5}, {2}}},
      {"one_each", {{0}, {1}, {2}}},
      {"one_domain", {{0, 1, 2}}},
  };
  const std::vector<Placement> others = {
      {"two_and_two", {{0, 1}, {2, 3}}},
      {"three_and_one", {{0, 1, 2}, {3}}},
      {"two_and_five", {{0, 1}, {2, 3, 4, 5, 6}}},
      {"two_two_five", {{0, 5}, {1, 8}, {2, 3, 4, 6, 7}}},
  };
  if (!matrix_is_reduced()) chosen.insert(chosen.end(), others.begin(), others.end());
  return chosen;
}

INSTANTIATE_TEST_SUITE_P(HierarchicalTeam, Placements, ::testing::ValuesIn(placements()),
                         [](const ::testing::TestParamInfo<Placement>& placement) {
                           return placement.param.name;
                         });

TEST_P(Placements, EveryCollectiveInOneChunk) {
  ReferenceOptions options;
  options.counts = {0, 1, 4, 1000};
  check_every_collective(rank_count(GetParam().domains), over_threads(GetParam().domains), options);
}

// 200 bytes: no count fits or divides evenly, and chunks of slices end inside cache lines.
TEST_P(Placements, EveryCollectiveInSmallChunks) {
  ReferenceOptions options;
  options.dtypes = {DType::kFloat32, DType::kBFloat16, DType::kInt64, DType::kFloat8E5M2};
  options.counts = {0, 1, 4, 333};
  check_every_collective(rank_count(GetParam().domains), over_threads(GetParam().domains, 200),
                         options);
}

// Less than one element: chunks of one element.
TEST_P(Placements, EveryCollectiveInChunksOfOneElement) {
  ReferenceOptions options;
  options.dtypes = {DType::kFloat16, DType::kInt64};
  options.counts = {0, 5};
  check_every_collective(rank_count(GetParam().domains), over_threads(GetParam().domains, 1),
                         options);
}

// If the Teams take chunks, a slice or block of more than 400 bytes is one call across domains.
TEST_P(Placements, EveryCollectiveWithOverlap) {
  const int ranks = rank_count(GetParam().domains);
  HierarchyOptions small{.name = {}, .staging_bytes = 800};
  ReferenceOptions options;
  options.dtypes = {DType::kFloat32, DType::kInt64, DType::kBFloat16};  // the last is widened
  options.counts = {60, 401, 1500};  // with 401, slices differ in the number of chunks
  check_every_collective(ranks, over_threads(GetParam().domains, small, true), options);
  check_same_bits(ranks, over_threads(GetParam().domains, small, true));
  check_disagreements(ranks, over_threads(GetParam().domains, small, true));
  small.halves_as_float32 = false;  // bfloat16 is not widened then, so it overlaps too
  check_same_bits(ranks, over_threads(GetParam().domains, small, true));
}

TEST_P(Placements, ResultsAreBitIdenticalOnAllRanks) {
  check_same_bits(rank_count(GetParam().domains), over_threads(GetParam().domains));
}

TEST_P(Placements, MismatchedCallsFailOnAllRanks) {
  for (size_t staging_bytes : {size_t{64}, size_t{1} << 20})
    check_disagreements(rank_count(GetParam().domains),
                        over_threads(GetParam().domains, staging_bytes));
}

// The order is by domain, then by rank; with these values another order gives other bits.
TEST(HierarchicalTeam, SumIsTakenInOrderOfDomainThenRank) {
  const float values[4] = {1e8f, 1.0f, -1e8f, 1.0f};
  auto sum_over = [&](const Domains& domains) {
    std::atomic<float> result = 0;
    over_threads(domains)([&](Team& team) {
      float value = values[team.rank()];
      Status status =
          team.all_reduce(&value, &value, 1, {DType::kFloat32, ReduceOp::kSum}, within_ms(60000));
      ASSERT_TRUE(status.ok()) << status.message();
      result = value;
    });
    return result.load();
  };
  EXPECT_EQ(sum_over({{0, 1}, {2, 3}}), 0.0f);  // (1e8 + 1) + (-1e8 + 1)
  EXPECT_EQ(sum_over({{0, 2}, {1, 3}}), 2.0f);  // (1e8 - 1e8) + (1 + 1)
}

// bfloat16 cannot hold 257: if the first domain rounds, the sum of 256 and 1 is 256 again.
TEST(HierarchicalTeam, SumOfBFloat16SentAsFloat32IsRoundedOnce) {
  const uint16_t values[4] = {0x4380, 0x3f80, 0x3f80, 0x0000};  // 256, 1, 1, 0
  auto reduced = [&](ReduceOp op, bool halves_as_float32) {
    HierarchyOptions options;
    options.halves_as_float32 = halves_as_float32;
    std::atomic<int> result = 0;
    over_threads({{0, 1}, {2, 3}}, options)([&](Team& team) {
      const Reduction reduction{DType::kBFloat16, op, 0.5};
      const uint16_t mine[4] = {values[team.rank()], values[team.rank()], values[team.rank()],
                                values[team.rank()]};
      uint16_t all[4] = {}, at_root[4] = {}, share = 0;
      ASSERT_TRUE(team.all_reduce(mine, all, 4, reduction, within_ms(60000)).ok());
      ASSERT_TRUE(team.reduce(mine, at_root, 4, reduction, 0, within_ms(60000)).ok());
      const void* ins[4] = {&mine[0], &mine[1], &mine[2], &mine[3]};
      const size_t counts[4] = {1, 1, 1, 1};
      ASSERT_TRUE(team.reduce_scatter(ins, counts, &share, reduction, within_ms(60000)).ok());
      for (uint16_t value : all) EXPECT_EQ(value, share);
      if (team.rank() == 0)
        for (uint16_t value : at_root) EXPECT_EQ(value, share);
      result = share;
    });
    return result.load();
  };
  EXPECT_EQ(reduced(ReduceOp::kSum, true), 0x4381);   // 258
  EXPECT_EQ(reduced(ReduceOp::kSum, false), 0x4380);  // 256: 256 and 1
  for (bool halves_as_float32 : {true, false}) {
    EXPECT_EQ(reduced(ReduceOp::kAvg, halves_as_float32), 0x4281);        // 64.5
    EXPECT_EQ(reduced(ReduceOp::kPremulSum, halves_as_float32), 0x4301);  // 129
  }
}

TEST(HierarchicalTeam, BlockExchangesCheckInnerTeamWhileWaiting) {
  ThreadBoards boards(true);
  std::vector<std::thread> running;
  for (int rank = 0; rank < 4; ++rank)
    running.emplace_back([&, rank] {
      const std::unique_ptr<HierarchicalTeam> team =
          make_over_threads(boards, rank, {{0, 1}, {2, 3}}, {});
      const ReferenceOptions options;
      ReferenceRank reference(*team, options);
      const std::vector<size_t> counts(4, 3);
      try {
        reference.check_gather(DType::kInt32, counts, 1, false);
        reference.check_scatter(DType::kInt32, counts, 2, false);
        reference.check_all_to_all(DType::kInt32, [](int, int) { return size_t{3}; });
      } catch (const RankStopped&) {
      }
    });
  for (std::thread& thread : running) thread.join();
  EXPECT_EQ(boards.meanwhile_calls(), 4 * 3);
}

TEST(HierarchicalTeam, DescribesItself) {
  over_threads({{0, 2}, {1, 3, 4}})([](Team& team) {
    std::string expected = "hierarchical, 5 ranks in domains of 2+3: inside (threads, ";
    EXPECT_EQ(team.describe().substr(0, expected.size()), expected);
    EXPECT_EQ(team.size(), 5);
  });
}

// Calls of more than 400 bytes of each slice or block are overlapped.
TEST(HierarchicalTeam, DebugLogNamesTheAlgorithmOfEachCollective) {
  const auto log_of_calls = [](size_t count) {
    ::testing::internal::CaptureStderr();
    set_log_level("debug");
    HierarchyOptions small{.name = {}, .staging_bytes = 800};
    ReferenceOptions options;
    options.dtypes = {DType::kInt64};
    options.counts = {count};
    check_every_collective(4, over_threads({{0, 1}, {2, 3}}, small, true), options);
    set_log_level("warn");
    return ::testing::internal::GetCapturedStderr();
  };
  const std::string of_short = log_of_calls(1), of_long = log_of_calls(1500);
  const auto has_first = [](const std::string& log, const char* kind, const char* algorithm) {
    return log.find("(hierarchical, 4 ranks): first " + std::string(kind) + " " + algorithm +
                    ": ") != std::string::npos;
  };
  for (const char* kind : {"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"}) {
    EXPECT_TRUE(has_first(of_short, kind, "in steps")) << kind << "\n" << of_short;
    EXPECT_FALSE(has_first(of_short, kind, "overlapped")) << kind << "\n" << of_short;
    EXPECT_TRUE(has_first(of_long, kind, "overlapped")) << kind << "\n" << of_long;
  }
  for (const char* kind : {"gather", "scatter", "all_to_all"})
    EXPECT_TRUE(has_first(of_short, kind, "in blocks")) << kind << "\n" << of_short;
  EXPECT_TRUE(has_first(of_short, "barrier", "in steps")) << of_short;
}

// Every rank leads the slices that the header file documents, and makes its Teams in one order.
TEST(HierarchicalTeam, TeamsAreCreatedInDocumentedOrder) {
  const Domains domains = {{0, 1}, {2, 3, 4, 5, 6}};
  ThreadBoards boards;
  std::vector<std::string> made;
  TeamFactory factory = [&](std::span<const int> ranks, const std::string& name) {
    std::string line = name + ":";
    for (int rank : ranks) line += " " + std::to_string(rank);
    made.push_back(line);
    return Result<std::unique_ptr<Team>>(boards.make(1, ranks, name));
  };
  ASSERT_TRUE(HierarchicalTeam::make(1, domains, factory, factory, {"g"}).ok());
  EXPECT_EQ(made, (std::vector<std::string>{"g/domain0: 0 1", "g/slice1: 1 3", "g/slice3: 1 5",
                                            "g/direct: 0 1 2 3 4 5 6"}));
}

TEST(HierarchicalTeam, InvalidDomainsAreRefused) {
  TeamFactory never = [](std::span<const int>, const std::string&) {
    ADD_FAILURE() << "no Team can be made of these domains";
    return Result<std::unique_ptr<Team>>(make_status(Code::kInternal, "unreachable"));
  };
  for (const Domains& domains : {Domains{{0, 1}, {1, 2}}, Domains{{0, 1}, {3}}, Domains{{0, -1}},
                                 Domains{{0}, {}}, Domains{}}) {
    auto team = HierarchicalTeam::make(0, domains, never, never, {"g"});
    ASSERT_FALSE(team.ok());
    EXPECT_EQ(team.status().code(), Code::kInvalidArgument);
  }
  EXPECT_EQ(HierarchicalTeam::make(4, {{0, 1}, {2, 3}}, never, never, {"g"}).status().code(),
            Code::kInvalidArgument);
}

TEST(HierarchicalTeam, FactoryFailureAbortsTeamsAlreadyMade) {
  ThreadBoards boards;
  TeamFactory inner = [&](std::span<const int> ranks, const std::string& name) {
    return Result<std::unique_ptr<Team>>(boards.make(0, ranks, name));
  };
  TeamFactory outer = [](std::span<const int>, const std::string&) {
    return Result<std::unique_ptr<Team>>(make_status(Code::kResource, "no wire"));
  };
  auto team = HierarchicalTeam::make(0, {{0, 1}, {2, 3}}, inner, outer, {"g"});
  ASSERT_FALSE(team.ok());
  EXPECT_EQ(team.status().message(), "no wire");
  // The other rank of the domain, whose Team was made, gets the error.
  const int pair[2] = {0, 1};
  EXPECT_EQ(boards.make(1, pair, "g/domain0")->failure().message(), "no wire");
}

TEST(HierarchicalTeam, InvalidArgumentsFailWithoutEndingTheTeam) {
  over_threads({{0, 1}, {2}})([](Team& team) {
    float value = 1;
    std::vector<void*> outs(3, &value), few_outs(2, &value);
    std::vector<const void*> ins(3, &value), no_ins;
    std::vector<size_t> counts(3, 1), few_counts(2, 1), none;
    std::vector<size_t> others(3, 2);
    const DType dtype = DType::kFloat32;
    CallOptions options = within_ms(60000);
    for (const Status& status : {
             team.broadcast(&value, 1, dtype, 3, options),
             team.reduce(&value, &value, 1, {dtype}, -1, options),
             team.all_gather(&value, 1, dtype, few_outs, few_counts, options),
             team.all_gather(&value, 1, dtype, outs, others, options),
             team.reduce_scatter(no_ins, none, &value, {dtype}, options),
             team.gather(&value, 1, dtype, few_outs, few_counts, 0, options),
             team.scatter(ins, counts, &value, 1, dtype, 7, options),
             team.all_to_all(ins, counts, outs, others, dtype, options),
         })
      EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.message();
    EXPECT_EQ(team.all_reduce(&value, &value, 1, {DType::kInt32, ReduceOp::kAvg}, options).code(),
              Code::kUnsupported);
    EXPECT_TRUE(team.failure().ok());
    EXPECT_TRUE(team.barrier(options).ok());
  });
}

// Every rank fails by the deadline, whichever Team it waits in.
TEST_P(Placements, CallWithMissingRankTimesOutOnOtherRanks) {
  const int ranks = rank_count(GetParam().domains);
  for (int missing : {0, ranks - 1}) {
    over_threads(GetParam().domains)([missing](Team& team) {
      if (team.rank() == missing) return;
      std::vector<float> data(100);
      Status status =
          team.all_reduce(data.data(), data.data(), data.size(), {DType::kFloat32}, within_ms(100));
      EXPECT_EQ(status.code(), Code::kTimeout) << status.message();
      EXPECT_EQ(team.failure().message(), status.message());
      Status later = team.barrier(within_ms(60000));
      EXPECT_EQ(later.message(), status.message()) << "the first cause must be kept";
    });
  }
}

// An abort on any rank, from another thread, ends the waits of all ranks in all Teams.
TEST_P(Placements, AbortEndsWaitsOfAllRanks) {
  const int ranks = rank_count(GetParam().domains);
  for (int aborting = 0; aborting < ranks; ++aborting) {
    over_threads(GetParam().domains)([aborting](Team& team) {
      if (team.rank() == aborting) {
        std::thread other([&] { team.abort(make_status(Code::kAborted, "enough")); });
        other.join();
        EXPECT_EQ(team.failure().message(), "enough");
        return;
      }
      Status status = team.barrier(within_ms(60000));
      EXPECT_EQ(status.code(), Code::kAborted) << status.message();
      EXPECT_EQ(status.message(), "enough");
    });
  }
}

// A cause found in one rank's sub-team reaches every rank.
TEST(HierarchicalTeam, FirstCauseReachesRanksOfOtherDomains) {
  over_threads({{0, 1, 2}, {3, 4, 5}})([](Team& team) {
    std::vector<float> data(64);
    if (team.rank() == 5) {
      team.abort(make_status(Code::kPeerDied, "rank 5 saw a death"));
      team.abort(make_status(Code::kTimeout, "later"));
    }
    Status status =
        team.all_reduce(data.data(), data.data(), data.size(), {DType::kFloat32}, within_ms(60000));
    EXPECT_EQ(status.code(), Code::kPeerDied) << status.message();
    EXPECT_EQ(status.message(), "rank 5 saw a death");
  });
}

// A hierarchy inside a hierarchy: hosts of NUMA nodes.
TEST(HierarchicalTeam, NestedHierarchyMatchesReference) {
  const Domains hosts = {{0, 1, 2, 3}, {4, 5, 6}};
  RunRanks run_ranks = [&](const RankBody& body) {
    ThreadBoards boards;
    std::vector<std::thread> running;
    for (int rank = 0; rank < 7; ++rank) {
      running.emplace_back([&, rank] {
        TeamFactory flat = [&](std::span<const int> ranks, const std::string& name) {
          return Result<std::unique_ptr<Team>>(boards.make(rank, ranks, name));
        };
        // The ranks of a host, numbered from 0, in two nodes: even and odd ranks.
        TeamFactory host = [&](std::span<const int> ranks,
                               const std::string& name) -> Result<std::unique_ptr<Team>> {
          Domains nodes(2);
          int local = 0;
          for (size_t i = 0; i < ranks.size(); ++i) {
            nodes[i % 2].push_back(static_cast<int>(i));
            if (ranks[i] == rank) local = static_cast<int>(i);
          }
          TeamFactory node = [&](std::span<const int> locals, const std::string& node_name) {
            std::vector<int> global;
            for (int each : locals) global.push_back(ranks[static_cast<size_t>(each)]);
            return Result<std::unique_ptr<Team>>(boards.make(rank, global, node_name));
          };
          auto team = HierarchicalTeam::make(local, nodes, node, node, {name, 300});
          if (!team.ok()) return team.status();
          return std::unique_ptr<Team>(std::move(team).value());
        };
        auto team = HierarchicalTeam::make(rank, hosts, host, flat, {"job", 500});
        ASSERT_TRUE(team.ok()) << team.status().message();
        body(*team.value());
      });
    }
    for (std::thread& thread : running) thread.join();
  };
  ReferenceOptions options;
  options.dtypes = {DType::kFloat32, DType::kBFloat16, DType::kInt64};
  options.counts = {0, 1, 200};
  check_every_collective(7, run_ranks, options);
  check_same_bits(7, run_ranks);
  check_disagreements(7, run_ranks);
}

}  // namespace
}  // namespace dscomm::testing
