// Two connected sockets.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdlib>

#include "core/base/owned.h"

namespace dscomm::testing {

struct SocketPair {
  explicit SocketPair(int type = SOCK_STREAM) {
    std::array<int, 2> ends;
    if (socketpair(AF_UNIX, type | SOCK_NONBLOCK, 0, ends.data()) != 0) abort();
    near = UniqueFd(ends[0]);
    far = UniqueFd(ends[1]);
  }

  UniqueFd near, far;
};

}  // namespace dscomm::testing
