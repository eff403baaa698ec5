// What happens to groups when a program ends without destroying them.
//
// A thread that asks for the GIL once the interpreter has begun to end is killed by Python in a way
// that takes the whole process down, and a worker asks for it when it drops the last reference to a
// tensor. So calls are brought to their end while the interpreter is still whole: end_calls(), from
// the exit handler that _backend.py registers when torch is imported. Exit handlers that were
// registered before it run after it, and may still make calls, which then run on their own thread.
// The groups are left when the interpreter clears its modules, by leave_groups().
//
// A child of multiprocessing ends without exit handlers and without clearing modules: by
// end_child().
#pragma once

#include <memory>
#include <string>

#include "core/engine/group.h"

namespace dscomm {

// Groups to be ended at exit; one that is gone by then costs nothing.
void remember_group(const std::shared_ptr<Group>& group);

// Around an asynchronous call: from its start until nothing of it is held by another thread.
void call_begins();
void call_ends();
// After a wait for a call: during the end of the process, until call_ends() of all of them.
void settle_calls();

// All are called without the GIL. `exception` is the type of the unhandled exception that ends the
// process, or empty: what members are told that still wait for this rank when it is gone.

// Lets calls under way finish for a few seconds, then aborts what is left of them. From then on
// groups accept the calls of this thread alone.
void end_calls(const std::string& exception);
// Leaves all groups, and takes leave of other hosts.
void leave_groups();
// Lets asynchronous calls finish for a few seconds. Other threads may go on with their calls; where
// there are none (`is_alone`), leaves all groups, and takes leave of other hosts.
void end_child(const std::string& exception, bool is_alone);

}  // namespace dscomm
