#include "core/shm/stage.h"

#include <algorithm>

namespace dscomm {
namespace {

// Groups keep their slabs between calls while less than this of the arena is handed out.
constexpr size_t kKeptBytes = 64 << 20;

}  // namespace

Stage::Stage(std::shared_ptr<Arena> arena, Lines& lines, size_t chunk_bytes)
    : arena_(std::move(arena)), lines_(lines), chunk_bytes_(chunk_bytes) {}

Stage::~Stage() {
  if (slab_offset_ != 0)
    arena_->release_when(lines_.unread_later(), {{slab_offset_, slab_bytes()}});
}

size_t Stage::table_bytes() const {
  size_t bytes = static_cast<size_t>(lines_.size()) * sizeof(uint64_t);
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

Status Stage::take_slab() {
  Result<uint64_t> offset = arena_->allocate(slab_bytes());
  if (!offset.ok()) return lines_.fail(offset.status().code(), offset.status().message());
  slab_offset_ = offset.value();
  data_ = arena_->data() + slab_offset_;
  // Nobody in this group has read it.
  std::fill(std::begin(free_after_), std::end(free_after_), 0);
  table_free_after_ = 0;
  return {};
}

void Stage::give_back_slab() {
  arena_->release_when(lines_.unread_later(progress(lines_.sequence() + 1, 0)),
                       {{slab_offset_, slab_bytes()}});
  slab_offset_ = 0;
  data_ = nullptr;
}

Status Stage::open(uint64_t bytes) {
  if (slab_offset_ == 0) DSCOMM_RETURN_IF_ERROR(take_slab());
  lines_.own_slot().stage = {slab_offset_, first_ % kStageBuffers, 0, bytes};
  return {};
}

Result<std::byte*> Stage::fill(uint32_t round, int reader) {
  if (round + 2 >= kLastPhase)
    return lines_.fail(Code::kUnsupported,
                       "this call is too large for its staging; raise DSCOMM_STAGING_CHUNK_BYTES");
  Status status;
  if (round < kStageBuffers) {
    status = lines_.wait_all_acknowledged(free_after_[(first_ + round) % kStageBuffers]);
  } else {
    uint64_t read = progress(lines_.sequence(), round - kStageBuffers + 1);
    status =
        reader < 0 ? lines_.wait_all_acknowledged(read) : lines_.wait_acknowledged(reader, read);
  }
  if (!status.ok()) return status;
  return own(round);
}

Result<const std::byte*> Stage::read(int member, uint32_t round) const {
  const StagePlace& place = lines_.slot(member).stage;
  size_t offset = buffer_offset(place.first_buffer % kStageBuffers + round % kStageBuffers);
  const std::byte* data = lines_.peer(member).at(place.slab_offset, slab_bytes(), kPageBytes);
  if (data == nullptr)
    return lines_.fail(Code::kInternal,
                       "the staging of " + lines_.name_member(member) + " lies outside its memory");
  return data + offset;
}

void Stage::close(uint32_t rounds, bool table) {
  uint64_t done = progress(lines_.sequence() + 1, 0);
  for (uint32_t round = rounds > kStageBuffers ? rounds - kStageBuffers : 0; round < rounds;
       ++round)
    free_after_[(first_ + round) % kStageBuffers] = done;
  if (table) table_free_after_ = done;
  first_ = (first_ + rounds) % kStageBuffers;
  if (arena_->used_bytes() > kKeptBytes) give_back_slab();
}

Result<uint64_t*> Stage::fill_table() {
  if (Status status = lines_.wait_all_acknowledged(table_free_after_); !status.ok()) return status;
  return reinterpret_cast<uint64_t*>(data_);
}

Result<const uint64_t*> Stage::read_table(int member) const {
  Result<const std::byte*> first = read(member, 0);
  if (!first.ok()) return first.status();
  return reinterpret_cast<const uint64_t*>(
      lines_.peer(member).at(lines_.slot(member).stage.slab_offset, slab_bytes(), kPageBytes));
}

}  // namespace dscomm
