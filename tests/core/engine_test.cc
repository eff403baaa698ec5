// The engine: queue, workers, callbacks, groups. Ranks are threads, each with its own Context.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdlib>
#include <future>
#include <new>
#include <thread>

#include "core/base/deadline.h"
#include "core/engine/worker_pool.h"
#include "in_process_host.h"
#include "json_numbers.h"

namespace {

thread_local uint64_t allocations_of_this_thread = 0;

}  // namespace

// AddressSanitizer replaces all forms of new, and checks that they are not mixed.
#if !defined(__SANITIZE_ADDRESS__)
// Replaces the program's operator new, which its other forms call too.
void* operator new(size_t bytes) {
  ++allocations_of_this_thread;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
#endif

namespace dscomm::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr OperationInfo kSum{"all_reduce", DType::kInt64, true, ReduceOp::kSum, 1, -1, 0, false};
const Reduction kInt64Sum{DType::kInt64, ReduceOp::kSum};

Group::Body sum_of(int64_t* value) {
  return [value](Team& team, const CallOptions& options) {
    return team.all_reduce(value, value, 1, kInt64Sum, options);
  };
}

void run_world(int ranks,
               const std::function<void(InProcessHost&, std::shared_ptr<Context>, int)>& body) {
  InProcessHost host;
  run_ranks(ranks, [&](int rank) { body(host, host.process(), rank); });
}

TEST(Engine, SynchronousAndAsynchronousCallsKeepTheirOrder) {
  run_world(3, [](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
    std::shared_ptr<Group> group = host.group(context, rank, 3);
    for (int round = 0; round < 50; ++round) {
      int64_t a = rank, b = 10 * rank, c = 100 * rank;
      OperationPtr first = group->start(kSum, sum_of(&a), milliseconds(0));
      OperationPtr second = group->start(kSum, sum_of(&b), milliseconds(0));
      ASSERT_TRUE(group->run(kSum, sum_of(&c), milliseconds(0)).ok());
      EXPECT_TRUE(first->done() && second->done());  // the queue is in order
      ASSERT_TRUE(second->wait().ok());
      ASSERT_TRUE(first->wait().ok());
      ASSERT_EQ(a, 3);
      ASSERT_EQ(b, 30);
      ASSERT_EQ(c, 300);
    }
    EXPECT_EQ(group->sequence(), 150u);
    EXPECT_TRUE(group->shutdown().ok());
  });
}

// The default group knows the ranks of this host, so a later group's first rank speaks for all.
TEST(Engine, OnlyFirstRankWritesToStoreInLaterGroupOfOneHost) {
  MemoryStore store;
  run_world(4, [&](InProcessHost&, std::shared_ptr<Context> context, int rank) {
    const auto group_of = [&](const std::vector<int>& ranks, const std::string& name) {
      const auto own = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
      GroupOptions options = InProcessHost::options(
          static_cast<int>(own), static_cast<int>(ranks.size()), name, milliseconds(60'000));
      options.world = 1;
      if (name != "world") options.global_ranks = ranks;
      auto noting = std::make_shared<RecordingStore>(store);
      Result<std::shared_ptr<Group>> group = Group::create(context, noting, options);
      EXPECT_TRUE(group.ok()) << group.status().message();
      return std::pair(std::move(group).value(), noting->writes);
    };
    const auto world = group_of({0, 1, 2, 3}, "world");
    EXPECT_GT(world.second, 0);  // no rank knows its host yet
    const auto all = group_of({0, 1, 2, 3}, "all");
    EXPECT_EQ(all.second > 0, rank == 0);
    if (rank % 2 == 1) {
      const auto odd = group_of({1, 3}, "odd");
      EXPECT_EQ(odd.second > 0, rank == 1);
      int64_t value = 1;
      EXPECT_TRUE(odd.first->run(kSum, sum_of(&value), milliseconds(0)).ok());
      EXPECT_EQ(value, 2);
    }
    EXPECT_TRUE(all.first->shutdown().ok());
    EXPECT_TRUE(world.first->shutdown().ok());
  });
  EXPECT_EQ(store.keys(), std::vector<std::string>());
}

// Rank 2 believes that it is in a group that ranks 0 and 1 form without it.
TEST(Engine, RankLeftOutOfFormedGroupGetsMismatchAtOnce) {
  MemoryStore store;
  std::barrier together(3);
  const int64_t began_ns = monotonic_ns();
  run_world(3, [&](InProcessHost&, std::shared_ptr<Context> context, int rank) {
    GroupOptions options = InProcessHost::options(rank, 3, "world", milliseconds(60'000));
    options.world = 1;
    const auto make = [&] {
      return Group::create(context, std::make_shared<RecordingStore>(store), options);
    };
    const Result<std::shared_ptr<Group>> world = make();
    ASSERT_TRUE(world.ok());
    for (int round = 0; round < 3; ++round) {  // groups of the same name
      options.name = "later";
      options.size = 2;
      options.rank = std::min(rank, 1);
      options.global_ranks = {0, std::max(rank, 1)};
      if (rank == 2) together.arrive_and_wait();
      // Meanwhile rank 0 reads the store, where rank 2 has left nothing.
      if (rank == 1 && round > 0) std::this_thread::sleep_for(milliseconds(150));
      const Result<std::shared_ptr<Group>> later = make();
      if (rank != 2) together.arrive_and_wait();
      EXPECT_EQ(later.ok(), rank != 2);
      if (rank == 2) {
        EXPECT_EQ(later.status().code(), Code::kMismatch) << later.status().message();
      }
      together.arrive_and_wait();
    }
  });
  EXPECT_LT(monotonic_ns() - began_ns, 30'000'000'000);
  EXPECT_EQ(store.keys(), std::vector<std::string>());
}

// Rank 0 makes no call, or another one; no rank waits for rank 1's call.
TEST(Engine, ShutdownReportsUnmatchedCallOfDroppedWork) {
  for (bool calls : {false, true}) {
    std::atomic<int> told{0};
    run_world(2, [&](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
      std::shared_ptr<Group> group = host.group(context, rank, 2);
      int64_t value = 1, small = 1;
      if (rank == 1) {
        static_cast<void>(group->start(kSum, sum_of(&value), milliseconds(0)));
      } else if (calls) {
        const auto body = [&](Team& team, const CallOptions& options) {
          return team.broadcast(&small, 1, DType::kInt64, 0, options);
        };
        static_cast<void>(group->start(kSum, body, milliseconds(0)));
      }
      const Status status = group->shutdown();
      EXPECT_TRUE(group->shutdown().ok());
      if (status.ok()) return;
      ++told;
      EXPECT_EQ(status.code(), calls ? Code::kMismatch : Code::kPeerLeft) << status.message();
    });
    EXPECT_GE(told, 1) << calls;
  }
}

// Rank 0 queues in A and then in B, rank 1 in B and then in A; each polls the one queued last.
TEST(Engine, GroupsProgressIndependently) {
  run_world(2, [](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
    std::shared_ptr<Group> a = host.group(context, rank, 2, "a"),
                           b = host.group(context, rank, 2, "b");
    for (int round = 0; round < 50; ++round) {
      int64_t one_value = 1, two_value = 1;
      Group& first = rank == 0 ? *a : *b;
      Group& second = rank == 0 ? *b : *a;
      OperationPtr one = first.start(kSum, sum_of(&one_value), milliseconds(0));
      OperationPtr two = second.start(kSum, sum_of(&two_value), milliseconds(0));
      while (!two->done()) std::this_thread::yield();
      ASSERT_TRUE(one->wait().ok());
      EXPECT_EQ(one_value, 2);
      EXPECT_EQ(two_value, 2);
    }
    EXPECT_TRUE(a->shutdown().ok());
    EXPECT_TRUE(b->shutdown().ok());
  });
}

TEST(Engine, CallbackMayStartAnotherCall) {
  run_world(2, [](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
    std::shared_ptr<Group> group = host.group(context, rank, 2);
    int64_t x = 1, y = 1;
    std::promise<Status> nested;
    OperationPtr first = group->start(kSum, sum_of(&x), milliseconds(0));
    first->when_done([&](const Status& status) {
      EXPECT_TRUE(status.ok());
      nested.set_value(group->run(kSum, sum_of(&y), milliseconds(0)));
    });
    EXPECT_TRUE(nested.get_future().get().ok());
    EXPECT_EQ(x + y, 4);
    EXPECT_TRUE(group->shutdown().ok());
  });
}

TEST(Engine, OperationContinuesAfterTimedOutWait) {
  std::atomic<bool> go{false};
  run_world(2, [&](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
    std::shared_ptr<Group> group = host.group(context, rank, 2);
    int64_t x = 1;
    if (rank == 1)
      while (!go) std::this_thread::yield();
    OperationPtr operation = group->start(kSum, sum_of(&x), milliseconds(0));
    if (rank == 0) {
      EXPECT_EQ(operation->wait(milliseconds(20)).code(), Code::kTimeout);
      EXPECT_FALSE(operation->done());
      go = true;
    }
    EXPECT_TRUE(operation->wait().ok());
    EXPECT_EQ(x, 2);
    EXPECT_TRUE(group->shutdown().ok());
  });
}

TEST(Engine, AbortFailsQueuedAndLaterCalls) {
  run_world(2, [](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
    std::shared_ptr<Group> group = host.group(context, rank, 2);
    std::shared_ptr<Group> other = host.group(context, rank, 2, "other");
    int64_t x = 1, y = 1;
    if (rank == 0) {
      OperationPtr one = group->start(kSum, sum_of(&x), milliseconds(0));
      OperationPtr two = group->start(kSum, sum_of(&y), milliseconds(0));
      group->abort("the test wants it");
      EXPECT_EQ(one->wait().code(), Code::kAborted);
      EXPECT_EQ(two->wait().code(), Code::kAborted);
    }
    // Rank 1 starts after the abort, so its call cannot have finished before it.
    while (rank == 1 && group->failure().ok()) std::this_thread::yield();
    Status status = group->run(kSum, sum_of(&x), milliseconds(0));
    EXPECT_EQ(status.code(), Code::kAborted);
    EXPECT_NE(status.message().find("aborted by rank 0: the test wants it"), std::string::npos)
        << status.message();
    EXPECT_EQ(group->failure().code(), Code::kAborted);
    // Other groups go on.
    EXPECT_TRUE(other->run(kSum, sum_of(&y), milliseconds(0)).ok());
    EXPECT_TRUE(group->shutdown().ok());
    EXPECT_TRUE(other->shutdown().ok());
  });
}

// Calls that were queued when the group ended report its cause as their own.
TEST(Engine, CallAfterGroupEndReportsEarlierCause) {
  std::atomic<bool> all_queued{false};
  run_world(2, [&all_queued](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
    std::shared_ptr<Group> group = host.group(context, rank, 2);
    int64_t x = 1, y = 1;
    OperationPtr one = group->start(kSum, sum_of(&x), milliseconds(0));
    EXPECT_TRUE(one->wait().ok());
    if (rank == 1) {
      while (!all_queued) std::this_thread::yield();
      group->abort("the test wants it");
      EXPECT_TRUE(group->shutdown().ok());
      return;
    }
    std::vector<OperationPtr> queued;
    for (int k = 0; k < 2; ++k) queued.push_back(group->start(kSum, sum_of(&x), milliseconds(0)));
    all_queued = true;
    const std::string first =
        "group '" + group->name() + "' was aborted by rank 1: the test wants it";
    const std::string later = "group '" + group->name() + "' ended earlier: " + first;
    EXPECT_EQ(queued[1]->wait().message(), first);
    EXPECT_EQ(queued[0]->wait().message(), first);
    for (int k = 0; k < 2; ++k) {
      EXPECT_EQ(group->run(kSum, sum_of(&y), milliseconds(0)).message(), later);
      EXPECT_EQ(group->start(kSum, sum_of(&y), milliseconds(0))->wait().message(), later);
      EXPECT_EQ(group->refuse(group->failure()).message(), later);
      EXPECT_EQ(group->blocking_send(&y, 1, DType::kInt64, 1, 0, milliseconds(0)).message(), later);
      EXPECT_EQ(group->blocking_receive(&y, 1, DType::kInt64, 1, 0, milliseconds(0)).message(),
                later);
      EXPECT_EQ(group->send(&y, 1, DType::kInt64, 1, 0, nullptr, milliseconds(0))->wait().message(),
                later);
    }
    EXPECT_EQ(group->failure().message(), first);
    EXPECT_TRUE(group->shutdown().ok());
    EXPECT_EQ(group->run(kSum, sum_of(&y), milliseconds(0)).message(),
              "group '" + group->name() + "' has been destroyed on this rank");
  });
}

// Many receives fail in one batch, on the worker. This thread calls as soon as one of them is done,
// before the callbacks of the batch.
TEST(Engine, CallRightAfterFailedMessageReportsEarlierCause) {
  run_world(2, [](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
    std::shared_ptr<Group> group = host.group(context, rank, 2);
    int64_t x = 1;
    if (rank == 0) {
      std::vector<int64_t> values(500);
      std::vector<OperationPtr> pending;
      for (int64_t& value : values)
        pending.push_back(group->receive(&value, 1, DType::kInt64, 1, 7, nullptr, milliseconds(0)));
      EXPECT_TRUE(
          group->blocking_send(&x, 1, DType::kInt64, 1, 0, milliseconds(0)).ok());  // all pending
      const auto is_done = [](const OperationPtr& operation) { return operation->done(); };
      while (std::none_of(pending.begin(), pending.end(), is_done)) std::this_thread::yield();
      const std::string first =
          "group '" + group->name() + "' was aborted by rank 1: the test wants it";
      EXPECT_EQ(group->run(kSum, sum_of(&x), milliseconds(0)).message(),
                "group '" + group->name() + "' ended earlier: " + first);
      for (const OperationPtr& operation : pending) EXPECT_EQ(operation->wait().message(), first);
      pending.clear();
      // The callbacks hold the group, and with it the Context, which must not end on its worker.
      const Deadline deadline = Deadline::after(seconds(60));
      while (group.use_count() > 1 && !deadline.expired()) std::this_thread::yield();
      EXPECT_EQ(group.use_count(), 1);
    } else {
      EXPECT_TRUE(group->blocking_receive(&x, 1, DType::kInt64, 0, 0, milliseconds(0)).ok());
      group->abort("the test wants it");
    }
    EXPECT_TRUE(group->shutdown().ok());
  });
}

TEST(Engine, ErrorNamesPeerThatLeftBeforeItsFirstCall) {
  run_world(2, [](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
    std::shared_ptr<Group> group = host.group(context, rank, 2);
    if (rank == 0) {
      int64_t x = 1;
      const Status status = group->run(kSum, sum_of(&x), milliseconds(0));
      EXPECT_NE(status.message().find(
                    " left the group before its first call; every rank must make the same calls"),
                std::string::npos)
          << status.message();
    }
    EXPECT_TRUE(group->shutdown().ok());
  });
}

TEST(Engine, ExceptionInCallFailsGroupButNotProcess) {
  run_world(2, [](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
    std::shared_ptr<Group> group = host.group(context, rank, 2);
    int64_t x = 1;
    Status status;
    if (rank == 0)
      status =
          group
              ->start(
                  kSum,
                  [](Team&, const CallOptions&) -> Status { throw std::runtime_error("oops"); },
                  milliseconds(0))
              ->wait();
    else
      status = group->run(kSum, sum_of(&x), milliseconds(0));
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_NE(status.message().find("oops"), std::string::npos);
    EXPECT_TRUE(group->shutdown().ok());
  });
}

TEST(Engine, ShutdownFinishesQueueAndRefusesLaterCalls) {
  run_world(2, [](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
    std::shared_ptr<Group> group = host.group(context, rank, 2);
    std::vector<int64_t> values(100, 1);
    std::vector<OperationPtr> operations;
    for (int64_t& value : values)
      operations.push_back(group->start(kSum, sum_of(&value), milliseconds(0)));
    EXPECT_TRUE(group->shutdown().ok());
    for (const OperationPtr& operation : operations)
      EXPECT_TRUE(operation->done() && operation->status().ok());
    EXPECT_EQ(values, std::vector<int64_t>(100, 2));
    EXPECT_TRUE(group->shutdown().ok());
    EXPECT_EQ(group->run(kSum, sum_of(&values[0]), milliseconds(0)).code(), Code::kInvalidArgument);
  });
}

TEST(Engine, SingleRankGroupReducesAndRefusesSend) {
  run_world(1, [](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
    std::shared_ptr<Group> group = host.group(context, rank, 1);
    int64_t x = 7;
    EXPECT_TRUE(group->run(kSum, sum_of(&x), milliseconds(0)).ok());
    EXPECT_EQ(x, 7);
    EXPECT_EQ(group->send(&x, 1, DType::kInt64, 0, 0, nullptr, milliseconds(0))->status().code(),
              Code::kInvalidArgument);
  });
}

TEST(Engine, RecorderKeepsLatestOperations) {
  run_world(1, [](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
    std::shared_ptr<Group> group = host.group(context, rank, 1);
    int64_t x = 7;
    for (int i = 0; i < 300; ++i) ASSERT_TRUE(group->run(kSum, sum_of(&x), milliseconds(0)).ok());
    std::string json = group->flight_record_json();
    EXPECT_NE(
        json.find("{\"id\": 300, \"title\": \"all_reduce\", \"dtype\": \"int64\", \"op\": \"SUM\""),
        std::string::npos)
        << json;
    EXPECT_NE(json.find("\"id\": 45,"), std::string::npos);
    EXPECT_EQ(json.find("\"id\": 44,"), std::string::npos);
    EXPECT_NE(json.find("\"state\": \"completed\""), std::string::npos);
  });
}

TEST(Engine, RecorderUsesWallClockTimes) {
  run_world(1, [](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
    std::shared_ptr<Group> group = host.group(context, rank, 1);
    int64_t x = 7, inside = 0;
    const int64_t before = wall_clock_ns();
    ASSERT_TRUE(group->run(kSum, sum_of(&x), milliseconds(0)).ok());
    auto body = [&](Team&, const CallOptions&) {
      std::this_thread::sleep_for(milliseconds(20));
      inside = wall_clock_ns();
      std::this_thread::sleep_for(milliseconds(20));
      return Status();
    };
    ASSERT_TRUE(group->start(kSum, body, milliseconds(0))->wait().ok());
    const int64_t after = wall_clock_ns();
    std::this_thread::sleep_for(milliseconds(20));
    const std::string json = group->flight_record_json();
    const std::vector<int64_t> queued = numbers_of(json, "queued_ns"),
                               started = numbers_of(json, "started_ns"),
                               finished = numbers_of(json, "finished_ns");
    ASSERT_EQ(finished.size(), 2u) << json;
    const int64_t slack = 10'000'000;  // the clocks are read at slightly different times
    EXPECT_LE(before - slack, queued[0]);
    EXPECT_EQ(queued[0], started[0]);
    EXPECT_LE(started[0], finished[0]);
    EXPECT_LE(finished[0], queued[1]);
    EXPECT_LE(queued[1], started[1]);
    EXPECT_LE(started[1], inside - slack);
    EXPECT_LE(inside + slack, finished[1]);
    EXPECT_LE(finished[1], after + slack);
  });
}

TEST(Engine, SynchronousCallAllocatesNoMemory) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "AddressSanitizer's operators new do not count";
#endif
  run_world(1, [](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
    std::shared_ptr<Group> group = host.group(context, rank, 1);
    int64_t x = 7;
    auto body = [&x](Team& team, const CallOptions& options) {
      return team.all_reduce(&x, &x, 1, kInt64Sum, options);
    };
    ASSERT_TRUE(group->run(kSum, body, milliseconds(0)).ok());
    const uint64_t before = allocations_of_this_thread;
    for (int i = 0; i < 1000; ++i) ASSERT_TRUE(group->run(kSum, body, milliseconds(0)).ok());
    EXPECT_EQ(allocations_of_this_thread, before);
    const auto counted = std::make_unique<int>(1);
    EXPECT_EQ(allocations_of_this_thread, before + 1);
  });
}

// Several threads call in a group of one rank while others wait for the group to be idle; calls
// must never overlap. Then the group is shut down while calls continue.
TEST(Engine, CallsOfSeveralThreadsDuringShutdownDoNotOverlap) {
  run_world(1, [](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
    for (int round = 0; round < 20; ++round) {
      std::shared_ptr<Group> group = host.group(context, rank, 1, std::to_string(round));
      std::atomic<int> inside{0}, made{0};
      std::atomic<bool> end{false};
      auto body = [&](Team&, const CallOptions&) {
        EXPECT_EQ(inside.fetch_add(1), 0);
        made.fetch_add(1);
        inside.fetch_sub(1);
        return Status();
      };
      std::atomic<int> accepted{0};
      std::vector<std::thread> threads;
      for (int k = 0; k < 3; ++k)
        threads.emplace_back([&, k] {
          std::vector<OperationPtr> operations;
          for (int i = 0;; ++i) {
            if (k == 0 || i % 3 != 0) {
              if (!group->run(kSum, body, milliseconds(0)).ok()) break;
            } else {
              operations.push_back(group->start(kSum, body, milliseconds(0)));
              if (operations.back()->refused()) break;
            }
            accepted.fetch_add(1);
          }
          for (const OperationPtr& operation : operations) static_cast<void>(operation->wait());
          EXPECT_TRUE(end);
        });
      threads.emplace_back([&] {
        while (!end) static_cast<void>(group->idle_within(milliseconds(1)));
      });
      while (made < 300) std::this_thread::yield();
      end = true;
      EXPECT_TRUE(group->shutdown().ok());
      const int made_at_end = made;
      EXPECT_TRUE(group->idle_within(milliseconds(0)));
      for (std::thread& thread : threads) thread.join();
      EXPECT_EQ(made, made_at_end);
      EXPECT_EQ(made, accepted);
      EXPECT_EQ(group->sequence(), static_cast<uint64_t>(made.load()));
    }
  });
}

TEST(Engine, GroupCanBeMadeAgainUnderItsNameAfterShutdown) {
  run_world(2, [](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
    for (int64_t i = 0; i < 20; ++i) {
      std::shared_ptr<Group> group = host.group(context, rank, 2, "default");
      int64_t x = i;
      ASSERT_TRUE(group->run(kSum, sum_of(&x), milliseconds(0)).ok());
      ASSERT_EQ(x, 2 * i);
      EXPECT_TRUE(group->shutdown().ok());
    }
  });
}

// Fails twice, then works: a rank that cannot begin still counts as having tried.
TEST(Engine, DeclineCauseReachesAllOtherRanks) {
  std::barrier told(3);
  run_world(3, [&told](InProcessHost& host, std::shared_ptr<Context> context, int rank) {
    for (int round = 0; round < 2; ++round) {
      if (rank == 1) {
        host.decline(rank, 3, "world", Status(Code::kResource, "no thread is left"));
        told.arrive_and_wait();
        continue;
      }
      Result<std::shared_ptr<Group>> group =
          host.try_group(context, InProcessHost::options(rank, 3, "world", seconds(60)));
      EXPECT_EQ(group.status().code(), Code::kResource) << group.status().message();
      EXPECT_NE(group.status().message().find("rank 1 (pid"), std::string::npos);
      EXPECT_NE(group.status().message().find("no thread is left"), std::string::npos);
      told.arrive_and_wait();
    }
    std::shared_ptr<Group> group = host.group(context, rank, 3);
    int64_t x = rank;
    ASSERT_TRUE(group->run(kSum, sum_of(&x), milliseconds(0)).ok());
    EXPECT_EQ(x, 3);
    EXPECT_TRUE(group->shutdown().ok());
  });
}

std::atomic<int> ended_threads{0};

struct CountsEndOfThread {
  ~CountsEndOfThread() { ++ended_threads; }
};

TEST(WorkerPool, GrowsWithBlockedTasksAndShrinksWhenIdle) {
  WorkerPool pool(milliseconds(20));
  std::promise<void> release;
  std::shared_future<void> released = release.get_future().share();
  std::atomic<int> started{0};
  for (int i = 0; i < 5; ++i)
    ASSERT_TRUE(pool.submit([&, released] {
                      thread_local CountsEndOfThread end;
                      ++started;
                      released.wait();
                    })
                    .ok());
  while (started < 5) std::this_thread::yield();  // five threads, as each task blocks its own
  EXPECT_EQ(ended_threads, 0);
  release.set_value();
  while (ended_threads < 5) std::this_thread::sleep_for(milliseconds(5));
}

}  // namespace
}  // namespace dscomm::test
