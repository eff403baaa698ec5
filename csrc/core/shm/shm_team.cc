#include "core/shm/shm_team.h"

namespace dscomm {

ShmTeam::ShmTeam(std::shared_ptr<Arena> arena, uint64_t group_id, std::string name, int rank,
                 std::vector<LinesMember> members, const WaitPolicy& policy,
                 const ShmTuning& tuning)
    : arena_(std::move(arena)),
      lines_offset_(members[static_cast<size_t>(rank)].lines_offset),
      tuning_(tuning) {
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

Status ShmTeam::check_bytes(int member, size_t expected_bytes) {
  uint64_t staged = lines_->slot(member).stage.bytes;
  if (staged == expected_bytes) return {};
  return lines_->fail(Code::kMismatch, lines_->name_member(member) + " sends " +
                                           std::to_string(staged) + " bytes where " +
                                           lines_->name_member(rank()) + " expects " +
                                           std::to_string(expected_bytes));
}

}  // namespace dscomm
