// The file of a flight record: its text, its size limit, and groups that are gone.
#include "core/engine/flight_record.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>

#include "json_numbers.h"

namespace dscomm {
namespace {

RecordedOperation operation_of(const char* title, uint64_t sequence, OperationState state) {
  RecordedOperation operation;
  operation.id = operation.sequence = sequence;
  operation.info.title = title;
  operation.info.dtype = DType::kFloat32;
  operation.info.count = 6;
  operation.state = state;
  operation.queued_ns = operation.started_ns = operation.finished_ns =
      static_cast<int64_t>(sequence);
  return operation;
}

GroupRecord group_of(const std::string& name, int rank = 0) {
  GroupRecord group;
  group.name = name;
  group.global_ranks = {0, 1, 5};
  group.global_rank = group.global_ranks[static_cast<size_t>(rank)];
  return group;
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(FlightRecord, JsonStringsAreEscaped) {
  GroupRecord group = group_of("a\"b\\c\n");
  group.failure = Status(Code::kTimeout, "tab\tend");
  const std::string text = flight_record_text({group}, "\"why\"");
  EXPECT_NE(text.find("\"a\\\"b\\\\c\\u000a\": \"tab\\u0009end\""), std::string::npos) << text;
  EXPECT_NE(text.find("\"reason\": \"\\\"why\\\"\""), std::string::npos) << text;
}

TEST(FlightRecord, OperationsOfAllGroupsAreSortedByTime) {
  GroupRecord one = group_of("0"), other = group_of("1");
  one.operations = {operation_of("all_reduce", 1, OperationState::kCompleted),
                    operation_of("all_gather", 4, OperationState::kFailed),
                    operation_of("send", 5, OperationState::kRunning)};
  other.operations = {operation_of("reduce_scatter", 2, OperationState::kRunning),
                      operation_of("barrier", 3, OperationState::kQueued)};
  const std::string text = flight_record_text({one, other}, "");
  EXPECT_EQ(numbers_of(text, "record_id"), (std::vector<int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(numbers_of(text, "collective_seq_id"), (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(count(text, "\"state\": \"started\""), 2u) << text;  // a failed call has not completed
  EXPECT_EQ(count(text, "\"state\": \"scheduled\""), 1u) << text;
  EXPECT_EQ(count(text, "\"output_sizes\": [[18]]"), 1u) << text;  // of three ranks
  EXPECT_EQ(count(text, "\"output_sizes\": [[2]]"), 1u) << text;
  EXPECT_EQ(count(text, "\"title\": \"send\""), 1u) << text;
  EXPECT_EQ(numbers_of(text, "last_started_collective"), (std::vector<int64_t>{4, 2}));
  EXPECT_EQ(numbers_of(text, "last_completed_collective"), (std::vector<int64_t>{1, 0}));
}

TEST(FlightRecord, NewestOperationsAreKept) {
  GroupRecord group = group_of("0");
  for (uint64_t k = 1; k <= 10'100; ++k)
    group.operations.push_back(operation_of("all_reduce", k, OperationState::kCompleted));
  const std::string text = flight_record_text({group}, "");
  EXPECT_NE(text.find("\"operations_left_out\": 100,"), std::string::npos);
  EXPECT_EQ(count(text, "\"collective_seq_id\": "), 10'000u);
  EXPECT_EQ(count(text, "\"collective_seq_id\": 100,"), 0u);
  EXPECT_EQ(count(text, "\"collective_seq_id\": 10100,"), 1u);
}

struct Told final : RecordedGroup {
  explicit Told(GroupRecord given) : record(std::move(given)) {}
  bool fill(GroupRecord* into) const override {
    *into = record;
    return !closed;
  }
  GroupRecord record;
  bool closed = false;
};

TEST(FlightRecord, EachRankOfTheProcessWritesFileOfItsOpenGroups) {
  const std::string folder =
      ::testing::TempDir() + "/flight_record_test." + std::to_string(getpid());
  FlightRecord record(folder);
  auto first = std::make_shared<Told>(group_of("0", 0));
  auto second = std::make_shared<Told>(group_of("0", 2));
  auto closed = std::make_shared<Told>(group_of("closed", 0));
  auto gone = std::make_shared<Told>(group_of("gone", 0));
  closed->closed = true;
  for (const auto& group : {first, second, closed, gone}) record.add(group);
  gone.reset();
  record.write("asked");
  record.write("asked again");
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::stringstream text;
    text << std::ifstream(entry.path()).rdbuf();
    EXPECT_NE(text.str().find("asked again"), std::string::npos);
    EXPECT_EQ(text.str().find("closed"), std::string::npos);
    EXPECT_EQ(text.str().find("gone"), std::string::npos);
    ++files;
  }
  EXPECT_EQ(files, 2u);
  EXPECT_TRUE(std::filesystem::exists(folder + "/flight_record_0.json"));
  EXPECT_TRUE(std::filesystem::exists(folder + "/flight_record_5.json"));
  std::filesystem::remove_all(folder);
}

TEST(FlightRecord, RecordWithoutFolderIsDisabled) {
  FlightRecord record("");
  EXPECT_FALSE(record.enabled());
  record.add(std::make_shared<Told>(group_of("0")));
  record.write("asked");
}

}  // namespace
}  // namespace dscomm
