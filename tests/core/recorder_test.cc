// The flight recorder under concurrent threads. engine_test.cc tests its content.
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

TEST(Recorder, UpdateOfOverwrittenOperationDoesNotChangeNewerOperation) {
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

TEST(Recorder, RecorderWithoutEntriesKeepsNothing) {
  Recorder recorder(0);
  recorder.finished(recorder.started(send_of(1)), true);
  EXPECT_EQ(recorder.json(), "[]");
}

// The number of entries. Checks that all numbers in an entry belong to the same operation.
size_t whole_entries(const std::string& json) {
  const std::vector<int64_t> counts = numbers_of(json, "count");
  EXPECT_EQ(counts, numbers_of(json, "peer")) << json;
  EXPECT_EQ(counts, numbers_of(json, "tag")) << json;
  size_t at = 0;
  for (int64_t count : counts) {
    at = json.find("\"async\": ", at + 1);
    EXPECT_EQ(json.compare(at + 9, 4, count % 2 == 0 ? "true" : "fals"), 0) << json;
  }
  return counts.size();
}

// In a ring so small that entries are overwritten all the time.
TEST(Recorder, ConcurrentWritesLeaveEntriesConsistent) {
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
  while (at_work > 0) whole_entries(recorder.json());
  for (std::thread& thread : threads) thread.join();
  // All writers have ended, so all remaining operations have too.
  const std::string json = recorder.json();
  whole_entries(json);
  EXPECT_EQ(json.find("\"state\": \"running"), std::string::npos) << json;
  EXPECT_EQ(json.find("\"state\": \"queued"), std::string::npos) << json;
  for (int number = 1; number <= 4; ++number)
    recorder.finished(recorder.started(send_of(number)), true);
  EXPECT_EQ(whole_entries(recorder.json()), 4u) << recorder.json();
}

TEST(Recorder, RecorderKeepsAsManyOperationsAsEntries) {
  constexpr int kEntries = 256;
  Recorder recorder(kEntries);
  for (int number = 0; number < kEntries; ++number)
    recorder.finished(recorder.started(send_of(number)), true);
  EXPECT_EQ(whole_entries(recorder.json()), static_cast<size_t>(kEntries));
  recorder.started(send_of(kEntries));
  const std::string json = recorder.json();
  EXPECT_EQ(numbers_of(json, "id").front(), 2);
  EXPECT_EQ(numbers_of(json, "id").back(), kEntries + 1);
}

TEST(Recorder, SequencesBeyond32BitsAreKept) {
  constexpr uint64_t kWrap = uint64_t{1} << 32;
  Recorder recorder(4);
  for (const uint64_t sequence : {kWrap - 2, kWrap - 1, kWrap, kWrap + 1})
    recorder.started(send_of(1), sequence);
  std::vector<uint64_t> sequences;
  for (const RecordedOperation& operation : recorder.operations(kWrap + 1))
    sequences.push_back(operation.sequence);
  EXPECT_EQ(sequences, (std::vector<uint64_t>{kWrap - 2, kWrap - 1, kWrap, kWrap + 1}));
}

}  // namespace
}  // namespace dscomm
