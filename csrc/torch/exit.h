// Ends groups when a program ends without destroying them.
//
// Once the interpreter has begun to end, Python kills a thread that asks for the GIL, which takes
// the whole process down. A worker asks for the GIL when it drops the last reference to a tensor.
// So end_calls() ends all calls while the interpreter is still intact. The exit handler that
// _plugin.py registers when torch is imported calls it. Handlers that were registered before this
// one run after it. They may still make calls, which then run on the calling thread. leave_groups()
// leaves the groups when the interpreter clears its modules.
//
// A child of multiprocessing runs no exit handlers and clears no modules: it calls end_child().
#pragma once

#include <memory>
#include <string>

#include "core/engine/group.h"

namespace dscomm {

// Registers a group to be ended at exit. Holds no reference to it.
void remember_group(const std::shared_ptr<Group>& group);

// Call them when an asynchronous call or a blocking message starts, and when dscomm's threads hold
// its tensors no more.
void call_begins();
void call_ends();
// Call it after a wait for a call: if the process is ending, waits for call_ends() of all calls.
void wait_for_calls_at_exit();

// Call the functions below without the GIL. `exception` is the type of the unhandled exception that
// ends the process, or empty; members that still wait for this rank report it.

// Gives running calls a few seconds to finish, then aborts the rest. From then on groups accept
// calls from this thread only.
void end_calls(const std::string& exception);
// Leaves all groups and disconnects from other hosts.
void leave_groups();
// Gives asynchronous calls and blocking messages a few seconds to finish. If no other thread can
// make calls (`is_alone`), then leaves all groups and disconnects from other hosts.
void end_child(const std::string& exception, bool is_alone);

}  // namespace dscomm
