// Messages between the leader of a host and its dscomm-pmix.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "core/base/message_socket.h"
#include "core/base/packer.h"

namespace dscomm {

// The descriptor of dscomm-pmix's socket.
inline constexpr int kPmixSocket = 3;

enum class PmixMessageKind : uint32_t {
  // From the leader:
  kDescription = 1,  // PmixDescription
  kFenceResult,      // PmixFenceResult
  kProbe,            // asks for kAlive
  kQuit,             // end in 5 s, unless a rank has connected: then outlive the ranks
  // From dscomm-pmix:
  kStarted,  // the first message: its pid, in digits
  kReady,    // PmixEnvironments
  kAlive,    // its main thread and libpmix's thread work
  kFailed,   // a sentence: why it cannot serve
  kFence,    // PmixFence
};

// A rank's process.
struct RankProcess {
  uint32_t rank = 0;
  int64_t pid = 0;
  uint64_t start_time = 0;  // process_start_time()
  uint32_t uid = 0, gid = 0;

  static constexpr std::tuple kFields{&RankProcess::rank, &RankProcess::pid,
                                      &RankProcess::start_time, &RankProcess::uid,
                                      &RankProcess::gid};
};

// A host as MPI sees it: ranks of one machine in different containers are on different hosts.
struct MpiHost {
  std::string name;                // unique; letters, digits, points and dashes
  std::vector<RankProcess> ranks;  // the first is the leader
  bool crowded = false;            // more ranks than cores

  static constexpr std::tuple kFields{&MpiHost::name, &MpiHost::ranks, &MpiHost::crowded};
};

struct PmixDescription {
  std::string name_space;
  uint32_t own_host = 0;
  std::vector<MpiHost> hosts;
  bool verbose = false;  // keep standard error

  // The ranks on the host of dscomm-pmix.
  const std::vector<RankProcess>& clients() const { return hosts[own_host].ranks; }

  static constexpr std::tuple kFields{&PmixDescription::name_space, &PmixDescription::own_host,
                                      &PmixDescription::hosts, &PmixDescription::verbose};
};

// Lists of "NAME=VALUE".
struct PmixEnvironments {
  std::vector<std::vector<std::string>> own;  // by client: its rank, and its server's address
  std::vector<std::string> defaults;          // for all ranks, unless the user has set them

  static constexpr std::tuple kFields{&PmixEnvironments::own, &PmixEnvironments::defaults};
};

// A fence that all its ranks on this host have entered. Sent only if other hosts take part.
struct PmixFence {
  uint64_t number = 0;          // identifies it in the answer
  std::string name;             // the same on all hosts that take part
  std::vector<uint32_t> hosts;  // hosts that take part, ascending
  std::string data;

  static constexpr std::tuple kFields{&PmixFence::number, &PmixFence::name, &PmixFence::hosts,
                                      &PmixFence::data};
};

struct PmixFenceResult {
  uint64_t number = 0;
  bool succeeded = false;
  std::string data;  // of all hosts, in their order

  static constexpr std::tuple kFields{&PmixFenceResult::number, &PmixFenceResult::succeeded,
                                      &PmixFenceResult::data};
};

using PmixSocket = MessageSocket<PmixMessageKind>;
using PmixMessage = PmixSocket::Message;

}  // namespace dscomm
