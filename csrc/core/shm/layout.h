// What lies in an arena, byte for byte: the contract between processes.
//
// Only the owner of an arena writes it. Everything that two processes touch is either an atomic
// that names its partner, or plain memory that is written before such an atomic is stored and read
// after it is loaded. kLayoutVersion is compared when arenas meet.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/base/arena_id.h"
#include "core/team/call_record.h"

namespace dscomm {

inline constexpr uint64_t kArenaMagic = 0x4d4d4f435344ull;  // "DSCOMM"
inline constexpr uint32_t kLayoutVersion = 7;

// Two 64-byte cache lines: processors fetch them in pairs.
inline constexpr size_t kLineBytes = 128;
inline constexpr size_t kPageBytes = 4096;

// How many collectives a rank may be ahead of the slowest reader of its lines.
inline constexpr uint64_t kSlots = 8;

// Sequence and phase as one growing word, so that "at least" is the only comparison. 2^40
// collectives in a group; 2^24 phases in one.
inline constexpr int kPhaseBits = 24;
inline constexpr uint32_t kLastPhase = (1u << kPhaseBits) - 1;
constexpr uint64_t progress(uint64_t sequence, uint32_t phase) {
  return sequence << kPhaseBits | phase;
}
constexpr uint64_t sequence_of(uint64_t word) { return word >> kPhaseBits; }

// The last groups that a process says it has formed.
inline constexpr size_t kFormedGroups = 64;

// At offset 0 of every arena.
struct ArenaHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t reserved;
  ArenaId id;
  uint64_t arena_bytes;
  // Held from before the arena is published until the process ends, by a thread that lives as long.
  // When the process dies the kernel sets FUTEX_OWNER_DIED in its first word, within a fraction of
  // a millisecond, readable through a read-only mapping.
  alignas(kLineBytes) pthread_mutex_t life;
  // Not zero while a thread of the owner sleeps on its doorbell: whoever posts to a channel that
  // the owner reads, or consumes from one that it writes, sends the doorbell a byte then. Dekker
  // pair with Cell::number and ChannelLines::consumed: both sides seq_cst.
  alignas(kLineBytes) std::atomic<uint32_t> doorbell_sleepers;
  // How often an entry of the channel directory has changed, so that a peer that looks for its own
  // entry scans again only then. seq_cst on both sides: the owner adds after the entry is complete
  // and before it publishes the first cell, so the Dekker pair of doorbell_sleepers covers new
  // channels.
  alignas(kLineBytes) std::atomic<uint64_t> channel_changes;
  // Offset of the first ChannelBlock; 0: none yet. Release store, acquire loads by scanning peers.
  std::atomic<uint64_t> first_channel_block;
  // Hashes that name the groups that this process has formed, the oldest overwritten. Release
  // stores in Context::note_formed(), acquire loads in Group::formed_without_this().
  alignas(kLineBytes) std::atomic<uint64_t> formed[kFormedGroups];
};
static_assert(sizeof(ArenaHeader) <= kPageBytes);

// What a slot has room for: it is two cache lines, which a reader fetches at once, see
// wait_at_least().
inline constexpr size_t kTinyBytes = kLineBytes - 2 * sizeof(uint64_t);

// Where a rank's data of one call lies, in place of tiny data. Offsets are in the rank's arena, but
// for the tensor's.
struct StagePlace {
  uint64_t offset;         // of the buffers; round r is in buffer r % buffers
  uint64_t table_offset;   // of one number for each rank
  uint64_t bytes;          // that this rank publishes in all, where readers must know
  uint64_t tensor_offset;  // in the rank's pool
  uint32_t buffer_bytes;   // from one to the next
  uint32_t buffers;
  uint32_t piece_bytes;  // of each rank's piece of a buffer; 0: no pieces
  uint32_t in_place;     // what is read from the tensor in place of the buffers: kInput, kResult
};
inline constexpr uint32_t kInput = 1;   // what the rank brought
inline constexpr uint32_t kResult = 2;  // what it has made of it
static_assert(sizeof(StagePlace) <= kTinyBytes);

struct alignas(kLineBytes) Slot {
  // progress(sequence, phase). seq_cst exchange by the owner, after everything else in the slot and
  // in staging; acquire loads by the members. progress(s, 0) marks a slot that is being rewritten;
  // bytes of its data that nobody reads any more may have been before.
  std::atomic<uint64_t> posted;
  // Rolling hash of every call up to this one. Stored with release after posted was set to
  // progress(s, 0), so that whoever reads a new hash also sees that the slot has moved on.
  std::atomic<uint64_t> hash;
  union {
    std::byte tiny[kTinyBytes];
    StagePlace stage;
  };
};
static_assert(sizeof(Slot) == kLineBytes);

// Why a group ended, as the first rank that saw it says. Written once, before `aborted` is stored.
struct AbortRecord {
  uint64_t sequence;
  uint64_t finished;  // calls of the owner, as people count them (CallRecord::number())
  int32_t rank;       // who first saw it
  uint32_t code;      // Code
  char message[880];  // ends with a zero
};

inline constexpr size_t kLatencyProbes = 8;
struct alignas(kLineBytes) LatencyProbe {
  std::atomic<int64_t> written_ns;  // when the owner last wrote it, by CLOCK_MONOTONIC
};

// Room for the name of an exception's type.
inline constexpr size_t kExceptionBytes = 64;

// Leaving has two steps. A rank that calls no more compares once more what the others have
// published; only then its lines, and theirs, may become another group's.
inline constexpr uint32_t kCallsNoMore = 1;
inline constexpr uint32_t kReadsNoMore = 2;

// A rank's lines for one group.
struct alignas(kPageBytes) GroupLines {
  // Of the group; another one means that the owner has reused the lines, hence left long ago.
  // Release store when the lines are set up, acquire loads by members that look whether it left.
  std::atomic<uint64_t> group_id;
  // Whether the owner has left the group: kCallsNoMore, kReadsNoMore, or 0. seq_cst exchange of the
  // first, with seq_cst loads by members that leave: of two, one sees the other. Release store of
  // the second; acquire loads in slow waits and sweeps.
  std::atomic<uint32_t> closed;
  // 1 once the owner's process has begun to end without having left: it may still make calls, but
  // when it is gone it was not killed. Release store after `exception` is written; acquire loads by
  // members that find it gone.
  std::atomic<uint32_t> ending;
  char exception[kExceptionBytes];  // the type that ends it, or empty; ends with a zero
  // 1 after `abort` is written. seq_cst exchange; acquire loads at entry, at exit and in slow
  // waits.
  alignas(kLineBytes) std::atomic<uint32_t> aborted;
  // How far the owner has read: progress(s, rounds) within s, progress(s + 1, 0) when s is done.
  // seq_cst exchange by the owner; acquire loads by members that want memory back.
  alignas(kLineBytes) std::atomic<uint64_t> done;
  // Threads of the owner that sleep, or are about to, on a member's posted or done. seq_cst on both
  // sides: the sleeper adds and then looks at the word, the publisher stores the word and then
  // looks here, so at least one of them sees the other.
  alignas(kLineBytes) std::atomic<uint32_t> sleepers;
  Slot slots[kSlots];
  // Of the calls in the slots. Copied word by word with atomics, the sequence last and 0 meanwhile,
  // because the reader of an error message may race with the next call; a reader looks at the
  // sequence again afterwards.
  alignas(kLineBytes) CallRecord calls[kSlots];
  alignas(kLineBytes) AbortRecord abort;
  // Relaxed on both sides: nothing follows from a value but that a load of it had to fetch the line
  // from the owner's cache; see Distance. Several, used in no order, and away from lines that are
  // looked at all the time, or the processor learns to fetch them together with these.
  alignas(8 * kLineBytes) LatencyProbe latency_probes[kLatencyProbes];
};
static_assert(sizeof(GroupLines) == kPageBytes);

static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == 8);

}  // namespace dscomm
