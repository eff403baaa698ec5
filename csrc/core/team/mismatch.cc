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
    their_text += format_text(" with {}{}",
                              mine.is_planned ? "another match_id" : "other counts for the ranks",
                              mine.parent_number != 0 ? ", or after other calls" : "");
  return format_text("{} as call #{}: {} called {}, {} called {}{}", kDifferentCalls, mine.number(),
                     my_name, my_text, their_name, their_text, kMakeSameCalls);
}

std::string describe_mismatch(const CallOfRank& one, const CallOfRank& other) {
  if (other.rank < one.rank) return describe_mismatch(other, one);
  return describe_mismatch(one.call, one.name, other.call, other.name);
}

}  // namespace dscomm
