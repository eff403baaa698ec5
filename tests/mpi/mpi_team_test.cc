// MpiTeam under mpirun, one process per rank: every collective against a reference, disagreements,
// deaths, timeouts, and composed Teams.

#include "mpi/mpi_team.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <cmath>
#include <limits>
#include <thread>

#include "core/team/hierarchical_team.h"
#include "mpi/mpi_wait.h"
#include "mpi_ranks.h"
#include "team_reference.h"

namespace dscomm::testing {
namespace {

using Domains = std::vector<std::vector<int>>;

CallOptions within_ms(int64_t timeout_ms) {
  return {Deadline::after(std::chrono::milliseconds(timeout_ms))};
}

// Makes a Team on every rank, runs the body, and ends all ranks together.
using MakeTeam = std::function<std::unique_ptr<Team>()>;
RunRanks on_every_rank(MakeTeam make_team) {
  return [make_team](const RankBody& body) {
    Job& job = Job::get();
    job.forget_all();
    std::unique_ptr<Team> team = make_team();
    body(*team);
    job.meet();
  };
}

MakeTeam mpi_team(MpiTeamOptions options = {}) {
  return [options] { return Job::get().make_team(options); };
}

// The checks of team_reference.h, whose ranks are threads, except those that need threads.
void check_collectives(const RunRanks& run_ranks, const ReferenceOptions& options) {
  run_ranks([&](Team& team) {
    ASSERT_EQ(team.rank(), Job::get().rank());
    ReferenceRank rank(team, options);
    try {
      check_reductions(rank, team.size(), options);
      check_moves(rank, team.size(), options);
    } catch (const RankStopped&) {
    }
  });
}

// The reference is exact for halves that are rounded once, so they travel as float32.
MpiTeamOptions exact(size_t chunk_bytes = MpiTeamOptions().chunk_bytes) {
  MpiTeamOptions options;
  options.halves_as_float32 = true;
  options.chunk_bytes = chunk_bytes;
  return options;
}

TEST(MpiTeam, EveryCollective) {
  ReferenceOptions options;
  options.counts = {0, 1, 3, 1000};
  check_collectives(on_every_rank(mpi_team(exact())), options);
}

// Float32 elements that go along a chain of up to four ranks in at most seven pieces.
constexpr size_t kChainOfFewPieces = 62'500;

// Uses the algorithms for many ranks, more than these tests have.
MpiTeamOptions as_among_many() {
  MpiTeamOptions options = exact();
  options.few_ranks = 0;
  return options;
}

TEST(MpiTeam, EveryCollectiveWithAlgorithmsForManyRanks) {
  ReferenceOptions options;
  options.counts = {0, 3, 1000};
  check_collectives(on_every_rank(mpi_team(as_among_many())), options);
}

// Messages of up to 120 bytes, and no minimum: pieces and shares do not divide the data.
MpiTeamOptions by_pairs() {
  MpiTeamOptions options = as_among_many();
  options.message_bytes = 120;
  options.least_pair_bytes = 1;
  return options;
}

TEST(MpiTeam, EveryCollectiveWithPairwiseExchange) {
  ReferenceOptions options;
  options.counts = {1000, 3001};
  check_collectives(on_every_rank(mpi_team(by_pairs())), options);
}

// 256 + 1 + 1 in bfloat16, which lacks 257, is 256 if each sum is rounded.
TEST(MpiTeam, PairwiseExchangeRoundsBFloat16SumOnce) {
  MpiTeamOptions options = by_pairs();
  options.halves_as_float32 = false;
  on_every_rank(mpi_team(options))([](Team& team) {
    constexpr size_t kCount = 3000;
    std::vector<std::byte> data(2 * kCount), expected(2 * kCount);
    for (size_t i = 0; i < kCount; ++i) {
      const int ones = (team.rank() == 1) + (team.rank() == team.size() - 1);
      store_value(DType::kBFloat16, &data[2 * i], team.rank() == 0 ? 256 : ones);
      store_value(DType::kBFloat16, &expected[2 * i], 258);
    }
    Status status = team.all_reduce(data.data(), data.data(), kCount,
                                    {DType::kBFloat16, ReduceOp::kSum}, within_ms(60000));
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(data, expected);
  });
}

// Restarts prepared all-reduces, alternating with other calls and plans, with more plans than are
// kept, and in several Teams.
TEST(MpiTeam, PersistentAllReducesMatchReference) {
  for (int team = 0; team < 3; ++team) {
    on_every_rank(mpi_team(as_among_many()))([](Team& team) {
      const ReferenceOptions options;
      ReferenceRank rank(team, options);
      try {
        for (int turn = 0; turn < 3; ++turn) {
          for (uint64_t plan = 1; plan <= 70; ++plan) {
            const size_t count = 300 + 7 * plan;
            rank.check_all_reduce({DType::kFloat32, ReduceOp::kSum}, count, true, plan);
            if (plan % 10 == 0) {
              rank.check_all_reduce({DType::kBFloat16, ReduceOp::kAvg}, count, false, plan);
              rank.check_all_reduce({DType::kFloat32, ReduceOp::kSum}, count, true);
              rank.check_broadcast(DType::kInt32, count, 0);
            }
          }
          // In one round and in several.
          rank.check_all_reduce({DType::kFloat32, ReduceOp::kMax}, 100'000, true, 7);
          rank.check_all_reduce({DType::kFloat32, ReduceOp::kMax}, 400'000, true, 7);
        }
      } catch (const RankStopped&) {
      }
    });
  }
}

// Otherwise waits could not sleep until data comes.
TEST(MpiTeam, SocketSleepAfterBarrierFindsConnections) {
  on_every_rank(mpi_team())([](Team& team) {
    ASSERT_TRUE(team.barrier(within_ms(60000)).ok());
    SocketSleep sleep(mpi_sockets());
    EXPECT_TRUE(sleep.sleep(1'000'000));
  });
}

// This MPI and Open MPI 5 have them, so the tests above use them.
TEST(MpiTeam, MpiSupportsPersistentAllReduces) { EXPECT_TRUE(PersistentAllReduce::available()); }

TEST(MpiTeam, EveryCollectiveInSmallChunks) {
  ReferenceOptions options;
  options.dtypes = {DType::kFloat32, DType::kBFloat16, DType::kInt64, DType::kComplex128,
                    DType::kFloat8E5M2};
  options.counts = {0, 1, 4, 333};
  check_collectives(on_every_rank(mpi_team(exact(200))), options);
}

// Partners take turns, as with more partners than slots.
TEST(MpiTeam, EveryCollectiveMatchesReferenceWithOneMessageInFlight) {
  MpiTeamOptions one = exact(200);
  one.stream_slots = 1;
  ReferenceOptions options;
  options.dtypes = {DType::kFloat32, DType::kInt64};
  options.counts = {0, 1, 333};
  check_collectives(on_every_rank(mpi_team(one)), options);
}

// Less than one element: rounds of one element.
TEST(MpiTeam, EveryCollectiveInChunksOfOneElement) {
  ReferenceOptions options;
  options.dtypes = {DType::kFloat16, DType::kInt64};
  options.counts = {0, 60};
  check_collectives(on_every_rank(mpi_team(exact(1))), options);
}

// Several chunks of the default size, and Open MPI's algorithms for long messages.
TEST(MpiTeam, CollectivesOfLongDataMatchReference) {
  ReferenceOptions options;
  auto check = [&](Team& team) {
    ReferenceRank rank(team, options);
    const int ranks = team.size();
    try {
      for (bool in_place : {false, true}) {
        rank.check_all_reduce({DType::kFloat32, ReduceOp::kSum}, 2'500'001, in_place);
        rank.check_reduce({DType::kFloat32, ReduceOp::kAvg}, 2'500'001, ranks - 1, in_place);
        for (const std::vector<size_t>& counts : count_layouts(ranks, 1'200'003)) {
          rank.check_reduce_scatter({DType::kInt32, ReduceOp::kMax}, counts, in_place);
          rank.check_all_gather(DType::kFloat32, counts, in_place);
          rank.check_gather(DType::kFloat32, counts, 0, in_place);
          rank.check_scatter(DType::kFloat32, counts, ranks - 1, in_place);
        }
      }
      rank.check_broadcast(DType::kFloat64, 1'500'001, ranks - 1);
      rank.check_all_to_all(DType::kInt16, [](int source, int destination) {
        return static_cast<size_t>(1'000'000 * source + 500'000 * destination + 1);
      });
    } catch (const RankStopped&) {
    }
  };
  on_every_rank(mpi_team(exact()))(check);
  on_every_rank(mpi_team(as_among_many()))(check);
}

// Data that just fits into a CallHeader, and data that just does not.
TEST(MpiTeam, DataAtThePiggybackLimitIsCorrect) {
  for (bool few : {true, false}) {
    on_every_rank(mpi_team(few ? exact() : as_among_many()))([&](Team& team) {
      ReferenceOptions options;
      ReferenceRank rank(team, options);
      const auto ranks = static_cast<size_t>(team.size());
      const size_t room = few ? kPiggybackBytesOfFew / (ranks - 1) : kPiggybackBytes;
      try {
        for (size_t bytes : {room - 1, room, room + 1}) {
          for (bool in_place : {true, false}) {
            rank.check_all_reduce({DType::kInt8, ReduceOp::kSum}, bytes, in_place);
            rank.check_reduce({DType::kUInt8, ReduceOp::kMax}, bytes, 1, in_place);
            rank.check_broadcast(DType::kBool, bytes, team.size() - 1);
            std::vector<size_t> counts(ranks, 2);
            counts[0] = few ? bytes : bytes - 2 * (ranks - 1);
            rank.check_all_gather(DType::kInt8, counts, in_place);
            counts[0] = bytes - 2 * (ranks - 1);
            rank.check_reduce_scatter({DType::kBool, ReduceOp::kBxor}, counts, in_place);
          }
        }
        // Messages, or shares, that just fit a message to each rank, and that do not.
        const size_t message = MpiTeamOptions().message_bytes;
        for (size_t bytes : {message - 1, message, message + 1}) {
          std::vector<size_t> counts(ranks, 2);
          counts[1] = bytes;
          for (bool in_place : {true, false}) {
            rank.check_all_gather(DType::kInt8, counts, in_place);
            rank.check_reduce_scatter({DType::kUInt8, ReduceOp::kMax}, counts, in_place);
            rank.check_gather(DType::kInt8, counts, 0, in_place);
            rank.check_scatter(DType::kInt8, counts, team.size() - 1, in_place);
          }
          rank.check_all_to_all(DType::kInt8, [&](int source, int destination) {
            return source == 0 && destination == 1 ? bytes : size_t{3};
          });
          for (size_t shares : {ranks - 1, ranks}) {
            const size_t whole = shares * message + bytes - message;
            rank.check_all_reduce({DType::kInt8, ReduceOp::kSum}, whole, true);
            rank.check_reduce({DType::kInt8, ReduceOp::kSum}, whole, team.size() - 1, false);
            rank.check_broadcast(DType::kInt8, whole, 1);
          }
        }
        for (int root = 0; root < team.size(); ++root) {
          rank.check_reduce({DType::kFloat32, ReduceOp::kAvg}, 20'001, root, root % 2 == 0);
          rank.check_broadcast(DType::kComplex128, 9'001, root);
        }
      } catch (const RankStopped&) {
      }
    });
  }
}

// Open MPI must not lose count of collectives in which a rank has nothing to do.
TEST(MpiTeam, CollectivesWithIdleRanksMatchReference) {
  ReferenceOptions options;
  on_every_rank(mpi_team())([&](Team& team) {
    ReferenceRank rank(team, options);
    const auto ranks = static_cast<size_t>(team.size());
    try {
      for (int busy = 0; busy < team.size(); ++busy) {
        std::vector<size_t> counts(ranks, 0);
        counts[static_cast<size_t>(busy)] = 3000;
        rank.check_all_to_all(DType::kFloat32, [&](int source, int destination) {
          return source == busy && destination == busy ? size_t{7} : size_t{0};
        });
        rank.check_all_to_all(DType::kFloat32, [&](int source, int destination) {
          return source == busy && destination == 0 ? size_t{7} : size_t{0};
        });
        rank.check_gather(DType::kFloat32, counts, 0, false);
        rank.check_scatter(DType::kFloat32, counts, 1, false);
        rank.check_all_gather(DType::kFloat32, counts, false);
        rank.check_reduce_scatter({DType::kFloat32, ReduceOp::kSum}, counts, false);
        rank.check_all_reduce({DType::kFloat32, ReduceOp::kSum}, 3000, false);
      }
    } catch (const RankStopped&) {
    }
  });
}

// Halves that travel as halves are rounded once per hop: exact if nothing needs rounding.
TEST(MpiTeam, BFloat16SentAsBFloat16IsExactIfNothingNeedsRounding) {
  on_every_rank(mpi_team())([](Team& team) {
    for (size_t count : {size_t{5}, size_t{1000}, size_t{100'000}}) {
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kPremulSum}) {
        std::vector<std::byte> data(count * 2), expected(count * 2);
        for (size_t i = 0; i < count; ++i) {
          int sum = 0, least = 1000;
          for (int rank = 0; rank < team.size(); ++rank) {
            int value = static_cast<int>(i % 7) + rank - 3;
            if (rank == team.rank()) store_value(DType::kBFloat16, &data[2 * i], value);
            sum += value;
            least = std::min(least, value);
          }
          const int factor = op == ReduceOp::kPremulSum ? 2 : 1;
          store_value(DType::kBFloat16, &expected[2 * i],
                      op == ReduceOp::kMin ? least : factor * sum);
        }
        Status status = team.all_reduce(data.data(), data.data(), count,
                                        {DType::kBFloat16, op, 2.0}, within_ms(60000));
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_EQ(data, expected) << count << " " << reduce_op_name(op);
      }
    }
  });
}

uint64_t hash_of(const std::vector<std::byte>& bytes) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (std::byte byte : bytes) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3ull;
  return hash;
}

void expect_same_on_every_rank(uint64_t mine, const std::string& what) {
  std::vector<uint64_t> all(static_cast<size_t>(Job::get().size()));
  MPI_Allgather(&mine, 1, MPI_UINT64_T, all.data(), 1, MPI_UINT64_T, MPI_COMM_WORLD);
  for (uint64_t other : all) EXPECT_EQ(other, mine) << what;
}

// Random values whose sums round at every step. For MIN and MAX also NaN and zeros, each with
// either sign. float16 gets random bits.
std::vector<std::byte> random_values(DType dtype, ReduceOp op, int rank, size_t count) {
  const bool is_choice = op == ReduceOp::kMin || op == ReduceOp::kMax;
  std::vector<std::byte> data(count * dtype_bytes(dtype));
  uint32_t state = 12345u + static_cast<uint32_t>(rank) * 7919u;
  for (size_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    double value = 0.5 + static_cast<double>(state >> 8) / (1 << 24);
    if (is_choice && (state >> 28) < 4) {
      const double special[] = {0.0, -0.0, std::nan(""), -std::nan("")};
      value = special[(state >> 26) & 3];
    }
    std::byte* at = data.data() + i * dtype_bytes(dtype);
    const auto single = static_cast<float>(value);
    if (dtype == DType::kFloat64) {
      std::memcpy(at, &value, sizeof value);
    } else if (dtype == DType::kFloat32) {
      std::memcpy(at, &single, sizeof single);
    } else if (dtype == DType::kBFloat16) {
      auto upper = static_cast<uint16_t>(std::bit_cast<uint32_t>(single) >> 16);
      std::memcpy(at, &upper, sizeof upper);
    } else {
      auto half = static_cast<uint16_t>(0x3800 + (state >> 8) % 0x0800);
      std::memcpy(at, &half, sizeof half);
    }
  }
  return data;
}

// By exchange among few ranks; by MPI among many, with the algorithms that test_mpi_team.py sets.
class SameBits : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(MpiTeam, SameBits, ::testing::Values(MpiTeamOptions().few_ranks, 0));

TEST_P(SameBits, AllReduceGivesSameBitsOnEveryRank) {
  MpiTeamOptions team_options;
  team_options.few_ranks = GetParam();
  std::unique_ptr<MpiTeam> team = Job::get().make_team(team_options);
  for (size_t count : {size_t{20}, size_t{5003}, size_t{200'003}}) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kAvg, ReduceOp::kPremulSum,
                          ReduceOp::kMin, ReduceOp::kMax}) {
        std::vector<std::byte> data = random_values(dtype, op, team->rank(), count);
        Status status =
            team->all_reduce(data.data(), data.data(), count, {dtype, op, 0.3}, within_ms(60000));
        ASSERT_TRUE(status.ok()) << status.message();
        expect_same_on_every_rank(hash_of(data), std::string(dtype_name(dtype)) + " " +
                                                     reduce_op_name(op) + " of " +
                                                     std::to_string(count));
      }
    }
  }
}

// The mode of the caller's thread makes no difference.
TEST(MpiTeam, DenormalsAreKept) {
  std::unique_ptr<MpiTeam> team = Job::get().make_team();
  for (size_t count : {size_t{8}, size_t{50'000}}) {
    std::vector<float> data(count, std::numeric_limits<float>::denorm_min());
#if defined(__x86_64__)
    const unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 0x8040);  // flush to zero, denormals are zero
#endif
    Status status =
        team->all_reduce(data.data(), data.data(), count, {DType::kFloat32}, within_ms(60000));
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(before);
#endif
    ASSERT_TRUE(status.ok()) << status.message();
    const std::vector<float> expected(
        count, static_cast<float>(team->size()) * std::numeric_limits<float>::denorm_min());
    EXPECT_TRUE(std::memcmp(data.data(), expected.data(), count * sizeof(float)) == 0);
  }
}

TEST(MpiTeam, NoRankLeavesBarrierBeforeAllEntered) {
  on_every_rank(mpi_team())([](Team& team) {
    for (int round = 1; round <= 50; ++round) {
      Job::get().board().entered.fetch_add(1);
      ASSERT_TRUE(team.barrier(within_ms(60000)).ok());
      ASSERT_GE(Job::get().board().entered.load(), round * team.size());
    }
  });
}

TEST(MpiTeam, DescribesItself) {
  std::unique_ptr<MpiTeam> team = Job::get().make_team();
  EXPECT_EQ(team->describe(), "mpi, " + std::to_string(Job::get().size()) + " ranks");
  EXPECT_EQ(team->rank(), Job::get().rank());
}

TEST(MpiTeam, InvalidArgumentsFailWithoutEndingTheTeam) {
  on_every_rank(mpi_team())([](Team& team) {
    const auto n = static_cast<size_t>(team.size());
    float value = 1;
    std::vector<void*> outs(n, &value), few_outs(n - 1, &value);
    std::vector<const void*> ins(n, &value), no_ins;
    std::vector<size_t> counts(n, 1), few_counts(n - 1, 1), none, others(n, 2);
    const DType dtype = DType::kFloat32;
    CallOptions options = within_ms(60000);
    for (const Status& status : {
             team.broadcast(&value, 1, dtype, team.size(), options),
             team.reduce(&value, &value, 1, {dtype}, -1, options),
             team.all_gather(&value, 1, dtype, few_outs, few_counts, options),
             team.all_gather(&value, 1, dtype, outs, others, options),
             team.reduce_scatter(no_ins, none, &value, {dtype}, options),
             team.gather(&value, 1, dtype, few_outs, few_counts, team.rank(), options),
             team.scatter(ins, others, &value, 1, dtype, team.rank(), options),
             team.all_to_all(ins, counts, outs, others, dtype, options),
         })
      EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.message();
    EXPECT_EQ(team.all_reduce(&value, &value, 1, {DType::kInt32, ReduceOp::kAvg}, options).code(),
              Code::kUnsupported);
    EXPECT_TRUE(team.failure().ok());
    EXPECT_TRUE(team.barrier(options).ok());
  });
}

TEST(MpiTeam, MismatchedCallsFailOnAllRanks) {
  for (size_t chunk_bytes : {size_t{64}, size_t{1} << 20})
    check_disagreements(Job::get().size(), on_every_rank(mpi_team(exact(chunk_bytes))));
}

TEST(MpiTeam, MismatchedCallsWithAlgorithmsForManyRanksFailOnAllRanks) {
  check_disagreements(Job::get().size(), on_every_rank(mpi_team(as_among_many())));
}

TEST(MpiTeam, MismatchShowsBothCalls) {
  on_every_rank(mpi_team())([](Team& team) {
    Job& job = Job::get();
    const int last = team.size() - 1;
    std::vector<float> data(1000);
    ASSERT_TRUE(team.barrier(within_ms(60000)).ok());
    job.meet();  // a rank that is still in the barrier would not see the next failure
    Status status =
        team.rank() == last
            ? team.broadcast(data.data(), 1000, DType::kFloat32, 0, within_ms(60000))
            : team.all_reduce(data.data(), data.data(), 1000, {DType::kFloat32}, within_ms(60000));
    EXPECT_EQ(status.code(), Code::kMismatch);
    const std::string expected = "the ranks called different things as call #2: " + job.name_of(0) +
                                 " called all_reduce(float32[1000], SUM), " + job.name_of(last) +
                                 " called broadcast(float32[1000], root 0); " +
                                 "every rank must make the same calls in the same order";
    EXPECT_EQ(status.message().substr(0, expected.size()), expected);
    EXPECT_EQ(team.failure().message(), status.message());
    EXPECT_EQ(team.barrier(within_ms(60000)).message(), status.message());
  });
}

// In these gathers no rank waits, because every rank takes another one for the root. The barrier
// finds that and reports the gather. A late rank gets the error in its gather.
TEST(MpiTeam, MismatchWithoutWaitingRanksIsShownInNextCall) {
  on_every_rank(mpi_team())([](Team& team) {
    Job& job = Job::get();
    const float value = 1;
    const int root = (team.rank() + 1) % team.size();
    Status status = team.gather(&value, 1, DType::kFloat32, {}, {}, root, within_ms(60000));
    if (status.ok()) status = team.barrier(within_ms(60000));
    EXPECT_EQ(status.code(), Code::kMismatch);
    const std::string expected = "the ranks called different things as call #1: " + job.name_of(0) +
                                 " called gather(float32[1], root 1), ";
    EXPECT_EQ(status.message().substr(0, expected.size()), expected);
  });
}

// The last rank broadcasts to others that broadcast too, so none waits for it. Late ranks get the
// error there.
TEST(MpiTeam, MismatchBeforeAllToAllIsShown) {
  on_every_rank(mpi_team())([](Team& team) {
    Job& job = Job::get();
    const auto n = static_cast<size_t>(team.size());
    const int last = team.size() - 1;
    float value = 1;
    const int root = team.rank() == last ? last : 0;
    Status status = team.broadcast(&value, 1, DType::kFloat32, root, within_ms(60000));
    std::vector<float> in(n), out(n);
    std::vector<const void*> ins;
    std::vector<void*> outs;
    for (size_t k = 0; k < n; ++k) {
      ins.push_back(&in[k]);
      outs.push_back(&out[k]);
    }
    const std::vector<size_t> counts(n, 1);
    if (status.ok())
      status = team.all_to_all(ins, counts, outs, counts, DType::kFloat32, within_ms(60000));
    EXPECT_EQ(status.code(), Code::kMismatch);
    const std::string expected = "the ranks called different things as call #1: ";
    EXPECT_EQ(status.message().substr(0, expected.size()), expected);
    EXPECT_NE(status.message().find(job.name_of(last) + " called broadcast(float32[1], root " +
                                    std::to_string(last) + ")"),
              std::string::npos)
        << status.message();
  });
}

// Two ranks wait for each other's data, and no message shows them that they differ.
TEST(MpiTeam, RanksThatWaitForEachOtherReportTheMismatch) {
  on_every_rank(mpi_team())([](Team& team) {
    Job& job = Job::get();
    float value = 1;
    const int root = 1 - std::min(team.rank(), 1);
    Status status = team.broadcast(&value, 1, DType::kFloat32, root, within_ms(60000));
    if (status.ok()) status = team.barrier(within_ms(60000));
    EXPECT_EQ(status.code(), Code::kMismatch);
    const std::string expected = "the ranks called different things as call #1: " + job.name_of(0) +
                                 " called broadcast(float32[1], root 1), ";
    EXPECT_EQ(status.message().substr(0, expected.size()), expected);
  });
}

TEST(MpiTeam, MismatchedSplitSizesAreShown) {
  on_every_rank(mpi_team())([](Team& team) {
    Job& job = Job::get();
    const auto n = static_cast<size_t>(team.size());
    const int last = team.size() - 1;
    std::vector<std::vector<float>> in(n, std::vector<float>(9)), out(n, std::vector<float>(9));
    std::vector<const void*> ins;
    std::vector<void*> outs;
    for (size_t k = 0; k < n; ++k) {
      ins.push_back(in[k].data());
      outs.push_back(out[k].data());
    }
    std::vector<size_t> in_counts(n, 5), out_counts(n, 5);
    if (team.rank() == last) in_counts[0] = 6;
    Status status =
        team.all_to_all(ins, in_counts, outs, out_counts, DType::kFloat32, within_ms(60000));
    // A rank outside the mismatched pair may finish the call.
    if (status.ok()) status = team.barrier(within_ms(60000));
    EXPECT_EQ(status.code(), Code::kMismatch);
    const std::string expected = job.name_of(last) + " sends 6 elements to " + job.name_of(0) +
                                 ", which expects 5; make both equal";
    EXPECT_EQ(status.message().substr(0, expected.size()), expected);
  });
}

// The part of the message before "first seen by".
std::string cause_of(const Status& status) {
  return status.message().substr(0, status.message().find(" (first seen by "));
}

// The other ranks wait for the last one, which does not come.
void expect_missing_rank_named(Team& team, const std::function<Status(Team&)>& call) {
  Job& job = Job::get();
  const int missing = team.size() - 1;
  if (team.rank() == missing) return;
  Status status = call(team);
  EXPECT_EQ(status.code(), Code::kTimeout) << status.message();
  EXPECT_NE(cause_of(status).find(job.name_of(missing)), std::string::npos) << status.message();
  for (int present = 0; present < missing; ++present)
    EXPECT_EQ(cause_of(status).find(job.name_of(present)), std::string::npos) << status.message();
  EXPECT_EQ(team.failure().message(), status.message());
  EXPECT_EQ(team.barrier(within_ms(60000)).message(), status.message()) << "the first cause";
}

TEST(MpiTeam, TimeoutNamesTheMissingRank) {
  for (size_t count : {size_t{1}, size_t{3'000'000}}) {
    on_every_rank(mpi_team())([count](Team& team) {
      std::vector<float> data(count);
      expect_missing_rank_named(team, [&](Team&) {
        return team.all_reduce(data.data(), data.data(), count, {DType::kFloat32}, within_ms(400));
      });
    });
  }
}

// Data along a chain: from the missing rank, to it, and through it.
TEST(MpiTeam, TimeoutInChainNamesTheMissingRank) {
  const int ranks = Job::get().size();
  for (int root = 0; root < ranks; ++root) {
    on_every_rank(mpi_team())([root](Team& team) {
      std::vector<float> data(3'000'000);
      expect_missing_rank_named(team, [&](Team&) {
        return team.broadcast(data.data(), data.size(), DType::kFloat32, root, within_ms(1000));
      });
    });
    on_every_rank(mpi_team())([root](Team& team) {
      std::vector<float> data(kChainOfFewPieces);
      expect_missing_rank_named(team, [&](Team&) {
        Status status = team.reduce(data.data(), data.data(), data.size(), {DType::kFloat32}, root,
                                    within_ms(1000));
        // A rank that has done its part gets the failure afterwards.
        for (int ms = 0; status.ok() && ms < 5000; ++ms) {
          usleep(1000);
          status = team.failure();
        }
        return status;
      });
    });
  }
}

// Ranks come one after the other: late ones must answer before the first one gives up.
TEST(MpiTeam, LateRanksAreNotReportedAsMissing) {
  on_every_rank(mpi_team())([](Team& team) {
    usleep(static_cast<useconds_t>(team.rank() * 200'000));
    expect_missing_rank_named(team, [](Team& each) { return each.barrier(within_ms(1000)); });
  });
}

TEST(MpiTeam, DeathEndsTheWait) {
  on_every_rank(mpi_team())([](Team& team) {
    Job& job = Job::get();
    const int victim = team.size() - 1;
    if (team.rank() == victim) {
      usleep(100'000);
      job.detector().report(victim, Code::kPeerDied);
      return;
    }
    std::vector<float> data(1000);
    const int64_t began = monotonic_ns();
    Status status =
        team.all_reduce(data.data(), data.data(), 1000, {DType::kFloat32}, within_ms(60000));
    EXPECT_EQ(status.code(), Code::kPeerDied) << status.message();
    EXPECT_NE(status.message().find("rank " + std::to_string(victim) + " died"), std::string::npos);
    EXPECT_LT(monotonic_ns() - began, 10'000'000'000);
  });
}

TEST(MpiTeam, CallAfterDeathOrLeaveFailsAtOnce) {
  for (Code code : {Code::kPeerDied, Code::kPeerLeft}) {
    on_every_rank(mpi_team())([code](Team& team) {
      Job& job = Job::get();
      const int victim = team.size() - 1;
      ASSERT_TRUE(team.barrier(within_ms(60000)).ok());
      job.meet();  // a rank that is still in the barrier would not see the next failure
      if (team.rank() == 0) job.detector().report(victim, code);
      job.meet();
      if (team.rank() == victim) return;
      const int64_t began = monotonic_ns();
      Status status = team.barrier(within_ms(60000));
      EXPECT_EQ(status.code(), code) << status.message();
      EXPECT_NE(status.message().find("rank " + std::to_string(victim)), std::string::npos);
      EXPECT_LT(monotonic_ns() - began, 2'000'000'000);
    });
  }
}

// A rank that leaves while others wait for it is named after some seconds.
TEST(MpiTeam, LeaveDuringBarrierNamesTheRank) {
  on_every_rank(mpi_team())([](Team& team) {
    Job& job = Job::get();
    const int victim = team.size() - 1;
    if (team.rank() == victim) {
      usleep(100'000);
      job.detector().report(victim, Code::kPeerLeft);
      return;
    }
    Status status = team.barrier(within_ms(60000));
    EXPECT_EQ(status.code(), Code::kPeerLeft) << status.message();
    EXPECT_NE(status.message().find(job.name_of(victim) + " left the group before it made this "
                                                          "call; every rank must make the same"),
              std::string::npos)
        << status.message();
  });
}

TEST(MpiTeam, BarrierNamesUnhandledExceptionOfOtherRank) {
  on_every_rank(mpi_team())([](Team& team) {
    Job& job = Job::get();
    const int victim = team.size() - 1;
    if (team.rank() == 0) job.detector().report(victim, Code::kPeerLeft, true);
    job.meet();
    if (team.rank() == victim) return;
    Status status = team.barrier(within_ms(60000));
    EXPECT_EQ(status.code(), Code::kPeerLeft) << status.message();
    EXPECT_NE(status.message().find(job.name_of(victim) +
                                    " was ended by an unhandled ValueError before it made this "
                                    "call; see its output for the traceback"),
              std::string::npos)
        << status.message();
  });
}

// A rank in the gather root's domain dies while the others send, piece by piece.
TEST(MpiTeam, GatherCompletesDespiteDeathOfUninvolvedRank) {
  if (Job::get().size() < 3) return;  // with two ranks both take part
  on_every_rank(mpi_team(exact(4)))([](Team& team) {
    Job& job = Job::get();
    const auto n = static_cast<size_t>(team.size());
    constexpr size_t kCount = 200'000;
    std::vector<int> domains(n, 1);
    domains[0] = domains[1] = 0;
    ASSERT_TRUE(team.barrier(within_ms(60000)).ok());
    CallOptions options = within_ms(60000);
    options.domains = &domains;
    if (team.rank() == 1) {
      usleep(50'000);
      job.detector().report(1, Code::kPeerDied);
      return;
    }
    const std::vector<int32_t> mine(kCount, team.rank());
    std::vector<std::vector<int32_t>> all(n, std::vector<int32_t>(kCount));
    std::vector<void*> outs;
    std::vector<size_t> counts;
    if (team.rank() == 0) {
      for (std::vector<int32_t>& block : all) outs.push_back(block.data());
      counts.assign(n, kCount);
      counts[0] = counts[1] = 0;
    }
    Status status = team.gather(mine.data(), team.rank() == 0 ? 0 : kCount, DType::kInt32, outs,
                                counts, 0, options);
    EXPECT_TRUE(status.ok()) << status.message();
    if (team.rank() == 0)
      for (size_t k = 2; k < n; ++k)
        EXPECT_EQ(all[k], std::vector<int32_t>(kCount, static_cast<int32_t>(k)));
    EXPECT_EQ(team.barrier(within_ms(60000)).code(), Code::kPeerDied);
  });
}

// The parent team asks it meanwhile, also for ranks that the call does not need.
TEST(MpiTeam, DeathOfUninvolvedRankIsVisibleDuringGather) {
  if (Job::get().size() < 3) return;  // with two ranks both take part
  on_every_rank(mpi_team())([](Team& team) {
    Job& job = Job::get();
    const auto n = static_cast<size_t>(team.size());
    std::vector<int> domains(n, 1);
    domains[0] = domains[1] = 0;
    if (team.rank() == 0) job.detector().report(1, Code::kPeerDied);
    job.meet();
    if (team.rank() == 1) return;
    Status death;
    const std::function<Status()> ask = [&] {
      death = team.death();
      return Status();
    };
    CallOptions options = within_ms(20'000);
    options.domains = &domains;
    options.meanwhile = &ask;
    const int32_t mine = team.rank();
    std::vector<int32_t> all(n, -1);
    std::vector<void*> outs;
    std::vector<size_t> counts;
    if (team.rank() == 0) {
      for (int32_t& each : all) outs.push_back(&each);
      counts.assign(n, 1);
      counts[0] = counts[1] = 0;
    }
    const Status status =
        team.gather(&mine, team.rank() == 0 ? 0 : 1, DType::kInt32, outs, counts, 0, options);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(death.code(), Code::kPeerDied) << death.message();
  });
}

// The root of a gather, or a receiver of a scatter, comes after its senders have left.
TEST(MpiTeam, GatherAndScatterCompleteAfterSendersLeft) {
  for (const bool gathers : {true, false})
    on_every_rank(mpi_team())([gathers](Team& team) {
      Job& job = Job::get();
      const auto n = static_cast<size_t>(team.size());
      std::vector<int> domains(n);
      std::iota(domains.begin(), domains.end(), 0);
      CallOptions options = within_ms(20'000);
      options.domains = &domains;
      const bool is_root = team.rank() == 0;
      std::vector<int32_t> mine(n, team.rank()), theirs(n, -1);
      std::vector<const void*> ins;
      std::vector<void*> outs;
      std::vector<size_t> counts;
      for (size_t k = 0; is_root && k < n; ++k) {
        ins.push_back(&mine[k]);
        outs.push_back(&theirs[k]);
        counts.push_back(1);
      }
      if (is_root == gathers) job.meet();
      const Status status =
          gathers ? team.gather(mine.data(), 1, DType::kInt32, outs, counts, 0, options)
                  : team.scatter(ins, counts, theirs.data(), 1, DType::kInt32, 0, options);
      EXPECT_TRUE(status.ok()) << status.message();
      if (is_root == gathers) {
        std::vector<int32_t> expected(n, -1);
        expected[0] = 0;
        EXPECT_EQ(theirs, gathers ? domains : expected);
      } else {
        job.detector().report(team.rank(), Code::kPeerLeft);
        job.meet();
      }
    });
}

// A rank that left after its part of the call is not the one that the root waits for.
TEST(MpiTeam, ReduceAndGatherAwaitLateRankAfterOtherRankLeft) {
  if (Job::get().size() < 3) return;  // with two ranks nobody else can leave
  for (const bool reduces : {true, false})
    on_every_rank(mpi_team())([reduces](Team& team) {
      Job& job = Job::get();
      const int late = team.size() - 1;
      if (team.rank() == late) usleep((kGraceOfLeaversNs + 1'500'000'000) / 1000);
      const int32_t mine = team.rank();
      std::vector<int32_t> all(static_cast<size_t>(team.size()), -1);
      std::vector<void*> outs;
      for (int32_t& each : all) outs.push_back(&each);
      const std::vector<size_t> counts(all.size(), 1);
      const bool is_root = team.rank() == 0;
      const CallOptions options = within_ms(60'000);
      const Status status = reduces ? team.reduce(&mine, all.data(), 1, {DType::kInt32}, 0, options)
                            : is_root
                                ? team.gather(&mine, 1, DType::kInt32, outs, counts, 0, options)
                                : team.gather(&mine, 1, DType::kInt32, {}, {}, 0, options);
      EXPECT_TRUE(status.ok()) << status.message();
      if (is_root && reduces) EXPECT_EQ(all[0], late * (late + 1) / 2);
      if (is_root && !reduces) EXPECT_EQ(all.back(), late);
      if (team.rank() == 1) job.detector().report(1, Code::kPeerLeft);
    });
}

TEST(MpiTeam, ReduceNamesRankEndedByExceptionAlthoughAnotherLeft) {
  if (Job::get().size() < 3) return;  // with two ranks nobody else can leave
  on_every_rank(mpi_team())([](Team& team) {
    Job& job = Job::get();
    const int victim = team.size() - 1;
    if (team.rank() == victim) {
      usleep(300'000);
      job.detector().report(victim, Code::kPeerLeft, true);
      return;
    }
    const int32_t mine = 1;
    int32_t sum = 0;
    const Status status = team.reduce(&mine, &sum, 1, {DType::kInt32}, 0, within_ms(60'000));
    if (team.rank() == 1) job.detector().report(1, Code::kPeerLeft);
    if (team.rank() != 0) return;
    EXPECT_EQ(status.code(), Code::kPeerLeft) << status.message();
    EXPECT_NE(status.message().find(job.name_of(victim) + " was ended by an unhandled ValueError"),
              std::string::npos)
        << status.message();
  });
}

// A sender is some calls ahead and waits until the root takes its messages.
TEST(MpiTeam, GatherToDepartedRootNamesTheRoot) {
  on_every_rank(mpi_team())([](Team& team) {
    Job& job = Job::get();
    if (team.rank() == 0) {
      usleep(300'000);
      job.detector().report(0, Code::kPeerLeft);
    }
    if (team.rank() != team.size() - 1) return;
    const int32_t mine = 0;
    Status status;
    int calls = 0;
    for (; status.ok() && calls < 100; ++calls)
      status = team.gather(&mine, 1, DType::kInt32, {}, {}, 0, within_ms(60'000));
    EXPECT_LT(calls, 10);
    EXPECT_EQ(status.code(), Code::kPeerLeft) << status.message();
    EXPECT_NE(status.message().find(job.name_of(0) + " left the group"), std::string::npos)
        << status.message();
  });
}

// The same along a chain, whose first rank does not wait for the others.
TEST(MpiTeam, BroadcastToDepartedRankNamesTheRank) {
  for (size_t count : {kChainOfFewPieces, size_t{3'000'000}})
    on_every_rank(mpi_team())([count](Team& team) {
      Job& job = Job::get();
      if (team.rank() == 1) {
        usleep(300'000);
        job.detector().report(1, Code::kPeerLeft);
      }
      if (team.rank() != 0) return;
      std::vector<float> data(count);
      Status status;
      int calls = 0;
      for (; status.ok() && calls < 100; ++calls)
        status = team.broadcast(data.data(), count, DType::kFloat32, 0, within_ms(60'000));
      EXPECT_LE(calls, 2);
      EXPECT_EQ(status.code(), Code::kPeerLeft) << status.message();
      EXPECT_NE(status.message().find(job.name_of(1) + " left the group"), std::string::npos)
          << status.message();
    });
}

// The last rank is known to be gone: its predecessor reports it at once, or at a short timeout.
TEST(MpiTeam, BroadcastToDepartedLastRankNamesTheRank) {
  for (int timeout_ms : {60'000, 1000})
    on_every_rank(mpi_team())([timeout_ms](Team& team) {
      Job& job = Job::get();
      const int victim = team.size() - 1;
      if (team.rank() == 0) job.detector().report(victim, Code::kPeerLeft);
      job.meet();
      if (team.rank() == victim) return;
      std::vector<float> data(kChainOfFewPieces);
      const int64_t began = monotonic_ns();
      Status status =
          team.broadcast(data.data(), data.size(), DType::kFloat32, 0, within_ms(timeout_ms));
      if (status.ok())
        status = team.barrier(within_ms(timeout_ms));  // the first of three or more
                                                       // succeeds
      EXPECT_EQ(status.code(), Code::kPeerLeft) << status.message();
      EXPECT_NE(status.message().find(job.name_of(victim) + " left the group"), std::string::npos)
          << status.message();
      EXPECT_LT(monotonic_ns() - began, 2'000'000'000);
    });
}

// The first rank does its part and leaves; the third comes long afterwards.
TEST(MpiTeam, BroadcastToLateRankCompletesAfterRootLeft) {
  if (Job::get().size() < 3) return;  // the second is the last one
  on_every_rank(mpi_team())([](Team& team) {
    std::vector<float> data(kChainOfFewPieces, team.rank() == 0 ? 1.5f : 0.0f);
    if (team.rank() == 2) usleep(4'000'000);
    const Status status =
        team.broadcast(data.data(), data.size(), DType::kFloat32, 0, within_ms(60'000));
    if (team.rank() == 0) Job::get().detector().report(0, Code::kPeerLeft);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(data.back(), 1.5f);
  });
}

// A sender that left before it made the call is awaited for some seconds.
TEST(MpiTeam, GatherNamesSenderThatLeftWithoutSending) {
  on_every_rank(mpi_team())([](Team& team) {
    Job& job = Job::get();
    const auto n = static_cast<size_t>(team.size());
    const int victim = team.size() - 1;
    std::vector<int> domains(n);
    std::iota(domains.begin(), domains.end(), 0);
    CallOptions options = within_ms(60'000);
    options.domains = &domains;
    if (team.rank() == victim) job.detector().report(victim, Code::kPeerLeft);
    job.meet();
    if (team.rank() != 0) return;
    std::vector<int32_t> theirs(n, 0);
    const int32_t mine = 0;
    std::vector<void*> outs;
    for (int32_t& each : theirs) outs.push_back(&each);
    const Status status =
        team.gather(&mine, 1, DType::kInt32, outs, std::vector<size_t>(n, 1), 0, options);
    EXPECT_EQ(status.code(), Code::kPeerLeft) << status.message();
    EXPECT_NE(status.message().find(job.name_of(victim) + " left the group"), std::string::npos)
        << status.message();
  });
}

// One rank sends a message and the other expects several, and vice versa.
TEST(MpiTeam, BlocksOfUnexpectedLengthAreRefused) {
  for (const auto& [sent, expected] : {std::pair<size_t, size_t>{5, 100'000}, {100'000, 5}})
    on_every_rank(mpi_team())([sent, expected](Team& team) {
      const auto n = static_cast<size_t>(team.size());
      const bool is_root = team.rank() == 0;
      const std::vector<int32_t> mine(std::max(sent, expected), 1);
      std::vector<std::vector<int32_t>> theirs(n, std::vector<int32_t>(expected));
      std::vector<void*> outs;
      std::vector<size_t> counts;
      for (size_t k = 0; is_root && k < n; ++k) {
        outs.push_back(theirs[k].data());
        counts.push_back(expected);
      }
      Status status = team.gather(mine.data(), is_root ? expected : sent, DType::kInt32, outs,
                                  counts, 0, within_ms(20'000));
      if (!is_root && status.ok()) status = team.barrier(within_ms(20'000));
      EXPECT_EQ(status.code(), Code::kMismatch) << status.message();
      EXPECT_NE(status.message().find(std::to_string(sent)), std::string::npos) << status.message();
    });
}

// Each rank is a domain and sends a number to every other rank.
Status exchange_numbers(Team& team, const std::function<Status()>* meanwhile) {
  const auto n = static_cast<size_t>(team.size());
  std::vector<int> domains(n);
  std::iota(domains.begin(), domains.end(), 0);
  CallOptions options = within_ms(20'000);
  options.domains = &domains;
  options.meanwhile = meanwhile;
  std::vector<int32_t> mine(n, team.rank()), theirs(n, -1);
  std::vector<const void*> ins;
  std::vector<void*> outs;
  for (size_t k = 0; k < n; ++k) {
    ins.push_back(&mine[k]);
    outs.push_back(&theirs[k]);
  }
  const std::vector<size_t> ones(n, 1);
  const Status status = team.all_to_all(ins, ones, outs, ones, DType::kInt32, options);
  if (status.ok()) EXPECT_EQ(theirs, domains);
  return status;
}

TEST(MpiTeam, AllToAllSendsBlocksBeforeFirstMeanwhileCallback) {
  on_every_rank(mpi_team())([](Team& team) {
    Job& job = Job::get();
    const std::function<Status()> wait_for_others = [&] {
      job.meet();
      return Status();
    };
    const bool is_busy = team.rank() == 0;
    const Status status = exchange_numbers(team, is_busy ? &wait_for_others : nullptr);
    EXPECT_TRUE(status.ok()) << status.message();
    if (!is_busy) job.meet();
  });
}

TEST(MpiTeam, AllToAllEndsTeamIfMeanwhileCallbackFails) {
  on_every_rank(mpi_team())([](Team& team) {
    const std::function<Status()> fail = [] { return make_status(Code::kAborted, "enough"); };
    const bool fails = team.rank() == 0;
    const Status status = exchange_numbers(team, fails ? &fail : nullptr);
    if (fails) EXPECT_EQ(status.message(), "enough");
    Job::get().meet();
    EXPECT_EQ(team.barrier(within_ms(20'000)).message(), "enough");
  });
}

// The root finishes before the others and leaves.
TEST(MpiTeam, LeaveOfFinishedRootDoesNotFailBroadcastOnOtherRanks) {
  for (int attempt = 0; attempt < 20; ++attempt) {
    on_every_rank(mpi_team(exact(4096)))([](Team& team) {
      std::vector<float> data(30'000, team.rank() == 0 ? 1.5f : 0.0f);
      Status status =
          team.broadcast(data.data(), data.size(), DType::kFloat32, 0, within_ms(60000));
      if (team.rank() == 0) Job::get().detector().report(0, Code::kPeerLeft);
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(data.back(), 1.5f);
    });
  }
}

// An abort on any rank, from another thread, ends the waits of all ranks.
TEST(MpiTeam, AbortEndsWaitsOfAllRanks) {
  for (int aborting = 0; aborting < Job::get().size(); ++aborting) {
    on_every_rank(mpi_team())([aborting](Team& team) {
      const int missing = (aborting + 1) % team.size();
      std::thread other;
      if (team.rank() == aborting) {
        other = std::thread([&] {
          usleep(100'000);
          team.abort(make_status(Code::kAborted, "enough"));
          team.abort(make_status(Code::kAborted, "too late"));
        });
      }
      if (team.rank() != missing) {
        Status status = team.barrier(within_ms(60000));
        EXPECT_EQ(status.code(), Code::kAborted) << status.message();
        EXPECT_EQ(status.message(), "enough");
      }
      if (other.joinable()) other.join();
      if (team.rank() == aborting) EXPECT_EQ(team.failure().message(), "enough");
    });
  }
}

// A process is stopped during its work, as by a debugger.
TEST(MpiTeam, TimeoutNamesTheStoppedRank) {
  on_every_rank(mpi_team())([](Team& team) {
    Job& job = Job::get();
    const int stopped = team.size() - 1;
    if (team.rank() == stopped) {
      if (const int self = getpid(); fork() == 0) {
        usleep(200'000);
        kill(self, SIGSTOP);
        usleep(2'500'000);
        kill(self, SIGCONT);
        _exit(0);
      }
    }
    std::vector<float> data(2'000'000);
    Status status;
    while (status.ok())
      status = team.all_reduce(data.data(), data.data(), data.size(), {DType::kFloat32},
                               within_ms(1000));
    EXPECT_EQ(status.code(), Code::kTimeout) << status.message();
    EXPECT_NE(cause_of(status).find(job.name_of(stopped)), std::string::npos) << status.message();
  });
}

TEST(MpiTeam, TwoTeamsInTwoThreadsAreIndependent) {
  Job& job = Job::get();
  job.forget_all();
  std::vector<std::unique_ptr<MpiTeam>> teams;
  for (int k = 0; k < 2; ++k) teams.push_back(job.make_team());
  std::vector<std::thread> threads;
  for (size_t k = 0; k < 2; ++k) {
    threads.emplace_back([&, k] {
      for (size_t round = 0; round < 100; ++round) {
        std::vector<double> data(round % 2 == 0 ? 3 : 20'000, static_cast<double>(k + round));
        Status status = teams[k]->all_reduce(data.data(), data.data(), data.size(),
                                             {DType::kFloat64}, within_ms(60000));
        ASSERT_TRUE(status.ok()) << status.message();
        ASSERT_EQ(data.back(), static_cast<double>((k + round) * static_cast<size_t>(job.size())));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  job.meet();
}

// Groups are made and destroyed: their communicators must be freed.
TEST(MpiTeam, ManyTeamsInSequenceFreeTheirCommunicators) {
  for (int k = 0; k < 300; ++k) {
    std::unique_ptr<MpiTeam> team = Job::get().make_team();
    float value = 1;
    ASSERT_TRUE(team->all_reduce(&value, &value, 1, {DType::kFloat32}, within_ms(60000)).ok());
    ASSERT_EQ(value, static_cast<float>(team->size()));
  }
}

// HierarchicalTeam over MPI: between the domains, and inside domains of several ranks.
MakeTeam hierarchy(const Domains& domains, size_t staging_bytes, const MpiTeamOptions& below = {}) {
  return [domains, staging_bytes, below]() -> std::unique_ptr<Team> {
    Job& job = Job::get();
    // Teams of one hierarchy differ in their ranks or their kind.
    const uint64_t id = job.next_id() << 16;
    auto factory = [&](uint64_t kind) {
      return [&job, id, kind, below](std::span<const int> ranks,
                                     const std::string& name) -> Result<std::unique_ptr<Team>> {
        MpiTeamOptions options = below;
        options.name = name;
        uint64_t members = 0;
        for (int rank : ranks) members |= uint64_t{1} << rank;
        if (name.ends_with("/direct")) members |= 8192;
        return std::unique_ptr<Team>(
            job.make_team({ranks.begin(), ranks.end()}, options, id + kind + members));
      };
    };
    HierarchyOptions options{"test", staging_bytes};
    options.send_notice = [&job, id](const Status& cause, uint64_t unfinished_call) {
      job.detector().end(id, cause, unfinished_call);
    };
    options.received_notice = [&job, id](uint64_t call) { return job.detector().ended(id, call); };
    options.note_call = [&job, id](const CallRecord& call, bool) {
      job.detector().note_call(id, call, {"rank " + std::to_string(job.rank()), "test"});
    };
    options.compare_calls = [&job, id](bool always) { job.detector().compare_calls(id, always); };
    auto team =
        HierarchicalTeam::make(job.rank(), domains, factory(0), factory(4096), std::move(options));
    EXPECT_TRUE(team.ok()) << team.status().message();
    return std::move(team).value();
  };
}

std::vector<Domains> domains_of(int ranks) {
  switch (ranks) {
    case 2:
      return {{{0}, {1}}};
    case 3:
      return {{{0}, {1, 2}}, {{0, 2}, {1}}, {{0}, {1}, {2}}};
    case 4:
      return {{{0, 1}, {2, 3}}, {{0, 2}, {1, 3}}, {{0}, {1, 2, 3}}, {{0}, {1}, {2, 3}}};
    default:
      return {};
  }
}

TEST(HierarchicalTeamOverMpi, EveryCollective) {
  for (const Domains& domains : domains_of(Job::get().size())) {
    ReferenceOptions options;
    options.dtypes = {DType::kBool, DType::kFloat32, DType::kFloat16, DType::kComplex64,
                      DType::kFloat8E5M2};
    options.counts = {0, 1, 1000};
    check_collectives(on_every_rank(hierarchy(domains, size_t{1} << 20)), options);
    options.dtypes = {DType::kFloat32, DType::kBFloat16, DType::kInt64};
    options.counts = {1, 333};
    check_collectives(on_every_rank(hierarchy(domains, 800)), options);
  }
}

// Longer calls are one call across domains: among few ranks, and among many by MPI and by pairs.
TEST(HierarchicalTeamOverMpi, EveryCollectiveWithOverlap) {
  for (const Domains& domains : domains_of(Job::get().size())) {
    MpiTeamOptions by_mpi;
    by_mpi.few_ranks = 0;
    by_mpi.least_pair_bytes = 1 << 20;
    MpiTeamOptions pairs = by_pairs();
    pairs.message_bytes = 1000;
    for (const MpiTeamOptions& below : {MpiTeamOptions(), by_mpi, pairs}) {
      ReferenceOptions options;
      options.dtypes = {DType::kFloat32, DType::kBFloat16};  // the latter is widened
      options.counts = {1500, 30'000};
      check_collectives(on_every_rank(hierarchy(domains, 16384, below)), options);
    }
  }
}

// The rings of 16 and 68 hosts, which do not end at a multiple of MPI's pieces.
TEST(HierarchicalTeamOverMpi, RingsOfManyHostsMatchReference) {
  Domains domains;
  for (int rank = 0; rank < Job::get().size(); ++rank) domains.push_back({rank});
  for (size_t hosts : {size_t{16}, size_t{68}}) {
    MpiTeamOptions below;
    below.few_ranks = 0;
    below.least_pair_bytes = hosts * below.least_pair_bytes / domains.size();
    on_every_rank(hierarchy(domains, size_t{1} << 20, below))([](Team& team) {
      ReferenceOptions options;
      ReferenceRank rank(team, options);
      try {
        rank.check_reduce({DType::kFloat32, ReduceOp::kSum}, 9'500'001, 1, false);
        rank.check_all_reduce({DType::kBFloat16, ReduceOp::kAvg}, 9'500'001, true);
      } catch (const RankStopped&) {
      }
    });
  }
}

TEST(HierarchicalTeamOverMpi, MismatchedCallsFailOnAllRanks) {
  for (const Domains& domains : domains_of(Job::get().size()))
    check_disagreements(Job::get().size(), on_every_rank(hierarchy(domains, size_t{1} << 20)));
}

TEST(HierarchicalTeamOverMpi, CallWithMissingRankTimesOutOnOtherRanks) {
  for (const Domains& domains : domains_of(Job::get().size())) {
    for (int missing : {0, Job::get().size() - 1}) {
      on_every_rank(hierarchy(domains, size_t{1} << 20))([missing](Team& team) {
        if (team.rank() == missing) return;
        std::vector<float> data(100);
        Status status = team.all_reduce(data.data(), data.data(), data.size(), {DType::kFloat32},
                                        within_ms(300));
        EXPECT_EQ(status.code(), Code::kTimeout) << status.message();
        Status later = team.barrier(within_ms(60000));
        EXPECT_EQ(later.message(), status.message()) << "the first cause must be kept";
      });
    }
  }
}

TEST(HierarchicalTeamOverMpi, AbortEndsWaitsOfAllRanks) {
  for (const Domains& domains : domains_of(Job::get().size())) {
    on_every_rank(hierarchy(domains, size_t{1} << 20))([](Team& team) {
      if (team.rank() == 0) {
        std::thread other([&] { team.abort(make_status(Code::kAborted, "enough")); });
        other.join();
        return;
      }
      Status status = team.barrier(within_ms(60000));
      EXPECT_EQ(status.code(), Code::kAborted) << status.message();
      EXPECT_EQ(status.message(), "enough");
    });
  }
}

// test_mpi_team.py runs each of the tests below in a separate job.

// A process dies during its work. Either the failure detector reports it, or the deadline ends the
// wait. MPI must survive both.
void survive_a_death(bool is_told) {
  Job& job = Job::get();
  const int victim = job.size() - 1;
  std::unique_ptr<MpiTeam> team = job.make_team();
  std::vector<float> data(100'000);
  std::thread reporter;
  if (job.rank() == 0 && is_told) {
    reporter = std::thread([&] {
      usleep(600'000);
      job.detector().report(victim, Code::kPeerDied);
    });
  }
  Status status;
  for (int call = 0; status.ok(); ++call) {
    if (job.rank() == victim && call == 5) kill(getpid(), SIGKILL);
    status = team->all_reduce(data.data(), data.data(), data.size(), {DType::kFloat32},
                              within_ms(is_told ? 60000 : 2000));
  }
  EXPECT_EQ(status.code(), is_told ? Code::kPeerDied : Code::kTimeout) << status.message();
  EXPECT_NE(cause_of(status).find("rank " + std::to_string(victim)), std::string::npos)
      << status.message();
  if (reporter.joinable()) reporter.join();
  team.reset();
  // MPI_Finalize would wait for the dead rank, so the result is printed here.
  printf("rank %d %s\n", job.rank(), ::testing::Test::HasFailure() ? "failed" : "survived");
  fflush(stdout);
  _exit(::testing::Test::HasFailure() ? 1 : 0);
}
TEST(MpiTeamAlone, DeathWithNoticeEndsWait) { survive_a_death(true); }
TEST(MpiTeamAlone, DeathWithoutNoticeEndsWaitAtTimeout) { survive_a_death(false); }

// More elements than an int can count: gigabytes, so only on request.
TEST(MpiTeamAlone, CallsOfMoreThanIntMaxElementsSucceed) {
  const size_t count = (size_t{1} << 31) + 5;
  std::unique_ptr<MpiTeam> team = Job::get().make_team();
  std::vector<uint8_t> data(count, 1);
  data.back() = 3;
  Status status =
      team->all_reduce(data.data(), data.data(), count, {DType::kUInt8}, within_ms(600'000));
  ASSERT_TRUE(status.ok()) << status.message();
  const auto ranks = static_cast<uint8_t>(team->size());
  EXPECT_EQ(data.back(), 3 * ranks);
  data.back() = ranks;
  EXPECT_TRUE(std::all_of(data.begin(), data.end(), [&](uint8_t each) { return each == ranks; }));
  status = team->broadcast(data.data(), count, DType::kUInt8, 1, within_ms(600'000));
  ASSERT_TRUE(status.ok()) << status.message();
}

}  // namespace
}  // namespace dscomm::testing
