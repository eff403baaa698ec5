// The first message on a connection to libpmix.
//
// libpmix listens on 127.0.0.1, where any user of the host can connect, and reads the first message
// without a timeout on the thread that serves all ranks: one silent connection would block them
// all. So it gets a connection only once the whole greeting has arrived (accept.cc).
#pragma once

#include <cstddef>
#include <cstdint>

namespace dscomm {

// The header before the greeting in libpmix 3 to 5, in host byte order.
struct PmixHeader {
  int32_t index;
  uint32_t tag;
  uint32_t bytes;  // length of the greeting
  uint32_t padding;
};
// libpmix itself rejects longer ones.
inline constexpr uint32_t kMostGreetingBytes = 128 << 10;

// kRefused: not the greeting of a rank, or the peer has closed the connection.
enum class Greeting { kNothing, kPart, kWhole, kRefused };

// How much of a greeting has arrived. Reads nothing from the socket.
Greeting peek_greeting(int socket);

}  // namespace dscomm
