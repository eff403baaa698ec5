#include "core/shm/staging/staging.h"

#include <algorithm>

#include "core/base/round_up.h"
#include "core/shm/staging/copy.h"

namespace dscomm {
namespace {

// Groups keep their slabs between calls while less than this, and less than a quarter of the arena,
// is handed out.
constexpr size_t kKeptBytes = 128 << 20;

size_t kept_bytes(const Arena& arena) { return std::min(kKeptBytes, arena.size() / 4); }

// Calls that need up to half a page use the ring's first pages in turn, one call in each page: in a
// shared page, the prefetcher of a reader's core would steal the next call's lines from the writer.
constexpr size_t kSmallPieceBytes = kPageBytes / 2;
constexpr size_t kSmallRingBytes = 4 * kPageBytes;

// If the readers run on the writer's core, calls of up to half of this size use only this much of
// the ring, which stays in the core's caches. (32 KiB, two threads of a core: 2.6 us; 3.8 to 5.7
// through a whole ring.)
constexpr size_t kSameCoreRingBytes = 256 << 10;

// The longest range of a call that is worth prefetching for ownership. (Cache-near, without and
// with: 4 KiB 0.60 and 0.50 us, 8 KiB no gain, 32 KiB 2.2 and 2.4. Cache-far: 512 bytes 0.84 and
// 0.60 us, 2 KiB 1.00 and 1.10.) Nothing is prefetched if the readers run on the writer's core,
// whose caches have the lines.
constexpr size_t kPrefetchedNearBytes = 4096;
constexpr size_t kPrefetchedFarBytes = kShortCopyBytes;

}  // namespace

Staging::~Staging() {
  if (slab_offset_ != 0) give_back_slab(mailboxes_.members().unread_later());
}

size_t Staging::table_bytes() const {
  return round_up(mailboxes_.size() * sizeof(uint64_t), kPageBytes);
}

Status Staging::take_slab(size_t needed_bytes) {
  const size_t kept = table_bytes() + ring_bytes_;
  is_borrowed_ = true;
  if (arena_->used_bytes() + kept <= kept_bytes(*arena_)) {
    if (Result<uint64_t> offset = arena_->allocate(kept); offset.ok()) {
      slab_offset_ = offset.value();
      slab_ring_bytes_ = ring_bytes_;
      is_borrowed_ = false;
    }
  }
  if (is_borrowed_) DSCOMM_RETURN_IF_ERROR(borrow_slab(needed_bytes));
  data_ = arena_->data() + slab_offset_;
  // No rank has read this slab.
  earlier_.fill({});
  next_ = next_small_ = 0;
  table_free_after_ = 0;
  return {};
}

Status Staging::borrow_slab(size_t needed_bytes) {
  slab_ring_bytes_ = needed_bytes;
  Result<uint64_t> offset = arena_->lend(slab_bytes(), this_call());
  if (!offset.ok()) {
    // Memory comes back when other ranks have read what this process has staged. If no memory is
    // due, waiting does not help.
    const Arena::Ticket ticket(*arena_, this_call());
    const std::string refused = offset.status().message();
    const auto is_over = [&] {
      const bool is_expected = arena_->may_lend_later(ticket);
      offset = arena_->lend(slab_bytes(), this_call(), &ticket);
      return offset.ok() || !is_expected;
    };
    DSCOMM_RETURN_IF_ERROR(
        mailboxes_.ask_until(is_over, "memory for this call's data (" + refused + ")"));
  }
  if (!offset.ok()) return mailboxes_.fail(offset.status().code(), offset.status().message());
  slab_offset_ = offset.value();
  return {};
}

void Staging::give_back_slab(std::function<bool()> is_unread, std::optional<Arena::Borrower> call) {
  arena_->release_when(std::move(is_unread), {{slab_offset_, slab_bytes()}}, call);
  slab_offset_ = 0;
  data_ = nullptr;
}

Status Staging::open() {
  opened_ = mailboxes_.sequence();
  StagedData& staged = mailboxes_.own_slot().staged;
  staged = {};
  if (has_buffers()) DSCOMM_RETURN_IF_ERROR(open_buffers(staged));
  if (!call_.table.empty()) {
    if (slab_offset_ == 0) DSCOMM_RETURN_IF_ERROR(take_slab(0));
    DSCOMM_RETURN_IF_ERROR(mailboxes_.wait_all_acknowledged(table_free_after_));
    table_free_after_ = phase_word(mailboxes_.sequence() + 1, 0);
    std::ranges::copy(call_.table, reinterpret_cast<uint64_t*>(data_));
  }
  staged.table_offset = slab_offset_;
  staged.bytes = call_.bytes;
  staged.tensor_offset = call_.tensor.value_or(0);
  staged.in_place = call_.tensor ? call_.in_place : 0;
  staged.piece_bytes = static_cast<uint32_t>(call_.piece_bytes);
  return {};
}

Status Staging::open_buffers(StagedData& staged) {
  buffer_bytes_ = round_up(std::max<size_t>(call_.buffer_bytes, 1), kLinePairBytes);
  DSCOMM_CHECK(buffer_bytes_ * std::min(call_.rounds, kLeastBuffers) <= ring_bytes_,
               "a call's buffers fit into the ring");
  buffers_ = static_cast<uint32_t>(std::min<size_t>(call_.rounds, ring_bytes_ / buffer_bytes_));
  const size_t length = buffers_ * buffer_bytes_;
  if (slab_offset_ == 0) DSCOMM_RETURN_IF_ERROR(take_slab(length));
  const size_t begin = next_begin(length);
  if (length <= kSmallPieceBytes)
    next_small_ = begin + kPageBytes;
  else
    next_ = begin + length;
  range_ = {mailboxes_.sequence(), begin, begin + length};
  staged.offset = slab_offset_ + table_bytes() + begin;
  staged.buffer_bytes = static_cast<uint32_t>(buffer_bytes_);
  staged.buffers = buffers_;
  return {};
}

size_t Staging::next_begin(size_t length) const {
  const bool is_small = length <= kSmallPieceBytes;
  size_t walked_bytes = slab_ring_bytes_;
  if (is_small)
    walked_bytes = std::min(kSmallRingBytes, slab_ring_bytes_);
  else if (length <= kSameCoreRingBytes / 2 && mailboxes_.distance().is_same_core())
    walked_bytes = std::min(kSameCoreRingBytes, slab_ring_bytes_);
  const size_t next = is_small ? next_small_ : next_;
  return next + length <= walked_bytes ? next : 0;
}

void Staging::prefetch_next_range() {
  if (data_ == nullptr || range_.sequence != mailboxes_.sequence()) return;  // nothing is staged
  const CacheDistance& distance = mailboxes_.distance();
  const size_t length = range_.end - range_.begin;
  if (distance.is_same_core() ||
      length > (distance.is_far() ? kPrefetchedFarBytes : kPrefetchedNearBytes))
    return;
  const size_t begin = next_begin(length);
  const bool is_in_use = begin < range_.end && range_.begin < begin + length;
  if (is_in_use || !mailboxes_.have_acknowledged(free_after(begin, begin + length))) return;
  for (size_t at = begin; at < begin + length; at += kLinePairBytes / 2)
    prefetch_for_ownership(ring() + at);
}

// The done word that every reader of earlier calls must reach before these bytes are rewritten.
uint64_t Staging::free_after(size_t begin, size_t end) const {
  uint64_t word = 0;
  for (const RingRange& range : earlier_)
    if (range.begin < end && begin < range.end)
      word = std::max(word, phase_word(range.sequence + 1, 0));
  return word;
}

Result<std::byte*> Staging::fill(uint32_t round) {
  if (round + 2 >= kLastPhase)
    return mailboxes_.fail(
        Code::kUnsupported,
        "this call is too large for its staging; raise DSCOMM_STAGING_CHUNK_BYTES");
  const size_t begin = range_.begin + round % buffers_ * buffer_bytes_;
  if (round < buffers_)
    DSCOMM_RETURN_IF_ERROR(
        mailboxes_.wait_all_acknowledged(free_after(begin, begin + buffer_bytes_)));
  else
    DSCOMM_RETURN_IF_ERROR(mailboxes_.wait_read(round - buffers_ + 1, call_.reader));
  return ring() + begin;
}

Result<const std::byte*> Staging::read(int member, uint32_t round, size_t in_buffer,
                                       size_t in_tensor, size_t bytes, uint32_t part) const {
  const StagedData staged = mailboxes_.slot(member).staged;
  const Peer& peer = mailboxes_.peer(member);
  const std::byte* data = nullptr;
  const bool is_in_place = (staged.in_place & part) != 0;
  // Recorded for 0 bytes, too, because this rank may get results that others compute from this
  // tensor.
  if (is_in_place) mailboxes_.aborts().reads_in_place(member);
  if (bytes == 0) return peer.at(0, 0);  // the offset may lie past the end of the member's data
  if (is_in_place) {
    data = peer.at_in_pool(staged.tensor_offset + in_tensor, bytes);
  } else if (in_buffer <= staged.buffer_bytes && bytes <= staged.buffer_bytes - in_buffer) {
    const uint64_t buffer = round % std::max(staged.buffers, 1u);
    data = peer.at(staged.offset + buffer * staged.buffer_bytes + in_buffer, bytes, 1);
  }
  if (data == nullptr)
    return mailboxes_.fail(Code::kInternal, "the data of " + mailboxes_.name_member(member) +
                                                " lies outside its memory");
  return data;
}

Result<const std::byte*> Staging::read_piece(int member, uint32_t round, size_t in_tensor,
                                             size_t bytes) const {
  const size_t piece = mailboxes_.slot(member).staged.piece_bytes;
  return read(member, round, mailboxes_.rank() * piece, in_tensor, bytes);
}

Status Staging::close() {
  // If only inputs are read in place, there is no need to wait: this rank has gathered all results
  // computed from them, so no rank reads them any more.
  if (!has_buffers() && call_.table.empty())
    return mailboxes_.wait_read(call_.rounds, call_.reader);
  for (size_t k = 0; k < call_.table.size() && call_.tensor; ++k)
    DSCOMM_RETURN_IF_ERROR(
        mailboxes_.wait_read(rounds_of(call_.table[k], call_.piece_count), static_cast<int>(k)));
  earlier_[range_.sequence % kSlots] = range_;
  if (is_borrowed_ || arena_->used_bytes() > kept_bytes(*arena_))
    give_back_slab(mailboxes_.members().unread_later(phase_word(mailboxes_.sequence() + 1, 0)),
                   this_call());
  return {};
}

Result<std::span<const uint64_t>> Staging::read_table(int member) const {
  const std::byte* table = mailboxes_.peer(member).at(mailboxes_.slot(member).staged.table_offset,
                                                      table_bytes(), kPageBytes);
  if (table == nullptr)
    return mailboxes_.fail(Code::kInternal, "the table of " + mailboxes_.name_member(member) +
                                                " lies outside its memory");
  return std::span(reinterpret_cast<const uint64_t*>(table), mailboxes_.size());
}

}  // namespace dscomm
