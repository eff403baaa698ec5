// Endpoint: another process as point-to-point sees it, whatever lies between; and CellChannel: the
// cells that go to it and come from it, in order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "core/base/arena_id.h"
#include "core/base/status.h"
#include "core/messages/cell.h"

namespace dscomm {

class Arena;
class ChannelDirectory;
class SocketList;

// A cell that has arrived: a copy of its header, which the peer can no longer change, and its
// bytes.
struct ArrivedCell {
  CellHeader header;
  const std::byte* data;
};

// Where the next cell will show: the word has this value once it is there.
struct CellFlag {
  const std::atomic<uint64_t>* word = nullptr;
  uint64_t value = 0;
};

// Nothing here blocks, and one thread at a time calls in (PointToPoint's mutex).
class CellChannel {
 public:
  virtual ~CellChannel() = default;

  // Makes what cells of such a message need, unless it is there; of the buffers, about
  // channel_bytes. kResource when there is no memory for it.
  virtual Status open(size_t channel_bytes, uint64_t message_bytes) = 0;
  // How much of a message goes into one cell of it, the last one left out; open() was called.
  virtual size_t cell_bytes(uint64_t message_bytes) const = 0;
  // Whether the peer reads the cells where they are filled, so that one is with it as soon as it is
  // handed over.
  virtual bool is_direct() const { return false; }
  // Where the bytes of the next cell go; null while the ring is full.
  virtual std::byte* vacant_cell(size_t bytes) = 0;
  // Whether the peer's core shares no cache with this one, as far as was measured.
  virtual bool is_far() const { return false; }
  // Copies to it.
  virtual void fill(std::byte* cell, const std::byte* data, size_t bytes) {
    if (bytes > 0) std::memcpy(cell, data, bytes);
  }
  // Hands that cell over; `more` where the caller goes on with the next one at once, if it is
  // vacant. True when the peer sleeps and its doorbell is to be rung.
  virtual bool publish(const CellHeader& header, bool more) = 0;
  // The message that was handed over is complete; the next one may be as long.
  virtual void end_message(uint64_t message_bytes) { (void)message_bytes; }

  // The oldest cell that has arrived, if any. An error when what the peer says makes no sense, or
  // there is no memory for this side's part.
  virtual Result<std::optional<ArrivedCell>> next_cell() = 0;
  // Where next_cell() looks, for whoever waits for it alone. No word where that is not known.
  virtual CellFlag next_flag() { return {}; }
  // Gives that cell back to the peer; `at_once` where the peer waits for it. True when the peer
  // sleeps and its doorbell is to be rung.
  virtual bool consume(bool at_once) = 0;
  // The bytes of a message that lies in the peer's tensor pool; null where they do not lie in it,
  // or it cannot be read from here.
  virtual const std::byte* in_place(uint64_t offset, uint64_t bytes) const {
    (void)offset, (void)bytes;
    return nullptr;
  }
  // How many cells were published, and how many of them the peer has given back as far as it said.
  virtual uint64_t published() const { return 0; }
  virtual uint64_t given_back() { return 0; }

  // Why no cell gets through any more, in either direction; OK while they do.
  virtual Status failure() const { return {}; }

  // Whether a cell that was handed over still needs this process to get through.
  virtual bool in_flight() = 0;

  // After the peer's death: returns the memory of the channel.
  virtual void drop() = 0;
};

class Endpoint {
 public:
  virtual ~Endpoint() = default;

  virtual const ArenaId& id() const = 0;
  // Whether the process still runs, as far as is known. `thoroughly` may cost a system call.
  virtual bool alive(bool thoroughly = false) const = 0;
  virtual std::string describe() const = 0;    // "pid 123 on host a"
  virtual std::string state_text() const = 0;  // what it is doing, as far as can be seen

  // The token of its doorbell; null if it has none, so that any rank which waits for it must poll.
  virtual const ArenaId* doorbell() const = 0;
  // Of a peer without one: the sockets that its cells come by, which are the same for all such
  // peers; null where they are not known.
  virtual SocketList* sockets() const { return nullptr; }
  // Whether a thread of it sleeps on its doorbell now.
  virtual bool sleeps() const = 0;

  virtual std::unique_ptr<CellChannel> make_channel(const std::shared_ptr<Arena>& arena,
                                                    ChannelDirectory& directory) = 0;
};

}  // namespace dscomm
