#include "core/shm/shm_team.h"

namespace dscomm {
namespace {

// From where on reading in place pays. Below it, what is staged stays in caches, whereas every line
// that a peer has read in place has to be fetched back when its owner next writes it.
constexpr size_t kLeastNearBytes = 2 << 20;
constexpr size_t kLeastFarBytes = 16 << 20;

}  // namespace

ShmTeam::ShmTeam(std::shared_ptr<Arena> arena, uint64_t group_id, std::string name, int rank,
                 std::vector<LinesMember> members, const WaitPolicy& policy,
                 const ShmTuning& tuning, InPlace in_place)
    : arena_(std::move(arena)),
      lines_offset_(members[static_cast<size_t>(rank)].lines_offset),
      tuning_(tuning),
      in_place_(std::move(in_place)) {
  lines_ =
      std::make_unique<Lines>(arena_, group_id, std::move(name), rank, std::move(members), policy);
  stage_ = std::make_unique<Stage>(arena_, *lines_, tuning_.staging_bytes);
  sources_.resize(static_cast<size_t>(size()));
}

ShmTeam::~ShmTeam() {
  // Leaves first: from release_when() on the lines may be another group's.
  std::function<bool()> unread = lines_->unread_later();
  stage_.reset();
  lines_.reset();
  arena_->release_when(std::move(unread), {{lines_offset_, sizeof(GroupLines)}});
}

std::string ShmTeam::describe() const {
  return "shared memory, " + std::to_string(size()) + " ranks";
}

std::optional<uint64_t> ShmTeam::find_in_pool(const void* data, size_t bytes) const {
  if (in_place_.pool == nullptr) return {};
  const bool is_far = lines_->distance().is_far();
  const size_t least = in_place_.least_bytes >= 0 ? static_cast<size_t>(in_place_.least_bytes)
                                                  : (is_far ? kLeastFarBytes : kLeastNearBytes);
  if (bytes < least) return {};
  // A call of too many rounds is refused where it is staged.
  if (bytes / tuning_.chunk_bytes * static_cast<size_t>(size()) >= kLastPhase / 4) return {};
  return in_place_.pool->find(data, bytes);
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

Status ShmTeam::check_bytes(int member, size_t expected_bytes) {
  uint64_t staged = lines_->slot(member).stage.bytes;
  if (staged == expected_bytes) return {};
  return lines_->fail(Code::kMismatch, lines_->name_member(member) + " sends " +
                                           std::to_string(staged) + " bytes where " +
                                           lines_->name_member(rank()) + " expects " +
                                           std::to_string(expected_bytes));
}

}  // namespace dscomm
