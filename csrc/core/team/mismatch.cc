#include "core/team/mismatch.h"

#include "core/base/format.h"

namespace dscomm {

std::string describe_mismatch(const CallRecord& mine, const std::string& my_name,
                              const CallRecord& theirs, const std::string& their_name) {
  const std::string my_text = describe_call(mine);
  std::string their_text = describe_call(theirs);
  if (mine.number() != theirs.number())
    their_text += format_text(" as call #{}", theirs.number());
  else if (my_text == their_text)
    their_text += mine.is_planned ? " with another match_id"
                  : mine.parent_number != 0
                      ? " with other counts for the ranks, or after other calls"
                      : " with other counts for the ranks";
  return format_text("{} as call #{}: {} called {}, {} called {}{}", kDifferentCalls, mine.number(),
                     my_name, my_text, their_name, their_text, kMakeSameCalls);
}

std::string describe_mismatch(const CallOfRank& one, const CallOfRank& other) {
  if (other.rank < one.rank) return describe_mismatch(other, one);
  return describe_mismatch(one.call, one.name, other.call, other.name);
}

}  // namespace dscomm
