// The memory layout of an arena: the contract between processes.
//
// Only the owner of an arena writes it. Data that two processes touch is either an atomic, whose
// comment names the access that it pairs with, or plain memory that is written before such an
// atomic is stored and read after it is loaded. Processes compare kLayoutVersion when they attach.
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
inline constexpr size_t kLinePairBytes = 128;
inline constexpr size_t kPageBytes = 4096;

// How many collectives a rank may be ahead of its slowest reader.
inline constexpr uint64_t kSlots = 8;

// Sequence and phase in one word that only grows, so that "at least" is the only comparison. Up to
// 2^40 collectives in a group and 2^24 phases in a collective.
inline constexpr int kPhaseBits = 24;
inline constexpr uint32_t kLastPhase = (1u << kPhaseBits) - 1;
constexpr uint64_t phase_word(uint64_t sequence, uint32_t phase) {
  return sequence << kPhaseBits | phase;
}
constexpr uint64_t sequence_of(uint64_t word) { return word >> kPhaseBits; }

// How many of its latest groups a process lists in ArenaHeader::formed.
inline constexpr size_t kFormedGroups = 64;

// At offset 0 of every arena.
struct ArenaHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t reserved;
  ArenaId id;
  uint64_t arena_bytes;
  // Robust mutex that a thread of the owner locks before the arena is published and holds until the
  // process ends. When the process dies, the kernel sets FUTEX_OWNER_DIED in its first word within
  // a fraction of a millisecond, visible through a read-only mapping.
  alignas(kLinePairBytes) pthread_mutex_t life;
  // Not zero while a thread of the owner sleeps on its doorbell. A peer that posts to a channel
  // that the owner reads, or consumes from a channel that the owner writes, then sends the doorbell
  // a byte. Dekker pair with Cell::number and ChannelEntry::consumed: seq_cst on both sides.
  alignas(kLinePairBytes) std::atomic<uint32_t> doorbell_sleepers;
  // Counts changes of the channel directory, so that a peer looks for its entry again only after a
  // change. seq_cst on both sides: the owner increments it after the entry is complete and before
  // it publishes the first cell, so the Dekker pair of doorbell_sleepers covers new channels.
  alignas(kLinePairBytes) std::atomic<uint64_t> channel_changes;
  // Offset of the first ChannelBlock; 0: none. Release store by the owner; acquire loads by peers.
  std::atomic<uint64_t> first_channel_block;
  // Hashes that identify the groups that this process has formed; new ones replace the oldest.
  // Release stores in Context::note_formed(), acquire loads in Group::formed_without_this().
  alignas(kLinePairBytes) std::atomic<uint64_t> formed[kFormedGroups];
};
static_assert(sizeof(ArenaHeader) <= kPageBytes);

// Data bytes of a Slot, which is two cache lines, fetched together (see wait_at_least()).
inline constexpr size_t kTinyBytes = kLinePairBytes - 2 * sizeof(uint64_t);

// Where a rank's data of a call lies, if it is not in the slot. Offsets are relative to the rank's
// arena, tensor_offset to its tensor pool.
struct StagedData {
  uint64_t offset;         // of the first buffer; round r uses buffer r % buffers
  uint64_t table_offset;   // of a table of one number for each rank
  uint64_t bytes;          // that this rank publishes in the call
  uint64_t tensor_offset;  // in the tensor pool
  uint32_t buffer_bytes;   // from one buffer to the next
  uint32_t buffers;
  uint32_t piece_bytes;  // of each rank's piece of a buffer; 0: no pieces
  uint32_t in_place;     // kInput, kResult: read from the tensor instead of the buffers
};
inline constexpr uint32_t kInput = 1;   // the rank's own values
inline constexpr uint32_t kResult = 2;  // the rank's results, computed from all ranks' values
inline constexpr uint32_t kEverything = kInput | kResult;
static_assert(sizeof(StagedData) <= kTinyBytes);

struct alignas(kLinePairBytes) Slot {
  // phase_word(sequence, phase). seq_cst exchange by the owner, after it has written the slot and
  // its staging; acquire loads by members. phase_word(s, 0) marks a slot that is being rewritten;
  // data that no member needs may be overwritten even before that (prefetch for ownership).
  std::atomic<uint64_t> posted;
  // Rolling hash of every call up to this one. Release store after posted was set to phase_word(s,
  // 0), so that a member that loads a new hash (acquire) also sees that the slot was reused.
  std::atomic<uint64_t> hash;
  union {
    std::byte tiny[kTinyBytes];
    StagedData staged;
  };
};
static_assert(sizeof(Slot) == kLinePairBytes);

// The first cause of a group's end that the owner knew. Written once, before `aborted` is stored.
struct AbortRecord {
  uint64_t sequence;
  uint64_t finished;  // calls that the owner has finished, see CallRecord::number()
  int32_t rank;       // the owner
  uint32_t code;      // Code
  char message[880];  // NUL-terminated
};

inline constexpr size_t kLatencyProbes = 8;
struct alignas(kLinePairBytes) LatencyProbe {
  std::atomic<int64_t> written_ns;  // by CLOCK_MONOTONIC
};

// A rank leaves in two steps. kCallsEnded: it makes no more calls, and compares its calls once more
// with those that the others have published. kReadsEnded: it no longer reads memory of the others.
inline constexpr uint32_t kCallsEnded = 1;
inline constexpr uint32_t kReadsEnded = 2;

// A rank's mailbox for one group. Only that rank writes it.
struct alignas(kPageBytes) Mailbox {
  // A different id means that the owner has reused the mailbox, so the owner left long ago. Release
  // store at set-up; acquire loads by members that check whether the owner left.
  std::atomic<uint64_t> group_id;
  // 0, or kCallsEnded or kReadsEnded once the owner has left. kCallsEnded: seq_cst exchange, and
  // seq_cst loads by members that leave, so that of two leaving members at least one sees the
  // other. kReadsEnded: release store; acquire loads in slow waits and in the arena's sweeps.
  std::atomic<uint32_t> closed;
  // 1 once the owner's process has begun to exit without leaving the group. It may still make
  // calls, but its later end is not a crash. Release store after `exception` is written; acquire
  // loads by members that find the process gone.
  std::atomic<uint32_t> ending;
  char exception[64];  // type of the exception that ends the process, or ""; NUL-terminated
  // 1 once `abort` is written. seq_cst exchange; acquire loads by members at the start of a call,
  // at the end of a call that reads in place, and in slow waits.
  alignas(kLinePairBytes) std::atomic<uint32_t> aborted;
  // How far the owner has read: phase_word(s, rounds) within call s, phase_word(s + 1, 0) after it.
  // seq_cst exchange by the owner; acquire loads by members that want to reuse memory.
  alignas(kLinePairBytes) std::atomic<uint64_t> done;
  // Threads of the owner that sleep, or are about to, on a member's `posted` or `done`. Dekker
  // pair, seq_cst on both sides: the sleeper increments this and then loads the word, the publisher
  // stores the word and then loads this, so at least one of them sees the other.
  alignas(kLinePairBytes) std::atomic<uint32_t> sleepers;
  Slot slots[kSlots];
  // Descriptions of the calls in the slots. A member may read one for an error while the owner
  // writes the next. So the owner sets the sequence to 0, stores the other words as atomics, and
  // stores the sequence last. The reader loads the sequence before and after the other words.
  alignas(kLinePairBytes) CallRecord calls[kSlots];
  alignas(kLinePairBytes) AbortRecord abort;
  // Relaxed on both sides: only the latency of the load counts, which fetches the line from the
  // owner's cache (see CacheDistance). Several probes, used in irregular order and far from polled
  // cache lines, because the hardware prefetcher might otherwise fetch the probes with those lines.
  alignas(8 * kLinePairBytes) LatencyProbe latency_probes[kLatencyProbes];
};
static_assert(sizeof(Mailbox) == kPageBytes);

static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == 8);

}  // namespace dscomm
