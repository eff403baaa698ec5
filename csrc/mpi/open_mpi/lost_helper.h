// What becomes of the ranks of a host when their dscomm-pmix ends before them, as when it is
// killed. Open MPI would end them at once, with status 195 and no word; but once it is up it needs
// no PMIx any more. So they live on, and the last of them removes what the helper has left.
#pragma once

#include <string>
#include <vector>

namespace dscomm {

// Once MPI_Init_thread has returned, in a rank that the helper serves. `environment` is what it
// gave the rank: "NAME=value". Where the PMIx of Open MPI cannot be told, all stays as it is.
void survive_lost_helper(const std::vector<std::string>& environment);

// The rank leaves. Does nothing where the helper lives.
void tidy_up_for_lost_helper();

}  // namespace dscomm
