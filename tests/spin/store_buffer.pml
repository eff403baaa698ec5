/* The memory of an x86 machine, under its memory model (TSO).
 *
 * Each rank has a queue of stores that no other rank sees yet. A plain store joins the queue; at
 * any time the oldest store of any queue may reach memory. A locked instruction (exchange,
 * fetch_add) waits until its rank's queue is empty and then acts on memory at once. A load reads
 * memory.
 *
 * Real hardware also forwards stores from a rank's own queue to its loads. That is left out: no
 * rank of these models loads a word that it stores plainly. Where the code does (its own hash,
 * its own abort), the model uses a local variable.
 *
 * A model defines RANKS, WORDS (bytes of shared memory), PENDING (length of a queue), and `me`. */
byte memory[WORDS];
chan pending[RANKS] = [PENDING] of { byte, byte };

inline store(address, value) {
  pending[me] ! address, value
}

inline exchange(address, value) {
  d_step { empty(pending[me]) -> memory[address] = value }
}

inline fetch_add(address, value) {
  d_step { empty(pending[me]) -> memory[address] = memory[address] + (value) }
}

/* Stores reach memory in the order in which their rank made them. */
proctype drain() {
  byte address, value;
end:
  do
  :: d_step { pending[0] ? address, value -> memory[address] = value; address = 0; value = 0 }
  :: d_step { pending[1] ? address, value -> memory[address] = value; address = 0; value = 0 }
#if RANKS > 2
  :: d_step { pending[2] ? address, value -> memory[address] = value; address = 0; value = 0 }
#endif
  od
}
