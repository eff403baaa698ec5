// Diagnosis: whether a wait that takes long still makes sense, and which rank is at fault if not.
//
// Published data counts: an abort, a departure or a death takes nothing back that a rank had
// published. A wait looks at its word again after it has seen one of them, and fails only if the
// word has not come.
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "core/base/status.h"

namespace dscomm {

class Mailboxes;

// The slow part of the wait for one member's word. `done_of_all`: the done word that the call waits
// for in every member, one after another; 0: in none.
Status wait_slowly(Mailboxes& mailboxes, const std::atomic<uint64_t>& word, uint64_t target,
                   int member, uint64_t done_of_all);

// For what no word of a member tells: asks until it says yes, which the members' progress in
// whatever they do brings about. `what` is for the error, if the deadline passes first.
Status ask_until(Mailboxes& mailboxes, const std::function<bool()>& is_there,
                 const std::string& what);

}  // namespace dscomm
