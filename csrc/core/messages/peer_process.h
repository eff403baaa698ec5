// PeerProcess: another process, on this host or another, to which messages go. CellChannel: carries
// messages to and from it, cut into cells (cell.h), in order.
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

// A cell that has arrived: a copy of its header, which the peer can no longer change, and its data.
struct ArrivedCell {
  CellHeader header;
  const std::byte* data;
};

// Where the next cell appears: the word has this value once the cell has come.
struct CellFlag {
  const std::atomic<uint64_t>* word = nullptr;
  uint64_t value = 0;
};

// Nothing here blocks. One thread at a time calls in, under PointToPoint's mutex.
class CellChannel {
 public:
  virtual ~CellChannel() = default;

  // Allocates the memory that cells of a message of this length need, if it is missing: about
  // channel_bytes for buffers. kResource if memory is short.
  virtual Status open(size_t channel_bytes, uint64_t message_bytes) = 0;
  // Data bytes in each cell of a message of this length, except the last. Requires open().
  virtual size_t cell_bytes(uint64_t message_bytes) const = 0;
  // Whether the peer reads cells in the sender's memory, so that a published cell has arrived.
  virtual bool is_direct() const { return false; }
  // Where to put the data of the next cell; null while the ring is full.
  virtual std::byte* vacant_cell(size_t bytes) = 0;
  // Whether the peer's core is cache-far, as far as was measured.
  virtual bool is_far() const { return false; }
  // Copies data into a vacant cell.
  virtual void fill(std::byte* cell, const std::byte* data, size_t bytes) {
    if (bytes > 0) std::memcpy(cell, data, bytes);
  }
  // Hands the filled cell to the peer. `more`: the caller fills the next cell at once, if it is
  // vacant. Returns whether the peer sleeps, so that the caller must ring its doorbell.
  virtual bool publish(const CellHeader& header, bool more) = 0;
  // After the last cell of a message: prepares for a next message of this length.
  virtual void end_message(uint64_t /*message_bytes*/) {}

  // The oldest cell that has arrived, if any. An error if the peer wrote invalid data, or if this
  // process has no memory for its part of the channel.
  virtual Result<std::optional<ArrivedCell>> next_cell() = 0;
  // The word that next_cell() polls, for a thread that waits only for it; null if unknown.
  virtual CellFlag next_flag() { return {}; }
  // Gives the cell of next_cell() back to the peer: now if `at_once`, else perhaps with later ones.
  // Returns whether the peer sleeps, so that the caller must ring its doorbell.
  virtual bool consume(bool at_once) = 0;
  // The data of a message in the peer's tensor pool; null if it is out of bounds, or this process
  // cannot read the pool.
  virtual const std::byte* in_place(uint64_t /*offset*/, uint64_t /*bytes*/) const {
    return nullptr;
  }
  // Cells that were published, and how many of them the peer has given back, as far as is known.
  virtual uint64_t published() const { return 0; }
  virtual uint64_t given_back() { return 0; }

  // The error that keeps cells from getting through, in either direction; OK while cells do.
  virtual Status failure() const { return {}; }

  // Whether this process must still act for a published cell to arrive: its send is unfinished.
  virtual bool in_flight() = 0;

  // After the peer's death: frees the channel's memory.
  virtual void drop() = 0;
};

class PeerProcess {
 public:
  virtual ~PeerProcess() = default;

  virtual const ArenaId& id() const = 0;
  // Whether the process still runs, as far as is known. `thoroughly` may cost a system call.
  virtual bool alive(bool thoroughly = false) const = 0;
  virtual std::string describe() const = 0;    // "pid 123 on host a"
  virtual std::string state_text() const = 0;  // the state of the process, as far as visible

  // The token of the doorbell; null if there is none: then threads that wait for the process must
  // poll.
  virtual const ArenaId* doorbell() const = 0;
  // If there is no doorbell: the sockets that carry cells of all processes without one; or null.
  virtual SocketList* sockets() const { return nullptr; }
  // Whether one of its threads sleeps on its doorbell now.
  virtual bool sleeps() const = 0;

  virtual std::unique_ptr<CellChannel> make_channel(const std::shared_ptr<Arena>& arena,
                                                    ChannelDirectory& directory) = 0;
};

}  // namespace dscomm
