// Diagnosis: whether a wait that takes long still makes sense, and which rank is at fault if not.
//
// Published data counts, also after an abort, a departure or a death. A wait that has seen one of
// these loads its word again, and fails only if the word has not reached its target.
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

// Calls `is_there` until it is true: for a condition that other members bring about and that no
// shared word shows. At the deadline, the error names `what`.
Status ask_until(Mailboxes& mailboxes, const std::function<bool()>& is_there,
                 const std::string& what);

}  // namespace dscomm
