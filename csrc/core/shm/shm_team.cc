#include "core/shm/shm_team.h"

#include <cstring>

namespace dscomm {
namespace {

// The smallest tensors that are read in place. Less data, if staged, stays in caches, whereas each
// cache line that a peer has read in place must be fetched back when its owner next writes it.
constexpr size_t kLeastNearBytes = 2 << 20;
constexpr size_t kLeastFarBytes = 16 << 20;

}  // namespace

ShmTeam::ShmTeam(std::shared_ptr<Arena> arena, uint64_t group_id, std::string name, int rank,
                 std::vector<MailboxMember> members, const WaitPolicy& policy,
                 const ShmTuning& tuning, InPlace in_place)
    : arena_(std::move(arena)),
      mailbox_offset_(members[rank].mailbox_offset),
      tuning_(tuning),
      in_place_(std::move(in_place)) {
  mailboxes_ = std::make_unique<Mailboxes>(arena_, group_id, std::move(name), rank,
                                           std::move(members), policy);
  staging_ = std::make_unique<Staging>(arena_, *mailboxes_, tuning_.staging_bytes);
  sources_.resize(size());
  tally_ = CallTally::make(mailboxes_->members().group_name, describe());
}

ShmTeam::~ShmTeam() {
  // ~Mailboxes() leaves the group, before release_when() may give the mailbox to another group.
  std::function<bool()> unread = mailboxes_->members().unread_later();
  staging_.reset();
  mailboxes_.reset();
  arena_->release_when(std::move(unread), {{mailbox_offset_, sizeof(Mailbox)}});
}

std::optional<uint64_t> ShmTeam::find_in_pool(const void* data, size_t bytes) const {
  if (in_place_.pool == nullptr) return {};
  const bool is_far = mailboxes_->distance().is_far();
  const size_t least = in_place_.least_bytes >= 0 ? static_cast<size_t>(in_place_.least_bytes)
                                                  : (is_far ? kLeastFarBytes : kLeastNearBytes);
  if (bytes < least) return {};
  // A call of too many rounds is staged, so that Staging::fill() refuses it.
  if (bytes / tuning_.chunk_bytes * static_cast<size_t>(size()) >= kLastPhase / 4) return {};
  const std::optional<uint64_t> pool_offset = in_place_.pool->find(data, bytes);
  if (tally_ != nullptr) tally_->add_tensor(pool_offset.has_value());
  return pool_offset;
}

std::optional<uint64_t> ShmTeam::find_in_pool(std::span<const void* const> blocks,
                                              std::span<const size_t> counts,
                                              size_t element_bytes) const {
  if (in_place_.pool == nullptr) return {};
  const auto* begin = static_cast<const std::byte*>(blocks[0]);
  const std::byte* end = begin;
  for (size_t k = 0; k < blocks.size(); ++k) {
    if (blocks[k] != end && counts[k] > 0) return {};
    end += counts[k] * element_bytes;
  }
  return find_in_pool(begin, static_cast<size_t>(end - begin));
}

Result<ShmTeam::PublishedBlocks> ShmTeam::open_blocks(std::span<const void* const> data,
                                                      std::span<const size_t> counts,
                                                      size_t element_bytes, bool has_table,
                                                      int reader) {
  const size_t total = total_count(counts) * element_bytes;
  const size_t longest = std::ranges::max(counts) * element_bytes;
  const size_t piece = piece_bytes(element_bytes, data.size()), stride = std::min(piece, longest);
  const uint32_t rounds = rounds_of(longest, piece);
  const std::optional<uint64_t> pool_offset = find_in_pool(data, counts, element_bytes);
  DSCOMM_RETURN_IF_ERROR(staging_->open({.bytes = total,
                                         .buffer_bytes = stride * data.size(),
                                         .rounds = rounds,
                                         .piece_bytes = data.size() > 1 ? stride : 0,
                                         .reader = reader,
                                         .tensor = pool_offset,
                                         .table = has_table ? counts : std::span<const size_t>(),
                                         .piece_count = piece / element_bytes}));
  if (pool_offset.has_value()) mailboxes_->post(rounds);
  return PublishedBlocks{data,   counts, element_bytes,          piece,
                         stride, rounds, pool_offset.has_value()};
}

Status ShmTeam::stage_round(const PublishedBlocks& blocks, uint32_t round) {
  if (blocks.in_place || round >= blocks.rounds) return {};
  DSCOMM_ASSIGN_OR_RETURN(auto* buffer, staging_->fill(round));
  const size_t own = blocks.data.size() > 1 ? static_cast<size_t>(rank()) : SIZE_MAX;
  for (size_t k = 0; k < blocks.data.size(); ++k) {
    const size_t length =
        round_bytes(blocks.counts[k] * blocks.element_bytes, blocks.piece_bytes, round);
    if (k == own || length == 0) continue;
    const auto* block = static_cast<const std::byte*>(blocks.data[k]);
    copy(buffer + k * blocks.stride, block + size_t{round} * blocks.piece_bytes, length, stores());
  }
  post_staged(round + 1);
  return {};
}

Status ShmTeam::publish(const void* data, size_t count, DType dtype, int reader) {
  DSCOMM_ASSIGN_OR_RETURN(const PublishedBlocks block,
                          open_blocks({&data, 1}, {&count, 1}, dtype_bytes(dtype), false, reader));
  for (uint32_t round = 0; round < block.rounds; ++round)
    DSCOMM_RETURN_IF_ERROR(stage_round(block, round));
  return staging_->end();
}

Status ShmTeam::receive_round(int member, uint32_t round, size_t bytes, void* out) {
  if (round >= rounds_of(bytes, tuning_.chunk_bytes)) return {};
  DSCOMM_RETURN_IF_ERROR(mailboxes_->wait_posted(member, round + 1));
  const uint64_t published = mailboxes_->slot(member).staged.bytes;
  if (round == 0 && published != bytes)
    return mailboxes_->fail(Code::kMismatch,
                            format_text("{} sends {} bytes where {} expects {}; make both equal",
                                        mailboxes_->name_member(member), published,
                                        mailboxes_->name_member(rank()), bytes));
  return receive_piece(member, round, 0, bytes, tuning_.chunk_bytes, out);
}

Status ShmTeam::receive_piece(int member, uint32_t round, size_t block_begin, size_t block_bytes,
                              size_t piece, void* out) {
  const size_t begin = size_t{round} * piece;
  const size_t length = round_bytes(block_bytes, piece, round);
  DSCOMM_ASSIGN_OR_RETURN(auto* theirs,
                          staging_->read_piece(member, round, block_begin + begin, length));
  if (length > 0) std::memcpy(static_cast<std::byte*>(out) + begin, theirs, length);
  return {};
}

}  // namespace dscomm
