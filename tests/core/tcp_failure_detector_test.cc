#include "core/detector/tcp_failure_detector.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "code_name.h"
#include "core/detector/links.h"
#include "core/detector/listener.h"
#include "core/transport/members.h"
#include "in_process.h"
#include "processes.h"

namespace dscomm::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using DetectorPtr = std::unique_ptr<TcpFailureDetector>;

// Sanitizers on a busy machine are slow; no test should come near this.
constexpr seconds kPatience{60};

// Every member is on its own host; all are in one network, of loopback addresses.
TransportRequest request_of(int rank, int size) {
  TransportRequest request;
  request.id = 0xabcdef0123456789;
  request.name = "world";
  request.rank = rank;
  request.prefix = "test/";
  for (int i = 0; i < size; ++i) {
    TransportMember member;
    member.host = i;
    member.global_rank = 100 + i;
    member.pid = 5000 + i;
    member.host_name = "host" + std::to_string(i);
    member.networks = {"127.0.0." + std::to_string(i + 1) + "/8"};
    request.members.push_back(std::move(member));
  }
  return request;
}

DetectorPtr join(int rank, int size, Store& store) {
  Result<DetectorPtr> detector =
      TcpFailureDetector::connect(request_of(rank, size), store, Deadline::after(kPatience));
  EXPECT_TRUE(detector.ok()) << detector.status().message();
  return detector.ok() ? std::move(detector).value() : nullptr;
}

// Whether the condition becomes true in time.
template <typename Condition>
bool soon(Condition condition) {
  const Deadline deadline = Deadline::after(kPatience);
  while (!condition()) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

void expect_says(const Status& status, Code code, const std::string& part) {
  EXPECT_EQ(code_name(status.code()), std::string(code_name(code))) << status.message();
  EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
}

// Members are threads: body(detector, rank) runs when all are connected. All leave together, unless
// the body takes the detector away.
void run_members(int size, const std::function<void(DetectorPtr&, int)>& body) {
  MemoryStore store;
  std::atomic<int> finished{0};
  run_ranks(size, [&](int rank) {
    DetectorPtr detector = join(rank, size, store);
    if (detector != nullptr) body(detector, rank);
    ++finished;
    EXPECT_TRUE(soon([&] { return finished == size; }));
  });
}

void say(Store& store, const std::string& what, int rank) {
  EXPECT_TRUE(store.set(what + std::to_string(rank), "").ok());
}
void await(Store& store, const std::string& what) {
  EXPECT_TRUE(store.get(what, Deadline::after(kPatience)).ok()) << what;
}

TEST(TcpFailureDetector, SingleMemberReadsFailureThatItReported) {
  run_members(1, [](DetectorPtr& detector, int) {
    detector->end(7, Status(Code::kTimeout, "late"));
    expect_says(detector->ended(7), Code::kTimeout, "late");
    EXPECT_EQ(detector->count(), 1u);
    EXPECT_TRUE(detector->gone(0).ok());
  });
}

// How many of this process's TCP connections have this user timeout.
int sockets_with_patience(milliseconds patience) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    unsigned found = 0;
    socklen_t length = sizeof found;
    if (getsockopt(std::stoi(entry.path().filename()), IPPROTO_TCP, TCP_USER_TIMEOUT, &found,
                   &length) == 0)
      count += found == patience.count();
  }
  return count;
}

TEST(TcpFailureDetector, AllConnectionsOutlastTheLongestTimeoutOfAnyMember) {
  std::atomic<bool> is_seen{false};
  run_members(3, [&](DetectorPtr& detector, int rank) {
    if (rank == 1) {
      EXPECT_EQ(sockets_with_patience(kLeastSilence), 6);  // both ends of three connections
      detector->tolerate_silence(seconds(1000));
      EXPECT_TRUE(soon([] { return sockets_with_patience(seconds(1060)) == 6; }));
      detector->tolerate_silence(seconds(900));  // no effect, nor has one below the minimum
      detector->tolerate_silence(milliseconds(1));
      detector->tolerate_silence(milliseconds::max());
      EXPECT_TRUE(soon([] { return sockets_with_patience(seconds(9 * 32767)) == 6; }));
      is_seen = true;
    }
    EXPECT_TRUE(soon([&] { return is_seen.load(); }));
    EXPECT_EQ(detector->count(), 0u);
  });
}

TEST(TcpFailureDetector, ShorterTimeoutOfPeerDoesNotShortenConnection) {
  std::atomic<int> steps{0};
  run_members(2, [&](DetectorPtr& detector, int rank) {
    if (rank == 0) {
      detector->tolerate_silence(seconds(2000));
      EXPECT_TRUE(soon([] { return sockets_with_patience(seconds(2060)) == 2; }));
      ++steps;
    } else {
      EXPECT_TRUE(soon([&] { return steps == 1; }));
      detector->tolerate_silence(seconds(1000));
      // Sent after the change that member 0 must not follow.
      detector->end(7, Status(Code::kTimeout, "late"));
    }
    EXPECT_TRUE(soon([&] { return !detector->ended(7).ok(); }));
    EXPECT_EQ(sockets_with_patience(seconds(2060)), 2);
  });
}

class TcpFailureDetectorOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Members, TcpFailureDetectorOfSize, ::testing::Values(2, 3, 5, 16));

TEST_P(TcpFailureDetectorOfSize, FailureFromAnyMemberReachesAll) {
  const int size = GetParam();
  run_members(size, [&](DetectorPtr& detector, int rank) {
    EXPECT_TRUE(detector->ended(999).ok());
    detector->end(static_cast<uint64_t>(1000 + rank),
                  Status(Code::kMismatch, "cause " + std::to_string(rank)));
    for (int from = 0; from < size; ++from) {
      const auto team = static_cast<uint64_t>(1000 + from);
      EXPECT_TRUE(soon([&] { return !detector->ended(team).ok(); })) << rank << " from " << from;
      expect_says(detector->ended(team), Code::kMismatch, "cause " + std::to_string(from));
    }
    EXPECT_EQ(detector->count(), static_cast<uint64_t>(size));
    for (int other = 0; other < size; ++other) EXPECT_TRUE(detector->gone(other).ok());
  });
}

TEST_P(TcpFailureDetectorOfSize, LeaveIsNotReportedAsDeath) {
  const int size = GetParam();
  run_members(size, [&](DetectorPtr& detector, int rank) {
    const int leaver = size - 1;
    if (rank == leaver) {
      detector.reset();
      return;
    }
    EXPECT_TRUE(soon([&] { return !detector->gone(leaver).ok(); }));
    expect_says(detector->gone(leaver), Code::kPeerLeft,
                "rank " + std::to_string(100 + leaver) + " (pid " + std::to_string(5000 + leaver) +
                    " on host host" + std::to_string(leaver) + ") has left");
    EXPECT_FALSE(detector->departure(leaver).exception.has_value());
    for (int other = 0; other < leaver; ++other) EXPECT_TRUE(detector->gone(other).ok());
    EXPECT_EQ(detector->count(), 1u);
  });
}

TEST_P(TcpFailureDetectorOfSize, LeaveNoticeSaysHowTheProcessEnded) {
  const int size = GetParam();
  for (int leaver : {0, size - 1})
    for (const char* exception : {"ValueError", ""})
      run_members(size, [&](DetectorPtr& detector, int rank) {
        if (rank == leaver) {
          detector->note_end(exception);
          detector->note_end("a later one");
          detector.reset();
          return;
        }
        EXPECT_TRUE(soon([&] { return !detector->gone(leaver).ok(); }));
        EXPECT_EQ(detector->departure(leaver).exception, exception);
        const std::string name = "rank " + std::to_string(100 + leaver) + " (pid " +
                                 std::to_string(5000 + leaver) + " on host host" +
                                 std::to_string(leaver) + ") ";
        expect_says(detector->gone(leaver), Code::kPeerLeft,
                    name + (*exception != 0
                                ? "was ended by an unhandled ValueError; see its output for the"
                                : "ended without destroy_process_group(); see its output for an"));
      });
}

TEST_P(TcpFailureDetectorOfSize, OtherMembersContinueAfterMemberZeroLeft) {
  const int size = GetParam();
  run_members(size, [&](DetectorPtr& detector, int rank) {
    if (rank == 0) {
      detector.reset();
      return;
    }
    EXPECT_TRUE(soon([&] { return !detector->gone(0).ok(); }));
    expect_says(detector->gone(0), Code::kPeerLeft, "rank 100 (pid 5000 on host host0) has left");
    detector->end(5, Status(Code::kAborted, "mine"));
    expect_says(detector->ended(5), Code::kAborted, "mine");
    detector->leave();
    detector->leave();
    EXPECT_EQ(detector->gone(0).code(), Code::kPeerLeft);
    detector->end(6, Status(Code::kAborted, "after"));
    expect_says(detector->ended(6), Code::kAborted, "after");
  });
}

TEST(TcpFailureDetector, FailuresSentBeforeLeaveArrive) {
  for (int speaker : {0, 2})
    run_members(3, [&](DetectorPtr& detector, int rank) {
      if (rank == speaker) {
        for (uint64_t team = 1; team <= 200; ++team)
          detector->end(team, Status(Code::kAborted, std::string(1000, 'x')));
        detector.reset();
        return;
      }
      EXPECT_TRUE(soon([&] { return !detector->gone(speaker).ok(); }));
      EXPECT_EQ(detector->gone(speaker).code(), Code::kPeerLeft);
      for (uint64_t team = 1; team <= 200; ++team) EXPECT_FALSE(detector->ended(team).ok()) << team;
    });
}

TEST(TcpFailureDetector, FirstCauseIsKept) {
  run_members(3, [](DetectorPtr& detector, int rank) {
    if (rank == 1) detector->end(9, Status(Code::kPeerDied, "first"));
    EXPECT_TRUE(soon([&] { return !detector->ended(9).ok(); }));
    detector->end(9, Status(Code::kTimeout, "later"));
    expect_says(detector->ended(9), Code::kPeerDied, "first");
    // A second round: a member that hears it has heard everything before it.
    detector->end(static_cast<uint64_t>(20 + rank), Status(Code::kAborted, "over"));
    for (uint64_t team : {20, 21, 22})
      EXPECT_TRUE(soon([&] { return !detector->ended(team).ok(); }));
    expect_says(detector->ended(9), Code::kPeerDied, "first");
    EXPECT_EQ(detector->count(), 4u);
  });
}

TEST(TcpFailureDetector, FailureDoesNotApplyToEarlierFinishedCalls) {
  run_members(3, [](DetectorPtr& detector, int rank) {
    if (rank == 1) detector->end(9, Status(Code::kAborted, "enough"), 6);
    EXPECT_TRUE(soon([&] { return !detector->ended(9).ok(); }));
    EXPECT_TRUE(detector->ended(9, 0).ok());
    EXPECT_TRUE(detector->ended(9, 5).ok());
    expect_says(detector->ended(9, 6), Code::kAborted, "enough");
  });
}

// Two members end a Team at different calls: all learn the first unfinished call.
TEST(TcpFailureDetector, FailureAppliesFromLowestUnfinishedCall) {
  run_members(5, [](DetectorPtr& detector, int rank) {
    if (rank == 1) detector->end(9, Status(Code::kAborted, "enough"), 6);
    EXPECT_TRUE(soon([&] { return !detector->ended(9, 6).ok(); }));
    if (rank == 3) detector->end(9, Status(Code::kAborted, "enough, too"), 5);
    EXPECT_TRUE(soon([&] { return !detector->ended(9, 5).ok(); }));
    expect_says(detector->ended(9), Code::kAborted, "enough");
    EXPECT_TRUE(detector->ended(9, 4).ok());
    EXPECT_TRUE(soon([&] { return detector->count() == 2; }));
  });
}

TEST(TcpFailureDetector, LongCauseIsTruncatedBetweenCharacters) {
  std::string text;
  while (text.size() < 3000) text += "\u00e9\u20ac";  // five bytes
  run_members(2, [&](DetectorPtr& detector, int rank) {
    if (rank == 1) detector->end(9, Status(Code::kInternal, text));
    EXPECT_TRUE(soon([&] { return !detector->ended(9).ok(); }));
    const std::string cut = detector->ended(9).message();
    EXPECT_EQ(cut.size(), 2045u);  // 409 times five bytes
    EXPECT_EQ(cut, text.substr(0, cut.size()));
  });
}

TEST(TcpFailureDetector, ManyConcurrentFailuresReachAll) {
  constexpr int kMembers = 8;
  constexpr uint64_t kEach = 150;
  run_members(kMembers, [&](DetectorPtr& detector, int rank) {
    run_ranks(2, [&](int half) {
      for (uint64_t i = static_cast<uint64_t>(half); i < kEach; i += 2)
        detector->end(static_cast<uint64_t>(rank) * kEach + i,
                      Status(Code::kAborted, std::string(i * 10, 'x')));
    });
    EXPECT_TRUE(soon([&] { return detector->count() == kMembers * kEach; })) << detector->count();
    for (uint64_t team = 0; team < kMembers * kEach; ++team)
      ASSERT_EQ(detector->ended(team).message().size(), team % kEach * 10);
  });
}

TEST(TcpFailureDetector, StallProbeIsAnsweredByAllMembers) {
  constexpr int kMembers = 9;
  constexpr uint64_t kTeam = 77;
  std::atomic<int> noted{0};
  run_members(kMembers, [&](DetectorPtr& detector, int rank) {
    // Rank 1 is behind; rank 2 has finished the Team, so it has made all calls.
    detector->note_position(kTeam, rank == 1 ? 4 : static_cast<uint64_t>(5 + rank));
    if (rank == 2) detector->forget(kTeam);
    ++noted;
    EXPECT_TRUE(soon([&] { return noted >= kMembers; }));
    const uint64_t question = detector->ask(kTeam, 5);
    const auto is_whole = [&] {
      const std::vector<Answer> answers = detector->answers(question);
      return std::count(answers.begin(), answers.end(), Answer::kSilent) == 0;
    };
    EXPECT_TRUE(soon(is_whole));
    const std::vector<Answer> answers = detector->answers(question);
    for (int other = 0; other < kMembers; ++other)
      if (other != rank) {
        EXPECT_EQ(answers[static_cast<size_t>(other)],
                  other == 1 ? Answer::kBehind : Answer::kReached)
            << rank << " asks " << other;
      }
    detector->close_question(question);
    ++noted;
    EXPECT_TRUE(soon([&] { return noted >= 2 * kMembers; }));
    EXPECT_EQ(detector->count(), 0u);  // no failure notices
  });
}

// All members end Teams and leave while notices of the others are in transit.
TEST(TcpFailureDetector, LeaveWhileOthersSendIsNotADeath) {
  for (int round = 0; round < 5; ++round) {
    MemoryStore store;
    run_ranks(6, [&](int rank) {
      DetectorPtr detector = join(rank, 6, store);
      ASSERT_NE(detector, nullptr);
      // With 50, goodbyes took longer than a second under TSan on an overloaded machine: a death.
      for (uint64_t i = 0; i < 20; ++i)
        detector->end(static_cast<uint64_t>(rank) * 20 + i,
                      Status(Code::kAborted, std::string(2000, 'x')));
      // No member has died, whatever the order in which they end.
      for (int other = 0; other < 6; ++other)
        EXPECT_NE(detector->gone(other).code(), Code::kPeerDied);
      detector.reset();
    });
  }
}

TEST(TcpFailureDetector, MembersOfOneHostConnectOverLoopback) {
  MemoryStore store;
  run_ranks(3, [&](int rank) {
    TransportRequest request = request_of(rank, 3);
    for (TransportMember& member : request.members) {
      member.host = 0;
      member.networks.clear();
    }
    Result<DetectorPtr> detector =
        TcpFailureDetector::connect(request, store, Deadline::after(kPatience));
    ASSERT_TRUE(detector.ok()) << detector.status().message();
    detector.value()->end(1, Status(Code::kAborted, "done"));
  });
}

// Two listeners may bind one port before either listens there.
TEST(TcpFailureDetector, ConcurrentListenersTakeDifferentPorts) {
  constexpr int kRanks = 8;
  for (int round = 0; round < 200; ++round) {
    std::vector<std::string> endpoints(kRanks);
    std::barrier open(kRanks), close(kRanks);
    run_ranks(kRanks, [&](int rank) {
      TransportRequest request = request_of(rank, kRanks + 1);  // the last is on another host
      for (size_t k = 0; k < kRanks; ++k) {
        request.members[k].host = 0;
        request.members[k].networks = {"127.0.0.1/8"};
      }
      request.settings.ports = "21500-21515";
      Listener listener(request, kRanks);
      open.arrive_and_wait();
      const Status status = listener.open();
      EXPECT_TRUE(status.ok()) << status.message();
      endpoints[static_cast<size_t>(rank)] = listener.endpoints();
      close.arrive_and_wait();
    });
    EXPECT_EQ(std::set<std::string>(endpoints.begin(), endpoints.end()).size(), endpoints.size());
  }
}

TEST(TcpFailureDetector, TimeoutNamesTheMissingMembers) {
  MemoryStore store;
  const int64_t start_ns = monotonic_ns();
  run_ranks(5, [&](int rank) {
    if (rank == 2 || rank == 4) return;
    Result<DetectorPtr> detector =
        TcpFailureDetector::connect(request_of(rank, 5), store, Deadline::after(milliseconds(700)));
    // All hear of the first member that gives up. Rank 3 waits for a listener's address.
    expect_says(detector.status(), Code::kTimeout, "waiting for rank 10");
    for (const char* name :
         {"rank 102 (pid 5002 on host host2)", "rank 104 (pid 5004 on host host4)"})
      expect_says(detector.status(), Code::kTimeout, name);
  });
  EXPECT_LT(monotonic_ns() - start_ns, 20'000'000'000);
}

// Member 0 usually names the missing member. If another member's deadline passes long before, that
// member names it, and its failure ends the attempt for all.
TEST(TcpFailureDetector, EarliestTimeoutNamesTheMissingMember) {
  MemoryStore store;
  const int64_t start_ns = monotonic_ns();
  run_ranks(4, [&](int rank) {
    if (rank == 3) return;
    Result<DetectorPtr> detector = TcpFailureDetector::connect(
        request_of(rank, 4), store, Deadline::after(rank == 1 ? seconds(3) : seconds(300)));
    expect_says(detector.status(), Code::kTimeout,
                "timed out after 3 s waiting for rank 103 (pid 5003 on host host3) to connect");
  });
  EXPECT_LT(monotonic_ns() - start_ns, 60'000'000'000);
}

TEST(TcpFailureDetector, TimeoutNamesMissingMemberZero) {
  MemoryStore store;
  Result<DetectorPtr> detector =
      TcpFailureDetector::connect(request_of(1, 2), store, Deadline::after(milliseconds(50)));
  expect_says(detector.status(), Code::kTimeout,
              "waiting for rank 100 (pid 5000 on host host0) to say where it listens");
}

// A store that one rank cannot read.
class BrokenStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  Result<std::string> get(const std::string&, const Deadline&) override {
    return Status(Code::kInternal, "the store is broken");
  }
};

TEST(TcpFailureDetector, ConnectFailureReachesAllMembers) {
  MemoryStore store;
  const int64_t start_ns = monotonic_ns();
  run_ranks(4, [&](int rank) {
    BrokenStore broken(store);
    Store& mine = rank == 2 ? static_cast<Store&>(broken) : store;
    Result<DetectorPtr> detector =
        TcpFailureDetector::connect(request_of(rank, 4), mine, Deadline::after(seconds(300)));
    expect_says(detector.status(), Code::kInternal, "the store is broken");
  });
  EXPECT_LT(monotonic_ns() - start_ns, 60'000'000'000);
}

TEST(TcpFailureDetector, DeclineReachesAllMembers) {
  for (int decliner : {0, 1}) {
    MemoryStore store;
    run_ranks(3, [&](int rank) {
      TransportRequest request = request_of(rank, 3);
      if (rank == decliner)
        return decline_transport(request, store, Status(Code::kResource, "no thread is left"));
      Result<DetectorPtr> detector =
          TcpFailureDetector::connect(request, store, Deadline::after(seconds(300)));
      expect_says(detector.status(), Code::kResource, "no thread is left");
    });
  }
}

TEST(TcpFailureDetector, HostWithoutUsableNetworkIsNamed) {
  for (const std::vector<std::string>& networks :
       {std::vector<std::string>{}, std::vector<std::string>{"192.0.2.1/24"}}) {
    MemoryStore store;
    run_ranks(3, [&](int rank) {
      TransportRequest request = request_of(rank, 3);
      request.members[0].networks = networks;
      Result<DetectorPtr> detector =
          TcpFailureDetector::connect(request, store, Deadline::after(seconds(300)));
      EXPECT_FALSE(detector.ok());
      EXPECT_NE(detector.status().message().find(
                    networks.empty() ? "rank 100 (pid 5000 on host host0) has no network"
                                     : "rank 100 (pid 5000 on host host0) cannot listen at "
                                       "192.0.2.1"),
                std::string::npos)
          << detector.status().message();
    });
  }
}

TEST(TcpFailureDetector, HostsWithTheSameAddressesCannotConnect) {
  MemoryStore store;
  run_ranks(3, [&](int rank) {
    TransportRequest request = request_of(rank, 3);
    request.members[1].networks = request.members[0].networks;
    Result<DetectorPtr> detector =
        TcpFailureDetector::connect(request, store, Deadline::after(seconds(300)));
    expect_says(detector.status(), Code::kUnsupported,
                "cannot be reached there from rank 101 (pid 5001 on host host1)");
  });
}

constexpr const char* kInvitationKey = "test/detector/abcdef0123456789/invitation/0";

// A member's address and token.
struct Invitation {
  std::string token, address;
  uint16_t port = 0;
};
Invitation invitation_in(Store& store, int rank = 0) {
  std::string key = kInvitationKey;
  key.back() = static_cast<char>('0' + rank);
  Message message;
  EXPECT_TRUE(decode(store.get(key, Deadline::after(kPatience)).value(), &message));
  Invitation invitation;
  std::string endpoint;
  std::istringstream(message.text) >> invitation.token >> endpoint;
  invitation.address = endpoint.substr(0, endpoint.find(':'));
  invitation.port = static_cast<uint16_t>(std::stoi(endpoint.substr(endpoint.find(':') + 1)));
  return invitation;
}

UniqueFd stranger_at(const Invitation& invitation, const std::string& says) {
  UniqueFd stranger(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(invitation.port);
  EXPECT_EQ(inet_pton(AF_INET, invitation.address.c_str(), &address.sin_addr), 1);
  EXPECT_EQ(connect(stranger.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  // Sends all of it, unless the connection is closed meanwhile.
  if (!says.empty()) {
    EXPECT_GT(send(stranger.get(), says.data(), says.size(), MSG_NOSIGNAL), 0);
  }
  return stranger;
}

TEST(TcpFailureDetector, StrangersDoNotDelayConnect) {
  MemoryStore store;
  std::atomic<bool> strangers_came{false};
  const TransportRequest request = request_of(0, 3);
  std::thread strangers([&] {
    const Invitation invitation = invitation_in(store);
    auto hello = [&](MessageKind kind, int rank, uint64_t id, const std::string& token) {
      Message message = Message::about(kind, rank, id);
      message.text = token;
      return encode(message);
    };
    const std::string good = hello(MessageKind::kHello, 1, request.id, invitation.token);
    std::string wrong_magic = good, long_text = good, unknown_kind = good;
    wrong_magic[0] ^= 1;
    long_text[7] = '\x7f';
    unknown_kind[4] = '\x7f';
    const std::vector<std::string> turned_away{
        "GET / HTTP/1.1\r\nHost: nobody\r\n\r\n",
        std::string(100'000, '\0'),
        wrong_magic,
        long_text,
        unknown_kind,
        hello(MessageKind::kHello, 1, request.id, std::string(32, '0')),
        hello(MessageKind::kHello, 1, request.id, ""),
        hello(MessageKind::kHello, 1, request.id, invitation.token + "0"),
        hello(MessageKind::kHello, 1, request.id + 1, invitation.token),
        hello(MessageKind::kHello, 0, request.id, invitation.token),
        hello(MessageKind::kHello, 3, request.id, invitation.token),
        hello(MessageKind::kHello, -1, request.id, invitation.token),
        hello(MessageKind::kStart, 1, request.id, invitation.token),
        hello(MessageKind::kEnd, 1, request.id, invitation.token),
    };
    for (const std::string& text : turned_away) {
      UniqueFd stranger = stranger_at(invitation, text);
      char byte;
      ssize_t answer = recv(stranger.get(), &byte, 1, 0);
      EXPECT_TRUE(answer == 0 || (answer < 0 && errno == ECONNRESET)) << text;
    }
    // These stay connected, and send nothing or half a message.
    std::vector<UniqueFd> silent;
    for (int i = 0; i < 100; ++i) silent.push_back(stranger_at(invitation, ""));
    silent.push_back(stranger_at(invitation, good.substr(0, 3)));
    silent.push_back(stranger_at(invitation, good.substr(0, good.size() - 1)));
    strangers_came = true;
    EXPECT_TRUE(soon([&] { return !strangers_came; }));
  });
  std::atomic<int> connected{0};
  run_ranks(3, [&](int rank) {
    if (rank != 0) {
      EXPECT_TRUE(soon([&] { return strangers_came.load(); }));
    }
    DetectorPtr detector = join(rank, 3, store);
    ASSERT_NE(detector, nullptr);
    ++connected;
    EXPECT_TRUE(soon([&] { return connected >= 3; }));
    if (rank == 0) strangers_came = false;
    if (rank == 1) detector->end(4, Status(Code::kAborted, "all is well"));
    EXPECT_TRUE(soon([&] { return !detector->ended(4).ok(); }));
    ++connected;
    EXPECT_TRUE(soon([&] { return connected >= 6; }));
  });
  strangers.join();
}

// Member 2 connects and stops. Members 0 and 1 have all of their connections, and wait.
TEST(TcpFailureDetector, MemberStoppedAfterConnectIsNamed) {
  MemoryStore store;
  const int64_t start_ns = monotonic_ns();
  run_ranks(3, [&](int rank) {
    if (rank == 2) {
      std::vector<UniqueFd> connections;
      for (int up : {0, 1}) {
        const Invitation invitation = invitation_in(store, up);
        Message hello = Message::about(MessageKind::kHello, 2, request_of(2, 3).id);
        hello.text = invitation.token;
        connections.push_back(stranger_at(invitation, encode(hello)));
      }
      for (UniqueFd& connection : connections)
        for (char byte; recv(connection.get(), &byte, 1, 0) > 0;) continue;  // until it is closed
    } else {
      Result<DetectorPtr> detector =
          TcpFailureDetector::connect(request_of(rank, 3), store, Deadline::after(seconds(1)));
      expect_says(detector.status(), Code::kTimeout,
                  "waiting for rank 102 (pid 5002 on host host2), which is connected");
    }
  });
  EXPECT_LT(monotonic_ns() - start_ns, 20'000'000'000);
}

// The published address has a closed port, and no member has given up.
TEST(TcpFailureDetector, AddressThatRefusesConnectionIsNamed) {
  MemoryStore store;
  Message invitation = Message::about(MessageKind::kInvitation, 0, request_of(0, 2).id);
  invitation.text = std::string(32, 'a') + " 127.0.0.1:1";
  ASSERT_TRUE(store.set(kInvitationKey, encode(invitation)).ok());
  Result<DetectorPtr> detector =
      TcpFailureDetector::connect(request_of(1, 2), store, Deadline::after(seconds(300)));
  expect_says(detector.status(), Code::kUnsupported,
              "rank 101 (pid 5001 on host host1) cannot connect to rank 100 (pid 5000 on host "
              "host0) at 127.0.0.1:1 (Connection refused)");
}

// The first address accepts the connection and is silent; the second belongs to another program.
TEST(TcpFailureDetector, AddressOfAnotherProgramIsSkipped) {
  auto listener_at = [](const char* address, int type) {
    UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | type, 0));
    sockaddr_in name{};
    name.sin_family = AF_INET;
    inet_pton(AF_INET, address, &name.sin_addr);
    EXPECT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&name), sizeof name), 0);
    EXPECT_EQ(listen(listener.get(), 16), 0);
    return listener;
  };
  auto port_of = [](const UniqueFd& listener) {
    sockaddr_in name{};
    socklen_t length = sizeof name;
    getsockname(listener.get(), reinterpret_cast<sockaddr*>(&name), &length);
    return std::to_string(ntohs(name.sin_port));
  };
  UniqueFd silent = listener_at("127.0.0.1", 0), other = listener_at("127.0.1.1", 0);
  std::thread answerer([&] {
    UniqueFd caller(accept4(other.get(), nullptr, nullptr, SOCK_CLOEXEC));
    EXPECT_GT(send(caller.get(), "220 welcome to nothing of yours\r\n", 33, MSG_NOSIGNAL), 0);
  });
  // Adds two addresses before the one at which member 0 listens.
  class Detour final : public ForwardingStore {
   public:
    Detour(Store& below, std::string before) : ForwardingStore(below), before_(std::move(before)) {}
    Result<std::string> get(const std::string& key, const Deadline& deadline) override {
      Result<std::string> bytes = store_.get(key, deadline);
      Message message;
      if (key != kInvitationKey || !bytes.ok() || !decode(bytes.value(), &message)) return bytes;
      message.text.insert(message.text.find(' '), before_);
      return encode(message);
    }

   private:
    std::string before_;
  };
  MemoryStore store;
  Detour detour(store, " 127.0.0.1:" + port_of(silent) + " 127.0.1.1:" + port_of(other));
  run_ranks(2, [&](int rank) {
    TransportRequest request = request_of(rank, 2);
    request.members[0].networks = {"127.0.0.1/8", "127.0.1.1/8", "127.0.2.1/8"};
    Store& mine = rank == 1 ? static_cast<Store&>(detour) : store;
    // Member 0 listens only at the last one, since it knows no other.
    if (rank == 0) request.members[0].networks = {"127.0.2.1/8"};
    Result<DetectorPtr> detector =
        TcpFailureDetector::connect(request, mine, Deadline::after(kPatience));
    ASSERT_TRUE(detector.ok()) << detector.status().message();
    detector.value()->end(1, Status(Code::kAborted, "done"));
  });
  answerer.join();
}

// Body of a process that hears of a death, reports it, and leaves on request.
void watch(Store& store, int rank, int size, int victim) {
  DetectorPtr detector = join(rank, size, store);
  ASSERT_NE(detector, nullptr);
  std::atomic<int> deaths{0};
  detector->on_death([&](const Status& death) {
    EXPECT_NE(death.message().find("died or exited"), std::string::npos) << death.message();
    ++deaths;
  });
  say(store, "ready", rank);
  if (rank == victim)
    while (true) pause();
  EXPECT_TRUE(soon([&] { return !detector->gone(victim).ok(); }));
  expect_says(detector->gone(victim), Code::kPeerDied,
              "rank " + std::to_string(100 + victim) + " (pid " + std::to_string(5000 + victim) +
                  " on host host" + std::to_string(victim) + ") died or exited");
  EXPECT_TRUE(soon([&] { return deaths == 1; }));
  detector->on_death([&](const Status& death) {
    EXPECT_NE(death.message().find("died or exited"), std::string::npos) << death.message();
    ++deaths;
  });
  EXPECT_EQ(deaths, 2);  // the second callback runs at once, since the death has already happened
  EXPECT_EQ(detector->count(), 1u);
  say(store, "heard", rank);
  await(store, "over");
}

void expect_death_is_heard(int size, int victim) {
  Processes processes;
  processes.start(size, [&](Store& store, int rank) { watch(store, rank, size, victim); });
  for (int rank = 0; rank < size; ++rank) processes.await("ready", rank);
  const int64_t killed_ns = monotonic_ns();
  processes.signal(victim, SIGKILL);
  for (int rank = 0; rank < size; ++rank)
    if (rank != victim) processes.await("heard", rank);
  // Far below any deadline; on an idle machine it is a millisecond.
  EXPECT_LT(monotonic_ns() - killed_ns, 5'000'000'000);
  ::testing::Test::RecordProperty("heard_after_us",
                                  static_cast<int>((monotonic_ns() - killed_ns) / 1000));
  processes.say("over");
  for (int rank = 0; rank < size; ++rank)
    if (rank != victim) processes.expect_good_end(rank);
}

TEST(TcpFailureDetectorProcesses, DeathReachesAllMembers) {
  expect_death_is_heard(2, 1);
  expect_death_is_heard(5, 3);
}

TEST(TcpFailureDetectorProcesses, DeathOfMemberZeroReachesAllMembers) {
  expect_death_is_heard(2, 0);
  expect_death_is_heard(5, 0);
}

// An exit without leaving is a death; messages sent before it count.
TEST(TcpFailureDetectorProcesses, ExitWithoutLeaveIsReportedAsDeath) {
  Processes processes;
  processes.start(4, [](Store& store, int rank) {
    DetectorPtr detector = join(rank, 4, store);
    ASSERT_NE(detector, nullptr);
    say(store, "ready", rank);
    for (int other = 0; other < 4; ++other) await(store, "ready" + std::to_string(other));
    if (rank == 2) {
      detector->end(8, Status(Code::kMismatch, "said by 2"));
      detector->leave();
    }
    if (rank >= 2) {
      fflush(nullptr);
      _exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    EXPECT_TRUE(soon([&] { return !detector->gone(2).ok() && !detector->gone(3).ok(); }));
    EXPECT_EQ(detector->gone(2).code(), Code::kPeerLeft);
    EXPECT_EQ(detector->gone(3).code(), Code::kPeerDied);
    expect_says(detector->ended(8), Code::kMismatch, "said by 2");
    EXPECT_EQ(detector->count(), 3u);
    say(store, "heard", rank);
    await(store, "heard" + std::to_string(1 - rank));
  });
  for (int rank = 0; rank < 4; ++rank) processes.expect_good_end(rank);
}

// Two members wait for the third, and are stopped for longer than their timeout.
TEST(TcpFailureDetectorProcesses, ConnectContinuesAfterJobWasStopped) {
  Processes processes;
  processes.start(3, [](Store& store, int rank) {
    if (rank == 2) await(store, "go");
    say(store, "begins", rank);
    Result<DetectorPtr> detector = TcpFailureDetector::connect(request_of(rank, 3), store,
                                                               Deadline::after(milliseconds(2500)));
    EXPECT_TRUE(detector.ok()) << detector.status().message();
    say(store, "ready", rank);
    for (int other = 0; other < 3; ++other) await(store, "ready" + std::to_string(other));
  });
  for (int rank : {0, 1}) processes.await("begins", rank);
  std::this_thread::sleep_for(milliseconds(500));
  for (int rank : {0, 1}) processes.stop(rank);
  std::this_thread::sleep_for(seconds(4));
  for (int rank : {1, 0}) processes.signal(rank, SIGCONT);
  std::this_thread::sleep_for(milliseconds(300));
  processes.say("go");
  for (int rank = 0; rank < 3; ++rank) processes.expect_good_end(rank);
}

// Starts two members. Member 1 sends `ends` notices while member 0 is stopped, and has begun to
// leave when this returns. Member 0 calls `before`, and then expects that member 1 has left.
void start_long_leave(Processes& processes, uint64_t ends,
                      const std::function<void(const TcpFailureDetector&, Store&)>& before) {
  processes.start(2, [&](Store& store, int rank) {
    DetectorPtr detector = join(rank, 2, store);
    ASSERT_NE(detector, nullptr);
    say(store, "ready", rank);
    if (rank == 0) {
      before(*detector, store);
      EXPECT_TRUE(soon([&] { return !detector->gone(1).ok(); }));
      EXPECT_EQ(detector->gone(1).code(), Code::kPeerLeft) << detector->gone(1).message();
      return;
    }
    await(store, "go");
    for (uint64_t team = 1; team <= ends; ++team)
      detector->end(team, Status(Code::kAborted, std::string(kMessageTextBytes, 'x')));
    say(store, "leaves", rank);
    detector->leave();
  });
  for (int rank : {0, 1}) processes.await("ready", rank);
  processes.stop(0);
  processes.say("go");
  processes.await("leaves", 1);
}

// A goodbye takes longer than a second, because the other member runs only now and then, each time
// until it has read something.
TEST(TcpFailureDetectorProcesses, LeaveNoticeReachesSlowReader) {
  static constexpr uint64_t kEnds = 6000;  // several times what the connection holds
  constexpr int kTimes = 4;
  Processes processes;
  start_long_leave(processes, kEnds, [](const TcpFailureDetector& detector, Store& store) {
    for (int times = 0; times < kTimes; ++times) {
      const uint64_t least = std::min(detector.count() + 200, kEnds);
      EXPECT_TRUE(soon([&] { return detector.count() >= least; })) << detector.count();
      say(store, "read" + std::to_string(times) + "_", 0);
      await(store, "went" + std::to_string(times));
    }
  });
  for (int times = 0; times < kTimes; ++times) {
    std::this_thread::sleep_for(milliseconds(400));
    processes.signal(0, SIGCONT);
    processes.await("read" + std::to_string(times) + "_", 0);
    processes.stop(0);
    processes.say("went" + std::to_string(times));
  }
  processes.signal(0, SIGCONT);
  for (int rank = 0; rank < 2; ++rank) processes.expect_good_end(rank);
}

// A goodbye waits for a member that is stopped, then the leaving one is stopped too.
TEST(TcpFailureDetectorProcesses, LeaveWhileJobIsStoppedSendsLeaveNotice) {
  Processes processes;
  constexpr uint64_t kEnds = 3000;  // more than the connection holds
  start_long_leave(processes, kEnds, [](const TcpFailureDetector&, Store&) {});
  std::this_thread::sleep_for(milliseconds(200));
  processes.stop(1);
  std::this_thread::sleep_for(seconds(3));
  processes.signal(1, SIGCONT);
  std::this_thread::sleep_for(milliseconds(50));
  processes.signal(0, SIGCONT);
  for (int rank = 0; rank < 2; ++rank) processes.expect_good_end(rank);
}

// A member dies while the others still wait for a missing one.
TEST(TcpFailureDetectorProcesses, DeathDuringConnectFailsAllMembers) {
  Processes processes;
  processes.start(4, [](Store& store, int rank) {
    if (rank == 3) return;  // never comes
    if (rank == 2) {
      Message hello = Message::about(MessageKind::kHello, 2, request_of(2, 4).id);
      const Invitation invitation = invitation_in(store);
      hello.text = invitation.token;
      UniqueFd connection = stranger_at(invitation, encode(hello));
      char byte;
      EXPECT_EQ(recv(connection.get(), &byte, 1, 0), 1);  // it was admitted
      say(store, "connected", 2);
      while (true) pause();
    }
    const int64_t start_ns = monotonic_ns();
    Result<DetectorPtr> detector =
        TcpFailureDetector::connect(request_of(rank, 4), store, Deadline::after(seconds(300)));
    expect_says(detector.status(), Code::kPeerDied,
                "rank 102 (pid 5002 on host host2) died or exited without leaving");
    EXPECT_LT(monotonic_ns() - start_ns, 60'000'000'000);
  });
  processes.await("connected", 2);
  processes.signal(2, SIGKILL);
  for (int rank : {0, 1, 3}) processes.expect_good_end(rank);
}

// Members that relay notices die one after the other, or are stopped: the rest hear of every death.
TEST(TcpFailureDetectorProcesses, DeathsReachSurvivorsAfterRelaysDied) {
  constexpr int kMembers = 6;
  const std::vector<int> victims{0, 2, 4};
  Processes processes;
  processes.start(kMembers, [&](Store& store, int rank) {
    DetectorPtr detector = join(rank, kMembers, store);
    ASSERT_NE(detector, nullptr);
    say(store, "ready", rank);
    for (int victim : victims) {
      if (rank == victim)
        while (true) pause();
      EXPECT_TRUE(soon([&] { return !detector->gone(victim).ok(); })) << rank << " of " << victim;
      say(store, "heard of " + std::to_string(victim) + " by ", rank);
    }
    // No member is cut off: three live, and are linked.
    EXPECT_TRUE(detector->death_if_cut_off({0, 2, 4}, 0).ok());
    await(store, "over");
  });
  for (int rank = 0; rank < kMembers; ++rank) processes.await("ready", rank);
  for (int victim : victims) {
    processes.signal(victim, SIGKILL);
    for (int rank : {1, 3, 5}) processes.await("heard of " + std::to_string(victim) + " by ", rank);
  }
  processes.say("over");
  for (int rank : {1, 3, 5}) processes.expect_good_end(rank);
}

TEST(TcpFailureDetectorProcesses, DeathReachesOtherMembersWhileMemberZeroIsStopped) {
  Processes processes;
  processes.start(4, [](Store& store, int rank) {
    DetectorPtr detector = join(rank, 4, store);
    ASSERT_NE(detector, nullptr);
    say(store, "ready", rank);
    if (rank == 3)
      while (true) pause();
    EXPECT_TRUE(soon([&] { return !detector->gone(3).ok(); }));
    expect_says(detector->gone(3), Code::kPeerDied, "rank 103 (pid 5003 on host host3) died");
    say(store, "heard", rank);
    if (rank == 0) return;
    // The first member does not answer while it is stopped; the other one does.
    const uint64_t question = detector->ask(1, 0);
    EXPECT_TRUE(soon([&] {
      return detector->answers(question)[static_cast<size_t>(3 - rank)] == Answer::kReached;
    }));
    EXPECT_EQ(detector->answers(question)[0], Answer::kSilent);
    say(store, "asked", rank);
    await(store, "over");
  });
  for (int rank = 0; rank < 4; ++rank) processes.await("ready", rank);
  processes.stop(0);
  processes.signal(3, SIGKILL);
  for (int rank : {1, 2}) processes.await("heard", rank);
  for (int rank : {1, 2}) processes.await("asked", rank);
  processes.say("over");
  for (int rank : {1, 2}) processes.expect_good_end(rank);
  processes.signal(0, SIGCONT);
  processes.expect_good_end(0);
}

// All members linked to the last one have died; the live one was never linked to it.
TEST(TcpFailureDetectorProcesses, MemberWithoutLinksIsCutOff) {
  // Hosts of 1 member each: the last is linked only to 0, 1 and its predecessor.
  constexpr int kMembers = 5;
  Processes processes;
  processes.start(kMembers, [](Store& store, int rank) {
    DetectorPtr detector = join(rank, kMembers, store);
    ASSERT_NE(detector, nullptr);
    say(store, "ready", rank);
    if (rank == 0 || rank == 1 || rank == 3)
      while (true) pause();
    const std::vector<int> everyone{0, 1, 2, 3, 4};
    EXPECT_TRUE(soon([&] { return !detector->death_if_cut_off(everyone, 0).ok(); }));
    EXPECT_EQ(detector->death_if_cut_off(everyone, 0).code(), Code::kPeerDied);
    EXPECT_TRUE(detector->death_if_cut_off(everyone, 1'000'000'000'000).ok());  // not for so long
    EXPECT_TRUE(detector->death_if_cut_off({2, 4}, 0).ok());  // none of these has died
    EXPECT_TRUE(detector->gone(6 - rank).ok());
    say(store, "heard", rank);
    await(store, "over");
  });
  for (int rank = 0; rank < kMembers; ++rank) processes.await("ready", rank);
  for (int victim : {0, 1, 3}) processes.signal(victim, SIGKILL);
  for (int rank : {2, 4}) processes.await("heard", rank);
  processes.say("over");
  for (int rank : {2, 4}) processes.expect_good_end(rank);
}

// A forked child of a member outlives it, and must not keep its connections open.
TEST(TcpFailureDetectorProcesses, ForkedChildKeepsNoConnection) {
  for (int victim : {0, 1}) {
    Processes processes;
    processes.start(3, [&](Store& store, int rank) {
      DetectorPtr detector = join(rank, 3, store);
      ASSERT_NE(detector, nullptr);
      if (rank == victim) {
        pid_t child = fork();
        if (child == 0) {
          alarm(300);
          detector->close_descriptors();
          detector.reset();
          EXPECT_TRUE(store.set("child", std::to_string(getpid())).ok());
          while (true) pause();
        }
        await(store, "child");
      }
      say(store, "ready", rank);
      if (rank == victim)
        while (true) pause();
      EXPECT_TRUE(soon([&] { return !detector->gone(victim).ok(); }));
      EXPECT_EQ(detector->gone(victim).code(), Code::kPeerDied);
    });
    for (int rank = 0; rank < 3; ++rank) processes.await("ready", rank);
    processes.signal(victim, SIGKILL);
    for (int rank = 0; rank < 3; ++rank)
      if (rank != victim) processes.expect_good_end(rank);
    kill(std::stoi(processes.store().get("child", Deadline::after(kPatience)).value()), SIGKILL);
  }
}

// More notices than the kernel buffers for a stopped member: the others are not delayed, and it
// gets all notices when it continues.
TEST(TcpFailureDetectorProcesses, StoppedMemberDoesNotDelayOtherMembers) {
  constexpr uint64_t kTeams = 8000;
  Processes processes;
  processes.start(4, [](Store& store, int rank) {
    DetectorPtr detector = join(rank, 4, store);
    ASSERT_NE(detector, nullptr);
    say(store, "ready", rank);
    await(store, "stopped");
    if (rank == 1)
      for (uint64_t team = 1; team <= kTeams; ++team)
        detector->end(team, Status(Code::kAborted, std::string(2000, 'x')));
    EXPECT_TRUE(soon([&] { return detector->count() >= kTeams; })) << detector->count();
    EXPECT_TRUE(detector->gone(2).ok());
    say(store, "heard", rank);
    await(store, "over");
  });
  for (int rank = 0; rank < 4; ++rank) processes.await("ready", rank);
  processes.stop(2);
  processes.say("stopped");
  for (int rank : {0, 1, 3}) processes.await("heard", rank);
  EXPECT_FALSE(processes.store().has("heard2").value());
  processes.signal(2, SIGCONT);
  processes.await("heard", 2);
  processes.say("over");
  for (int rank = 0; rank < 4; ++rank) processes.expect_good_end(rank);
}

// A leaving member waits for a stopped one no longer than the limit.
TEST(TcpFailureDetectorProcesses, LeaveTimeWithStoppedMemberIsBounded) {
  Processes processes;
  processes.start(3, [](Store& store, int rank) {
    DetectorPtr detector = join(rank, 3, store);
    ASSERT_NE(detector, nullptr);
    say(store, "ready", rank);
    await(store, "stopped");
    const int64_t start_ns = monotonic_ns();
    detector->leave();
    if (rank == 0) return;
    EXPECT_GT(monotonic_ns() - start_ns, 500'000'000);  // it has waited
    EXPECT_LT(monotonic_ns() - start_ns, 10'000'000'000);
  });
  for (int rank = 0; rank < 3; ++rank) processes.await("ready", rank);
  processes.stop(0);
  processes.say("stopped");
  for (int rank : {1, 2}) processes.expect_good_end(rank);
  processes.signal(0, SIGCONT);
  processes.expect_good_end(0);
}

}  // namespace
}  // namespace dscomm::test
