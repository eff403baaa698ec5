// What happens to groups when a program ends without destroying them.
//
// A thread that asks for the GIL once the interpreter has begun to end is killed by Python in a way
// that takes the whole process down, and a worker asks for it when it drops the last reference to a
// tensor. So calls are brought to their end while the interpreter is still whole: Python's atexit
// calls end_groups().
#pragma once

#include <memory>

#include "core/engine/group.h"

namespace dscomm {

// Groups to be ended at exit; one that is gone by then costs nothing.
void remember_group(const std::shared_ptr<Group>& group);

// Around an asynchronous call: from its start until nothing of it is held by another thread.
void call_begins();
void call_ends();

// Lets calls under way finish for a few seconds, then aborts what is left of them, and leaves all
// groups. Call it without the GIL.
void end_groups();

}  // namespace dscomm
