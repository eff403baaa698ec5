// Messages when members leave, die, abort, are late, share a process, or are stopped.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <numeric>
#include <thread>

#include "core/base/deadline.h"
#include "in_process_host.h"

namespace dscomm::test {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLong{60'000};

Status send(Group& group, int64_t number, int to, int tag = 0) {
  return group.send(&number, 1, DType::kInt64, to, tag, nullptr, milliseconds(0))->wait();
}

OperationPtr receive(Group& group, int64_t* number, int from, int tag = 0,
                     milliseconds timeout = milliseconds(0)) {
  return group.receive(number, 1, DType::kInt64, from, tag, nullptr, timeout);
}

#define EXPECT_STATUS_OK(expression)                \
  do {                                              \
    Status status_ = (expression);                  \
    EXPECT_TRUE(status_.ok()) << status_.message(); \
  } while (0)

#define EXPECT_NUMBER(group, from, expected)                  \
  do {                                                        \
    int64_t number_ = -1;                                     \
    EXPECT_STATUS_OK(receive(group, &number_, from)->wait()); \
    EXPECT_EQ(number_, expected);                             \
  } while (0)

void expect_failure(const Status& status, Code code, std::initializer_list<const char*> parts) {
  EXPECT_EQ(status.code(), code) << status.message();
  for (const char* part : parts)
    EXPECT_NE(status.message().find(part), std::string::npos)
        << "no '" << part << "' in: " << status.message();
}

// Rank 0 sends in one group and ends; rank 1 closes another group of the two before it receives.
// Messages in the other group go before or after.
void expect_last_messages_survive(int64_t earlier, int64_t later = 0) {
  InProcessHost host;
  std::shared_ptr<Context> zero = host.process(), one = host.process();
  auto first = host.groups({zero, one}, "first"), second = host.groups({zero, one}, "second");
  for (int64_t n = 0; n < earlier; ++n) {
    EXPECT_STATUS_OK(send(*first[0], n, 1));
    EXPECT_NUMBER(*first[1], 0, n);
  }
  EXPECT_STATUS_OK(send(*second[0], 101, 1));
  EXPECT_STATUS_OK(send(*second[0], 102, 1));
  for (int64_t n = 0; n < later; ++n) {
    EXPECT_STATUS_OK(send(*first[0], n, 1));
    EXPECT_NUMBER(*first[1], 0, n);
  }
  for (auto* group : {&first[0], &second[0]}) {
    EXPECT_TRUE((*group)->shutdown().ok());
    group->reset();
  }
  zero.reset();  // rank 0's process ends
  EXPECT_TRUE(first[1]->shutdown().ok());
  first[1].reset();
  EXPECT_NUMBER(*second[1], 0, 101);
  EXPECT_NUMBER(*second[1], 0, 102);
}

TEST(MessageFaults, MessagesOfADeadRankSurviveTheEndOfAnotherGroup) {
  expect_last_messages_survive(1);
}

TEST(MessageFaults, MessagesOfADeadRankSurviveTheEndOfAMuchUsedGroup) {
  expect_last_messages_survive(100);
}

TEST(MessageFaults, MessagesOfADeadRankSurviveTheEndOfAnUnusedGroup) {
  expect_last_messages_survive(0);
}

TEST(MessageFaults, BufferedMessagesOfADeadRankSurviveTheEndOfAnotherGroup) {
  expect_last_messages_survive(0, 1);
}

TEST(MessageFaults, MessagesBetweenThreeRanksInOneProcessReachTheRightRank) {
  InProcessHost host;
  std::shared_ptr<Context> process = host.process();
  auto group = host.groups({process, process, process}, "threads");
  for (int64_t round = 0; round < 50; ++round)
    run_ranks(3, [&](int rank) {
      Group& own = *group[static_cast<size_t>(rank)];
      if (rank == 0) {
        EXPECT_STATUS_OK(send(own, 10 + round, 1));
        EXPECT_STATUS_OK(send(own, 20 + round, 2));
        EXPECT_NUMBER(own, 1, 30 + round);
        EXPECT_NUMBER(own, 2, 40 + round);
      } else {
        EXPECT_NUMBER(own, 0, 10 * rank + round);
        EXPECT_STATUS_OK(send(own, 20 + 10 * rank + round, 0));
      }
    });
}

TEST(MessageFaults, TwoProcessesOfTwoRanksExchangeLargeMessages) {
  InProcessHost host;
  std::shared_ptr<Context> one = host.process(), other = host.process();
  auto group = host.groups({one, other, one, other}, "mixed");
  run_ranks(4, [&](int rank) {
    Group& own = *group[static_cast<size_t>(rank)];
    constexpr size_t kCount = 300'000;
    std::vector<std::vector<int32_t>> in(4, std::vector<int32_t>(kCount)), out = in;
    std::vector<OperationPtr> calls;
    for (int peer = 0; peer < 4; ++peer) {
      if (peer == rank) continue;
      const auto k = static_cast<size_t>(peer);
      std::fill(out[k].begin(), out[k].end(), 10 * rank + peer);
      calls.push_back(own.receive(in[k].data(), kCount, DType::kInt32, peer, 3, nullptr, kLong));
      calls.push_back(own.send(out[k].data(), kCount, DType::kInt32, peer, 3, nullptr, kLong));
    }
    for (const OperationPtr& call : calls) EXPECT_STATUS_OK(call->wait());
    for (int peer = 0; peer < 4; ++peer)
      if (peer != rank)
        EXPECT_EQ(in[static_cast<size_t>(peer)], std::vector<int32_t>(kCount, 10 * peer + rank));
  });
}

TEST(MessageFaults, MessagesSurviveShutdownOfOneRankOfTheProcess) {
  InProcessHost host;
  std::shared_ptr<Context> process = host.process();
  auto group = host.groups({process, process, process}, "threads");
  EXPECT_STATUS_OK(send(*group[0], 1, 1));
  EXPECT_STATUS_OK(send(*group[0], 2, 2));
  int64_t number = 0;
  OperationPtr pending = receive(*group[2], &number, 1);
  EXPECT_TRUE(group[0]->shutdown().ok());
  EXPECT_NUMBER(*group[1], 0, 1);
  EXPECT_STATUS_OK(send(*group[1], 3, 2));
  EXPECT_STATUS_OK(pending->wait());
  EXPECT_EQ(number, 3);
  EXPECT_NUMBER(*group[2], 0, 2);
  expect_failure(send(*group[1], 4, 0), Code::kPeerLeft, {"rank 0", "left the group"});
}

TEST(MessageFaults, AnySourceReceiveContinuesWhileARankCanSend) {
  InProcessHost host;
  std::vector<std::shared_ptr<Context>> processes = {host.process(), host.process(),
                                                     host.process()};
  auto group = host.groups(processes, "world");
  EXPECT_STATUS_OK(send(*group[1], 7, 0));
  EXPECT_NUMBER(*group[0], -1, 7);
  int64_t number = 0;
  OperationPtr any = receive(*group[0], &number, -1);
  // Rank 1 dies without leaving the group.
  host.die(processes[1]);
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_FALSE(any->done()) << any->status().message();
  EXPECT_STATUS_OK(send(*group[2], 8, 0));
  EXPECT_STATUS_OK(any->wait());
  EXPECT_EQ(number, 8);
  expect_failure(receive(*group[0], &number, -1, 0, milliseconds(100))->wait(), Code::kTimeout,
                 {"timed out", "rank 1", "died"});
}

TEST(MessageFaults, MessagesSentBeforeAbortAreReceived) {
  InProcessHost host;
  auto group = host.groups({host.process(), host.process()}, "world");
  int64_t number = 0;
  OperationPtr pending = receive(*group[0], &number, 1, 3);
  EXPECT_STATUS_OK(send(*group[1], 5, 0));
  EXPECT_STATUS_OK(send(*group[1], 6, 0));
  EXPECT_STATUS_OK(send(*group[1], 7, 0, 3));
  group[1]->abort("that is all");
  EXPECT_STATUS_OK(pending->wait());
  EXPECT_EQ(number, 7);
  EXPECT_NUMBER(*group[0], 1, 5);
  EXPECT_NUMBER(*group[0], 1, 6);
  expect_failure(receive(*group[0], &number, 1)->wait(), Code::kAborted, {"that is all"});
  expect_failure(send(*group[0], 8, 1), Code::kAborted, {"that is all"});
}

TEST(MessageFaults, ReceiveAfterMismatchGetsEarlierMessages) {
  InProcessHost host;
  auto group = host.groups({host.process(), host.process()}, "world");
  for (int64_t n : {5, 6}) EXPECT_STATUS_OK(send(*group[1], n, 0));
  EXPECT_STATUS_OK(send(*group[1], 7, 0, 3));
  run_ranks(2, [&](int rank) {
    const auto sum = [&](Team& team, const CallOptions& options) {
      std::vector<int64_t> numbers(static_cast<size_t>(1 + rank), 1);
      return team.all_reduce(numbers.data(), numbers.data(), numbers.size(), {DType::kInt64},
                             options);
    };
    Group& own = *group[static_cast<size_t>(rank)];
    EXPECT_EQ(own.run({.title = "all_reduce"}, sum, milliseconds(0)).code(), Code::kMismatch);
  });
  EXPECT_NUMBER(*group[0], 1, 5);
  EXPECT_NUMBER(*group[0], -1, 6);
  int64_t number = 0;
  expect_failure(send(*group[1], 8, 0), Code::kMismatch, {"called different things"});
  expect_failure(receive(*group[0], &number, 1)->wait(), Code::kMismatch,
                 {"called different things"});
  // The failure also applies to messages that have arrived.
  expect_failure(receive(*group[0], &number, 1, 3)->wait(), Code::kMismatch,
                 {"called different things"});
}

// A tensor of a pool, which peers read in place.
struct PoolTensor {
  PoolTensor(const std::shared_ptr<Context>& context, size_t elements)
      : pool(context->pool()),
        data(reinterpret_cast<int64_t*>(pool->allocate(elements * sizeof(int64_t)).value())) {}
  ~PoolTensor() { pool->release(reinterpret_cast<std::byte*>(data)); }
  std::shared_ptr<TensorPool> pool;
  int64_t* data;
};

TEST(MessageFaults, PoolTensorsAreReadInPlace) {
  InProcessHost host;
  Settings settings = small_settings();
  settings.in_place_bytes = 1 << 20;  // so that the measured distance of the cores does not matter
  std::shared_ptr<Context> zero = host.process(settings), one = host.process(settings);
  auto group = host.groups({zero, one}, "world");
  constexpr size_t kCount = 750'000;  // more than one pass copies
  PoolTensor tensor(zero, kCount);
  std::vector<int64_t> in(kCount);
  EXPECT_STATUS_OK(send(*group[0], 1, 1));
  EXPECT_NUMBER(*group[1], 0, 1);
  const size_t used = zero->arena()->used_bytes();
  for (int64_t round = 0; round < 4; ++round) {
    std::iota(tensor.data, tensor.data + kCount, round);
    run_ranks(2, [&](int rank) {
      if (rank == 0) {
        // In every other round the message arrives before its receive is posted.
        OperationPtr first =
            group[0]->send(tensor.data, kCount, DType::kInt64, 1, 4, nullptr, milliseconds(0));
        EXPECT_STATUS_OK(send(*group[0], round, 1, 5));
        EXPECT_STATUS_OK(first->wait());
        std::fill(tensor.data, tensor.data + kCount, -1);  // the caller may overwrite it again
        return;
      }
      if (round % 2 == 0) {
        int64_t number = 0;
        EXPECT_STATUS_OK(receive(*group[1], &number, 0, 5)->wait());
      }
      EXPECT_STATUS_OK(
          group[1]->blocking_receive(in.data(), kCount, DType::kInt64, 0, 4, milliseconds(0)));
      if (round % 2 == 1) {
        int64_t number = 0;
        EXPECT_STATUS_OK(receive(*group[1], &number, 0, 5)->wait());
      }
      for (size_t k = 0; k < kCount; k += 1000)
        ASSERT_EQ(in[k], round + static_cast<int64_t>(k)) << round;
    });
  }
  EXPECT_EQ(zero->arena()->used_bytes(), used);  // no buffer was allocated
}

// Calls in exit handlers take another code path than earlier calls.
TEST(MessageFaults, AnySourceReceiveDuringExitReportsTheSource) {
  InProcessHost host;
  auto group = host.groups({host.process(), host.process(), host.process()}, "world");
  EXPECT_STATUS_OK(send(*group[1], 7, 2, 0));
  group[2]->begin_exit();
  int64_t number = 0;
  int came_from = -1;
  EXPECT_STATUS_OK(
      group[2]->blocking_receive(&number, 1, DType::kInt64, -1, 0, milliseconds(0), &came_from));
  EXPECT_EQ(number, 7);
  EXPECT_EQ(came_from, 1);
}

TEST(MessageFaults, PendingInPlaceSendAtShutdownIsNotReceived) {
  InProcessHost host;
  std::shared_ptr<Context> zero = host.process(), one = host.process();
  auto group = host.groups({zero, one}, "world");
  constexpr size_t kCount = 100'000;
  PoolTensor tensor(zero, kCount);
  std::fill(tensor.data, tensor.data + kCount, 5);
  OperationPtr sent =
      group[0]->send(tensor.data, kCount, DType::kInt64, 1, 0, nullptr, milliseconds(0));
  EXPECT_FALSE(sent->done());  // not read yet
  EXPECT_TRUE(group[0]->shutdown().ok());
  expect_failure(sent->wait(), Code::kAborted, {"destroyed"});
  std::fill(tensor.data, tensor.data + kCount, 6);
  std::vector<int64_t> in(kCount);
  expect_failure(
      group[1]->blocking_receive(in.data(), kCount, DType::kInt64, 0, 0, milliseconds(0)),
      Code::kPeerLeft, {"rank 0 (", "left the group before all that it sent was received"});
}

// Runs in a separate process, which is stopped for longer than the receives' timeout.
void be_stopped() {
  InProcessHost host;
  auto group = host.groups({host.process(), host.process()}, "world", milliseconds(1500));
  int64_t waited_for = 0, left_to_worker = 0;
  OperationPtr first = receive(*group[0], &waited_for, 1, 1);
  OperationPtr second = receive(*group[0], &left_to_worker, 1, 2);
  Status status;
  std::thread waiter([&] { status = first->wait(); });
  std::this_thread::sleep_for(milliseconds(100));
  kill(getpid(), SIGSTOP);
  std::this_thread::sleep_for(milliseconds(300));
  bool good = send(*group[1], 9, 0, 1).ok() && send(*group[1], 10, 0, 2).ok();
  waiter.join();
  good &= status.ok() && waited_for == 9 && second->wait().ok() && left_to_worker == 10;
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  _exit(good ? 0 : 1);
}

TEST(MessageFaults, DeadlineExcludesTimeOfStoppedProcess) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    be_stopped();
  }
  int state = 0;
  ASSERT_EQ(waitpid(child, &state, WUNTRACED), child);
  ASSERT_TRUE(WIFSTOPPED(state));
  std::this_thread::sleep_for(milliseconds(3000));
  kill(child, SIGCONT);
  ASSERT_EQ(waitpid(child, &state, 0), child);
  EXPECT_EQ(state, 0);
}

}  // namespace
}  // namespace dscomm::test
