// What the leader of a host and its dscomm-pmix say to each other.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/message_socket.h"
#include "core/base/packer.h"

namespace dscomm {

// The descriptor that dscomm-pmix finds its socket at.
inline constexpr int kPmixSocket = 3;

enum class PmixMessageKind : uint32_t {
  // From the leader.
  kDescription = 1,  // PmixDescription
  kFenceResult,      // PmixFenceResult
  kProbe,            // asks for kAlive
  kQuit,             // nothing new will be asked for
  // From dscomm-pmix.
  kStarted,  // its pid, in digits: before anything else
  kReady,    // PmixEnvironments
  kAlive,    // its main thread and libpmix's thread work
  kFailed,   // a sentence: why it cannot serve
  kFence,    // PmixFence
};

// A host as MPI shall see it.
struct PmixHost {
  std::string name;  // no other host has it
  std::vector<uint32_t> ranks;
};

// A rank on the host of dscomm-pmix.
struct PmixClient {
  uint32_t rank = 0;
  int64_t pid = 0;
  uint64_t start_time = 0;  // process_start_time()
  uint32_t uid = 0, gid = 0;
};

struct PmixDescription {
  std::string name_space;
  uint32_t own_host = 0;
  std::vector<PmixHost> hosts;
  std::vector<PmixClient> clients;  // the leader is the first
  bool verbose = false;             // keep standard error
};

// Lists of "NAME=VALUE".
struct PmixEnvironments {
  std::vector<std::vector<std::string>> own;  // by client: who it is, and where its server
  std::vector<std::string> defaults;          // for all, where the user has not set them
};

// All ranks of this host have entered a fence that other hosts take part in.
struct PmixFence {
  uint64_t number = 0;          // names it in the answer
  std::string name;             // the same on all hosts that take part
  std::vector<uint32_t> hosts;  // which ones, ascending
  std::string data;
};

struct PmixFenceResult {
  uint64_t number = 0;
  bool succeeded = false;
  std::string data;  // of all hosts, in their order
};

std::string pack(const PmixDescription& description);
std::string pack(const PmixEnvironments& environments);
std::string pack(const PmixFence& fence);
std::string pack(const PmixFenceResult& result);
bool unpack(std::string_view text, PmixDescription* description);
bool unpack(std::string_view text, PmixEnvironments* environments);
bool unpack(std::string_view text, PmixFence* fence);
bool unpack(std::string_view text, PmixFenceResult* result);

using PmixSocket = MessageSocket<PmixMessageKind>;
using PmixMessage = PmixSocket::Message;

}  // namespace dscomm
