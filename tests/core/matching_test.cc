// Matching: which receive takes which message.
#include "core/messages/matching.h"

#include <gtest/gtest.h>

#include <vector>

namespace dscomm {
namespace {

struct Receive {
  int peer = -1, tag = 0;
};
struct SentMessage {
  int source = 0, tag = 0;
};
using Queues = Matching<const Receive*, const SentMessage*>;

std::vector<const SentMessage*> held(const Queues& queues) {
  std::vector<const SentMessage*> all;
  queues.for_each_message([&](const SentMessage* message) { all.push_back(message); });
  return all;
}

TEST(Matching, ReceivesOfATagMatchInPostingOrder) {
  Queues queues;
  const Receive any{-1, 5}, named{2, 5}, other_tag{2, 6};
  for (const Receive* receive : {&other_tag, &any, &named}) queues.post(receive);
  EXPECT_EQ(queues.find_receive(2, 5), &any);
  queues.erase_receive(&any);
  EXPECT_EQ(queues.find_receive(1, 5), nullptr);
  EXPECT_EQ(queues.find_receive(2, 5), &named);
  EXPECT_EQ(queues.find_receive(2, 6), &other_tag);
  EXPECT_EQ(queues.find_receive(2, 7), nullptr);
}

TEST(Matching, MessagesOfATagMatchInArrivalOrder) {
  Queues queues;
  const SentMessage first{3, 5}, second{1, 5}, third{3, 5}, other_tag{1, 6};
  for (const SentMessage* message : {&other_tag, &first, &second, &third}) queues.hold(message);
  const Receive any{-1, 5}, from_one{1, 5}, from_two{2, 5}, of_other_tag{-1, 6};
  EXPECT_EQ(queues.find_message(&any), &first);
  EXPECT_EQ(queues.find_message(&from_one), &second);
  EXPECT_EQ(queues.find_message(&from_two), nullptr);
  EXPECT_EQ(queues.find_message(&of_other_tag), &other_tag);
  queues.erase_message(&first);
  EXPECT_EQ(queues.find_message(&any), &second);
  EXPECT_EQ(held(queues), (std::vector<const SentMessage*>{&second, &third, &other_tag}));
}

TEST(Matching, TagsWithoutEntriesAreRemoved) {
  Queues queues;
  const Receive receive{0, 1};
  const SentMessage message{0, 2};
  EXPECT_TRUE(queues.empty());
  queues.post(&receive);
  queues.hold(&message);
  EXPECT_FALSE(queues.empty());
  queues.erase_receive(&receive);
  queues.erase_receive(&receive);  // already erased
  EXPECT_FALSE(queues.empty());
  queues.erase_message(&message);
  EXPECT_TRUE(queues.empty());
  queues.hold(&message);
  queues.clear();
  EXPECT_TRUE(queues.empty());
  EXPECT_TRUE(held(queues).empty());
}

}  // namespace
}  // namespace dscomm
