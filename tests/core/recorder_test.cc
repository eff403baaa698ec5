// The flight recorder, attacked by threads. What it says of a group's operations is in
// engine_test.cc.
#include "core/engine/recorder.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "json_numbers.h"

namespace dscomm {
namespace {

OperationInfo send_of(int number) {
  OperationInfo info;
  info.title = "send";
  info.count = info.tag = info.peer = number;
  info.asynchronous = number % 2 == 0;
  return info;
}

TEST(Recorder, AnOperationThatWasOverwrittenChangesNoOther) {
  Recorder recorder(1);
  const uint64_t first = recorder.queued(send_of(1));
  const uint64_t second = recorder.queued(send_of(2));
  recorder.running(first);
  recorder.finished(first, false);
  EXPECT_NE(recorder.json().find("\"count\": 2"), std::string::npos) << recorder.json();
  EXPECT_NE(recorder.json().find("\"state\": \"queued\""), std::string::npos) << recorder.json();
  EXPECT_EQ(numbers_of(recorder.json(), "started_ns"), std::vector<int64_t>{0});
  recorder.running(second);
  EXPECT_NE(recorder.json().find("\"state\": \"running\""), std::string::npos) << recorder.json();
  recorder.finished(second, false);
  EXPECT_NE(recorder.json().find("\"state\": \"failed\""), std::string::npos) << recorder.json();
}

TEST(Recorder, WithoutEntriesItKeepsNothing) {
  Recorder recorder(0);
  recorder.finished(recorder.started(send_of(1)), true);
  EXPECT_EQ(recorder.json(), "[]");
}

// In a ring so small that entries are overwritten all the time.
TEST(Recorder, EntriesAreWholeWhileThreadsWriteThem) {
  constexpr int kThreads = 3, kOperations = 20000;
  Recorder recorder(4);
  std::atomic<int> at_work{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < kOperations; ++i) {
        const OperationInfo info = send_of(i * kThreads + t);
        const uint64_t ticket = i % 3 == 0 ? recorder.queued(info) : recorder.started(info);
        if (i % 3 == 0) recorder.running(ticket);
        recorder.finished(ticket, i % 5 != 0);
      }
      --at_work;
    });
  size_t seen = 0;
  do {
    const std::string json = recorder.json();
    const std::vector<int64_t> ids = numbers_of(json, "id"), counts = numbers_of(json, "count");
    ASSERT_EQ(counts, numbers_of(json, "peer")) << json;
    ASSERT_EQ(counts, numbers_of(json, "tag")) << json;
    for (size_t k = 1; k < ids.size(); ++k) ASSERT_LT(ids[k - 1], ids[k]) << json;
    seen += ids.size();
  } while (at_work > 0);
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(seen, 0u);
  // Nobody writes any more: what is kept is of the last ones, and has ended.
  const std::string json = recorder.json();
  for (int64_t id : numbers_of(json, "id")) EXPECT_GT(id, kThreads * kOperations - 4) << json;
  EXPECT_EQ(json.find("\"state\": \"running"), std::string::npos) << json;
  EXPECT_EQ(json.find("\"state\": \"queued\""), std::string::npos) << json;
}

}  // namespace
}  // namespace dscomm
