// Barrier: each rank posts and waits for all others. It is no tree, because among the ranks of one
// host a load for each rank is cheaper than a second hand-over.
#include "core/shm/shm_team.h"

namespace dscomm {

Status ShmTeam::run_barrier(const CallOptions&) {
  mailboxes_->post(1);
  DSCOMM_RETURN_IF_ERROR(mailboxes_->wait_all_posted(1));
  return staging_->end();
}

}  // namespace dscomm
