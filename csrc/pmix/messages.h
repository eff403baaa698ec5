// Messages between the leader of a host and its dscomm-pmix.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
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
  kQuit,             // no new requests will come
  // From dscomm-pmix:
  kStarted,  // the first message: its pid, in digits
  kReady,    // PmixEnvironments
  kAlive,    // its main thread and libpmix's thread work
  kFailed,   // a sentence: why it cannot serve
  kFence,    // PmixFence
};

// A host as MPI sees it.
struct PmixHost {
  std::string name;  // unique
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
  std::vector<std::vector<std::string>> own;  // by client: its rank, and its server's address
  std::vector<std::string> defaults;          // for all ranks, unless the user has set them
};

// All ranks of this host have entered a fence in which other hosts take part.
struct PmixFence {
  uint64_t number = 0;          // identifies it in the answer
  std::string name;             // the same on all hosts that take part
  std::vector<uint32_t> hosts;  // hosts that take part, ascending
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
