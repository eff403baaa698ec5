// Mutated input from sockets and the store: no crash, and no admission without the token. Bytes are
// mutated at random; TEST_SEED repeats a run and TEST_ROUNDS makes it longer.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>

#include "core/base/message_socket.h"
#include "core/base/owned.h"
#include "core/base/packer.h"
#include "core/detector/connection.h"
#include "core/detector/flooding.h"
#include "core/detector/listener.h"
#include "core/transport/networks.h"

namespace dscomm {
namespace {

class MutatedBytes : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* seed = std::getenv("TEST_SEED");
    const char* rounds = std::getenv("TEST_ROUNDS");
    seed_ = seed != nullptr ? std::strtoul(seed, nullptr, 10) : std::random_device()();
    rounds_ = rounds != nullptr ? std::atoi(rounds) : 2000;
    random_.seed(seed_);
    RecordProperty("seed", std::to_string(seed_));
  }
  void TearDown() override {
    if (HasFailure()) std::fprintf(stderr, "TEST_SEED=%lu\n", seed_);
  }

  size_t below(size_t limit) { return random_() % limit; }

  // Makes up to four changes: flips bits, or replaces, removes, repeats or adds bytes.
  std::string mutated(std::string bytes) {
    for (size_t change = 0, changes = 1 + below(4); change < changes && !bytes.empty(); ++change) {
      const size_t at = below(bytes.size()),
                   length = below(std::min<size_t>(bytes.size() - at, 40));
      switch (below(5)) {
        case 0:
          bytes[at] = static_cast<char>(bytes[at] ^ 1 << below(8));
          break;
        case 1:
          bytes[at] = static_cast<char>(random_());
          break;
        case 2:
          bytes.erase(at, length);
          break;
        case 3:
          bytes.insert(at, bytes.substr(at, length));
          break;
        default:
          bytes.insert(at, std::string(length, static_cast<char>(random_())));
      }
    }
    return bytes;
  }

  unsigned long seed_ = 0;
  int rounds_ = 0;
  std::mt19937 random_;
};

std::pair<UniqueFd, UniqueFd> socket_pair() {
  int ends[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

TEST_F(MutatedBytes, ConnectionDeliversValidMessagesOrEnds) {
  for (int round = 0; round < rounds_; ++round) {
    std::string sent;
    for (size_t i = 0, count = 1 + below(5); i < count; ++i)
      sent +=
          encode(Message::about(static_cast<MessageKind>(1 + below(14)), static_cast<int>(below(9)),
                                random_(), Status(Code::kPeerDied, std::string(below(300), 'x'))));
    sent = mutated(std::move(sent));
    auto [here, there] = socket_pair();
    ASSERT_EQ(send(there.get(), sent.data(), sent.size(), 0), ssize_t(sent.size()));
    there.reset();
    Connection connection(std::move(here));
    connection.receive();
    Message message;
    size_t taken = 0;
    while (connection.next(&message)) {
      taken += encode(message).size();
      EXPECT_GE(message.kind, MessageKind::kInvitation);
      EXPECT_LE(message.kind, MessageKind::kCompare);
      EXPECT_LE(message.text.size(), kMessageTextBytes);
    }
    EXPECT_TRUE(connection.ended());
    EXPECT_LE(taken, sent.size());
  }
}

TEST_F(MutatedBytes, LocalSocketDeliversWholeMessagesOnly) {
  enum class Kind : uint32_t {};
  for (int round = 0; round < rounds_; ++round) {
    auto [here, there] = socket_pair();
    auto [copied_from, copied_to] = socket_pair();
    MessageSocket<Kind> sender(std::move(copied_from));
    for (size_t i = 0, count = 1 + below(5); i < count; ++i)
      sender.send(static_cast<Kind>(below(9)), std::string(below(300), 'x'));
    std::string sent(65536, '\0');
    sent.resize(static_cast<size_t>(recv(copied_to.get(), sent.data(), sent.size(), 0)));
    sent = mutated(std::move(sent));
    ASSERT_EQ(send(there.get(), sent.data(), sent.size(), 0), ssize_t(sent.size()));
    there.reset();
    MessageSocket<Kind> receiver(std::move(here));
    (void)receiver.exchange();
    size_t taken = 0;
    while (auto message = receiver.next()) taken += message->text.size();
    EXPECT_LE(taken, sent.size());
  }
}

TEST_F(MutatedBytes, ListenerAdmitsNoConnectionWithoutToken) {
  TransportRequest request;
  request.id = random_();
  for (int rank = 0; rank < 3; ++rank) {
    TransportMember member;
    member.id = {1, static_cast<uint64_t>(rank)};
    request.members.push_back(member);
  }
  Listener listener(request, 2);
  ASSERT_TRUE(listener.open().ok());
  const std::string& text = listener.invitation().text;
  Message hello = Message::about(MessageKind::kHello, 1, request.id);
  hello.text = text.substr(0, text.find(' '));
  const std::string good = encode(hello);
  const std::string& endpoint = listener.endpoints();
  const auto port = static_cast<uint16_t>(std::atoi(endpoint.c_str() + endpoint.rfind(':') + 1));
  SocketAddress address = *socket_address("127.0.0.1", port);
  std::vector<pollfd> at_first;
  listener.add_to(&at_first);
  const size_t listeners = at_first.size();
  int admitted = 0;
  const auto admit = [&](int, Connection&&) { ++admitted; };
  const auto visit = [&](const std::string& says) {
    UniqueFd visitor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(visitor.get(), address.get(), address.size), 0);
    ASSERT_EQ(send(visitor.get(), says.data(), says.size(), MSG_NOSIGNAL), ssize_t(says.size()));
    visitor.reset();
    // Waits until the listener has accepted and settled the connection.
    for (bool came = false;;) {
      std::vector<pollfd> entries;
      listener.add_to(&entries);
      if (came && entries.size() == listeners) break;
      came = came || entries.size() > listeners;
      ASSERT_GT(::poll(entries.data(), entries.size(), 10'000), 0);
      ASSERT_TRUE(listener.handle(entries, admit).ok());
    }
  };
  for (int round = 0; round < rounds_ / 10; ++round) {
    const std::string says = mutated(good);
    // Bytes after the hello are not read here, and the token does not protect the rank in it.
    Message said;
    const bool is_good = says.size() >= good.size() && decode(says.substr(0, good.size()), &said) &&
                         said.kind == hello.kind && said.id == hello.id && said.text == hello.text;
    const int before = admitted;
    visit(says);
    EXPECT_EQ(admitted - before, is_good ? 1 : 0);
  }
  const int before = admitted;
  visit(good);
  EXPECT_EQ(admitted - before, 1);
}

TEST_F(MutatedBytes, ComparedCallsAreRefusedOrReadInBounds) {
  std::vector<TransportMember> members(2);
  CallRecord call = make_record(Collective::kBroadcast, DType::kFloat32, 5,
                                {Deadline::after(std::chrono::seconds(1))}, 1);
  call.sequence = 3;
  std::string records;
  for (int copy = 0; copy < 3; ++copy)
    records.append(reinterpret_cast<const char*>(&call), sizeof call);
  const std::string good = Packer().number(7).text(records).text("rank 1").take();
  for (int round = 0; round < rounds_; ++round) {
    Flooding flooding(0, members, {1});
    flooding.note_call(7, call, {"rank 0", "some group"});
    Message message = Message::about(MessageKind::kCompare, 1, 1);
    message.text = mutated(good);
    const bool is_meant = flooding.handle(1, message);
    // The Team may have ended, with a text made from the mutated bytes.
    const Status ended = flooding.ended(7);
    EXPECT_TRUE(ended.ok() || (is_meant && ended.code() == Code::kMismatch));
    EXPECT_LE(ended.message().size(), kMessageTextBytes);
  }
}

TEST_F(MutatedBytes, UnpackerStaysInBounds) {
  for (int round = 0; round < rounds_; ++round) {
    const std::vector<std::string> texts = {"a", "b", std::string(below(50), 'c')};
    const std::string bytes = mutated(Packer()
                                          .number(random_())
                                          .text(std::string(below(200), 'x'))
                                          .fields(texts)
                                          .number(below(100))
                                          .take());
    Unpacker unpacker(bytes);
    (void)unpacker.number();
    size_t taken = unpacker.text().size();
    std::vector<std::string> unpacked;
    unpacker.fields(unpacked);
    for (const std::string& text : unpacked) taken += text.size();
    EXPECT_LE(unpacker.count(), bytes.size());
    EXPECT_LE(taken, bytes.size());
  }
}

}  // namespace
}  // namespace dscomm
