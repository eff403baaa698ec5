// MpiChannel under mpirun: cells go from rank 0 to rank 1.

#include "mpi/mpi_channel.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include "core/base/deadline.h"
#include "mpi/mpi_tags.h"
#include "mpi_ranks.h"

namespace dscomm::testing {
namespace {

constexpr std::chrono::seconds kLimit{60};

void send_cell(MpiChannel& channel, uint64_t bytes, size_t cell_bytes, uint8_t flags,
               uint8_t value) {
  const Deadline limit = Deadline::after(kLimit);
  std::byte* place = channel.vacant_cell(cell_bytes);
  for (; place == nullptr && !limit.expired(); place = channel.vacant_cell(cell_bytes)) usleep(100);
  ASSERT_NE(place, nullptr) << channel.failure().message();
  std::memset(place, value, cell_bytes);
  CellHeader header{};
  header.bytes = bytes;
  header.cell_bytes = static_cast<uint32_t>(cell_bytes);
  header.flags = flags;
  channel.publish(header, false);
}

void expect_cell(MpiChannel& channel, uint64_t bytes, size_t cell_bytes, uint8_t flags,
                 uint8_t value) {
  const Deadline limit = Deadline::after(kLimit);
  Result<std::optional<ArrivedCell>> found = channel.next_cell();
  for (; found.ok() && !found.value() && !limit.expired(); found = channel.next_cell()) usleep(100);
  ASSERT_TRUE(found.ok()) << found.status().message();
  ASSERT_TRUE(found.value().has_value());
  const ArrivedCell& cell = *found.value();
  EXPECT_EQ(cell.header.bytes, bytes);
  EXPECT_EQ(cell.header.cell_bytes, cell_bytes);
  EXPECT_EQ(cell.header.flags, flags);
  const auto same = channel.next_cell();
  ASSERT_TRUE(same.ok() && same.value());
  EXPECT_EQ(same.value()->data, cell.data);
  EXPECT_TRUE(std::all_of(cell.data, cell.data + cell_bytes,
                          [&](std::byte byte) { return byte == std::byte{value}; }));
  channel.consume(false);
}

// Applies `action`, which sends or expects, to each cell.
template <typename Action>
void for_each_cell(MpiChannel& channel, uint64_t bytes, uint8_t value, const Action& action) {
  uint64_t done = 0;
  do {
    if (::testing::Test::HasFatalFailure()) return;
    const size_t length = std::min<uint64_t>(channel.cell_bytes(bytes), bytes - done);
    action(channel, bytes, length, done == 0 ? kFirstCell : uint8_t{0}, value);
    done += length;
  } while (done < bytes);
}

// Ranks 0 and 1 each call their function with their end of a channel.
template <typename Send, typename Receive>
void between_two_ranks(const Send& send, const Receive& receive) {
  Job& job = Job::get();
  job.meet();
  if (job.rank() < 2) {
    MpiChannel channel(std::make_shared<MpiArrivals>(MPI_COMM_WORLD), 1 - job.rank(),
                       "the other rank");
    const Status opened = channel.open(4 << 20, 0);
    EXPECT_TRUE(opened.ok()) << opened.message();
    if (!opened.ok()) {
    } else if (job.rank() == 0) {
      send(channel);
      while (channel.in_flight()) usleep(100);
    } else {
      receive(channel);
    }
  }
  job.meet();
}

TEST(MpiChannel, MessagesOfAnyLengthArriveInOrder) {
  const auto run = [](MpiChannel& channel, const auto& action) {
    const uint64_t cell = channel.cell_bytes(0);
    uint8_t value = 1;
    for (int round = 0; round < 3; ++round)
      for (uint64_t bytes : {uint64_t{0}, uint64_t{1}, cell, cell + 1, 10 * cell - 5, uint64_t{3}})
        for_each_cell(channel, bytes, value++, action);
  };
  between_two_ranks([&](MpiChannel& channel) { run(channel, send_cell); },
                    [&](MpiChannel& channel) { run(channel, expect_cell); });
}

// The channels share one probe, which may find a cell for another channel.
TEST(MpiChannel, PollingAllChannelsFindsMessagesOfAllRanks) {
  Job& job = Job::get();
  job.meet();
  const auto arrivals = std::make_shared<MpiArrivals>(MPI_COMM_WORLD);
  if (job.rank() != 0) {
    MpiChannel channel(arrivals, 0, "rank 0");
    ASSERT_TRUE(channel.open(4 << 20, 0).ok());
    for (uint8_t value = 1; value < 50; ++value) send_cell(channel, 1, 1, kFirstCell, value);
    while (channel.in_flight()) usleep(100);
  } else {
    std::vector<std::unique_ptr<MpiChannel>> channels;
    for (int rank = 1; rank < job.size(); ++rank)
      channels.push_back(std::make_unique<MpiChannel>(arrivals, rank, "a rank"));
    std::vector<int> last(channels.size(), 0);
    const Deadline limit = Deadline::after(kLimit);
    while (*std::min_element(last.begin(), last.end()) < 49 && !limit.expired())
      for (size_t k = 0; k < channels.size(); ++k) {
        const auto found = channels[k]->next_cell();
        ASSERT_TRUE(found.ok()) << found.status().message();
        if (!found.value()) continue;
        EXPECT_EQ(*found.value()->data, static_cast<std::byte>(++last[k]));
        channels[k]->consume(false);
      }
    EXPECT_EQ(last, std::vector<int>(channels.size(), 49));
  }
  job.meet();
}

// MPICH would try to connect to the rank for ever.
TEST(MpiChannel, NothingIsSentToARankThatIsGone) {
  const GiveUpCheck gone = [] { return Status(Code::kPeerLeft, "the peer has left"); };
  MpiChannel channel(std::make_shared<MpiArrivals>(MPI_COMM_SELF), 0, "a rank", gone);
  ASSERT_TRUE(channel.open(4096, 8).ok());
  CellHeader header{};
  header.cell_bytes = 8;
  for (int i = 0; i < 10; ++i) {
    ASSERT_NE(channel.vacant_cell(8), nullptr);
    channel.publish(header, false);
  }
  EXPECT_TRUE(channel.failure().ok());
  EXPECT_FALSE(channel.in_flight());
  int is_there = 1;
  MPI_Iprobe(0, kCellTag, MPI_COMM_SELF, &is_there, MPI_STATUS_IGNORE);
  EXPECT_EQ(is_there, 0);
}

TEST(MpiChannel, MessagesSentAfterAnAbandonedMessageArrive) {
  const auto run = [](MpiChannel& channel, const auto& action) {
    const size_t cell = channel.cell_bytes(0);
    for (uint8_t value = 1; value < 4; ++value) {
      action(channel, 5 * cell, cell, kFirstCell, value);
      action(channel, 0, 0, kAbandoned, value);
      // One of these uses the receive that was posted for the abandoned message.
      for_each_cell(channel, value == 1 ? 3 * cell : value - 2u, value, action);
      for_each_cell(channel, 4 * cell, value, action);
    }
  };
  between_two_ranks([&](MpiChannel& channel) { run(channel, send_cell); },
                    [&](MpiChannel& channel) { run(channel, expect_cell); });
}

}  // namespace
}  // namespace dscomm::testing
