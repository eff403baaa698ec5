// The first message on a connection to libpmix.
//
// libpmix listens at 127.0.0.1, where any user of the host may connect, and reads what comes first
// without a bound, on the thread that serves all ranks: one silent connection held them all up. So
// it gets a connection only once that much has arrived (see accept.cc).
#pragma once

#include <cstddef>
#include <cstdint>

namespace dscomm {

// Of libpmix 3 to 5: in front of the greeting, in the host's order of bytes.
struct PmixHeader {
  int32_t index;
  uint32_t tag;
  uint32_t bytes;  // of what follows
  uint32_t padding;
};
// libpmix itself takes no longer one.
inline constexpr uint32_t kMostGreetingBytes = 128 << 10;

// kRefused: no rank would begin like that, or whoever connected has gone.
enum class Greeting { kNothing, kPart, kWhole, kRefused };

// How much of a greeting has arrived. Takes nothing from the socket.
Greeting look_at_greeting(int socket);

}  // namespace dscomm
