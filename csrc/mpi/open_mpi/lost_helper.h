// Lets ranks survive the end of their host's dscomm-pmix, as when it is killed. Open MPI would end
// them at once with status 195 and no message, but it needs PMIx only while it starts. The last
// rank to leave removes the helper's files.
#pragma once

#include <string>
#include <vector>

namespace dscomm {

// Call it after MPI_Init_thread in a rank that the helper serves. `environment`: the "NAME=value"
// entries that the helper gave the rank. Does nothing if Open MPI's PMIx cannot be found.
void survive_lost_helper(const std::vector<std::string>& environment);

// Call it when the rank leaves. Does nothing while the helper lives.
void tidy_up_for_lost_helper();

}  // namespace dscomm
