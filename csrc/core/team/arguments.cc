#include "core/team/arguments.h"

namespace dscomm {

Status check_root(const char* collective, int root, int size) {
  if (root >= 0 && root < size) return {};
  return make_status(Code::kInvalidArgument, "%s: root is %d, expected 0 to %d", collective, root,
                     size - 1);
}

Status check_lists(const char* collective, size_t buffer_count, size_t count_count,
                   size_t expected) {
  if (buffer_count == expected && count_count == expected) return {};
  return make_status(Code::kInvalidArgument,
                     "%s: got %zu buffers and %zu counts, expected %zu of each", collective,
                     buffer_count, count_count, expected);
}

Status check_lists(const char* collective, size_t buffer_count, std::span<const size_t> counts,
                   size_t own_count, int rank, int size) {
  DSCOMM_RETURN_IF_ERROR(
      check_lists(collective, buffer_count, counts.size(), static_cast<size_t>(size)));
  if (own_count == counts[rank]) return {};
  return make_status(Code::kInvalidArgument,
                     "%s: this rank's own count is %zu, but its list says %zu for rank %d",
                     collective, own_count, counts[rank], rank);
}

}  // namespace dscomm
