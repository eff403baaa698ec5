/* No reader reads a slot or a staging buffer that has been overwritten, whatever calls the group
 * makes.
 *
 * Mirrors: csrc/core/shm/mailbox/mailboxes.cc, begin(), post(), prefetch_next_slot(), wait_posted() and end();
 * csrc/core/shm/staging/staging.cc, open(), fill(), prefetch_next_range() and close(), for calls of one round;
 * and barrier.cc, the tiny and one-shot forms of all_reduce.cc, and broadcast.cc and gather.cc
 * in their tiny and staged forms, one round each.
 *
 * Programs of ANY length: each call is chosen when the first rank reaches it, among all kinds
 * and roots, and is the same for every rank. Sequence numbers are kept modulo 3 * SLOTS, which
 * is enough because no rank is ever more than SLOTS calls ahead of another (asserted); so the
 * states are finite.
 *
 * A payload is the sequence number of the call that wrote it. Its reader asserts that it is its
 * own call's.
 *
 * Left out: the mark of a slot that is being rewritten, which only readers of hashes read
 * (agreement.pml), sleeping (wake_up.pml), failures (faults.pml). A wait blocks here until its
 * word is there. SLOTS and BUFFERS are smaller than the code's 8 and 4. */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef BUFFERS
#define BUFFERS 1
#endif
#define PENDING 2

/* The length of the circle, and the distance up to which a number is ahead, not behind. */
#ifdef MUTANT
#define SEQUENCES (6 * SLOTS)
#define AHEAD (3 * SLOTS)
#else
#define SEQUENCES (3 * SLOTS)
#define AHEAD (2 * SLOTS)
#endif
#define NONE 255

/* Addresses. A slot has a posted word and a payload: tiny data, or the place of a stage. */
#define POSTED(r, slot) ((r) * SLOTS + (slot))
#define PAYLOAD(r, slot) (RANKS * SLOTS + (r) * SLOTS + (slot))
#define STAGE(r, buffer) (2 * RANKS * SLOTS + (r) * BUFFERS + (buffer))
#define DONE(r) (2 * RANKS * SLOTS + RANKS * BUFFERS + (r))
#define WORDS (2 * RANKS * SLOTS + RANKS * BUFFERS + RANKS)

/* Sequence numbers, and words with a number and one bit of phase, on the circle. A done word
 * holds the number of the last finished call. */
#define PLUS(sequence, n) (((sequence) + (n)) % SEQUENCES)
#define MINUS(sequence, n) (((sequence) + SEQUENCES - (n)) % SEQUENCES)
#define AT_LEAST(a, b) (MINUS(a, b) < AHEAD)
#define PROGRESS(sequence, phase) (2 * (sequence) + (phase))
#define WORD_AT_LEAST(a, b) (((a) + 2 * SEQUENCES - (b)) % (2 * SEQUENCES) < 2 * AHEAD)

#ifdef MUTANT_FEWER_SLOTS
#define SLOT_OF(sequence) ((sequence) % (SLOTS - 1))
#else
#define SLOT_OF(sequence) ((sequence) % SLOTS)
#endif

#include "store_buffer.pml"

/* A call: its kind, whether it is staged, and its root. All except barriers have a tiny form,
 * with its data in the slot, and a staged form. */
#define BARRIER 0
#define ALL_REDUCE 1
#define BROADCAST 2
#define GATHER 3
#define CALL(kind, staged, root) ((kind) + 4 * (staged) + 8 * (root))
#define KIND (calls[sequence] % 4)
#define STAGED (calls[sequence] / 4 % 2 == 1)
#define ROOT (calls[sequence] / 8)

/* The group's calls: each chosen by the first rank that reaches it. */
byte calls[SEQUENCES];
byte leader;        /* the newest chosen call */
byte begun[RANKS];  /* the newest call of each rank */

inline choose() {
  if
  :: sequence != PLUS(leader, 1)
  :: else ->
     if
     :: calls[sequence] = CALL(BARRIER, 0, 0)
#ifndef ONLY_STAGED
     :: calls[sequence] = CALL(ALL_REDUCE, 0, 0)
     :: calls[sequence] = CALL(BROADCAST, 0, 0)
     :: calls[sequence] = CALL(BROADCAST, 0, 1)
     :: calls[sequence] = CALL(GATHER, 0, 0)
     :: calls[sequence] = CALL(GATHER, 0, 1)
#if RANKS > 2
     :: calls[sequence] = CALL(BROADCAST, 0, 2)
     :: calls[sequence] = CALL(GATHER, 0, 2)
#endif
#endif
#ifndef ONLY_TINY
     :: calls[sequence] = CALL(ALL_REDUCE, 1, 0)
     :: calls[sequence] = CALL(BROADCAST, 1, 0)
     :: calls[sequence] = CALL(BROADCAST, 1, 1)
     :: calls[sequence] = CALL(GATHER, 1, 0)
     :: calls[sequence] = CALL(GATHER, 1, 1)
#if RANKS > 2
     :: calls[sequence] = CALL(BROADCAST, 1, 2)
     :: calls[sequence] = CALL(GATHER, 1, 2)
#endif
#endif
     fi
  fi
}

/* Waits for several members in turn, which equals waiting for all at once, as words only grow
 * and nothing happens between. The code's known_done_ caches done words: it can only be wrong if
 * a member has posted a call before it finished the previous one, which is asserted. */
#define DONE_BY(member, sequence) ((member) == me || AT_LEAST(memory[DONE(member)], sequence))
#define POSTED_BY(member) \
  ((member) == me || WORD_AT_LEAST(memory[POSTED(member, slot)], PROGRESS(sequence, 1)))
#if RANKS > 2
#define DONE_BY_ALL(sequence) (DONE_BY(0, sequence) && DONE_BY(1, sequence) && DONE_BY(2, sequence))
#define POSTED_BY_ALL (POSTED_BY(0) && POSTED_BY(1) && POSTED_BY(2))
#else
#define DONE_BY_ALL(sequence) (DONE_BY(0, sequence) && DONE_BY(1, sequence))
#define POSTED_BY_ALL (POSTED_BY(0) && POSTED_BY(1))
#endif

inline wait_posted(member) {
  d_step {
    POSTED_BY(member);
    assert(DONE_BY(member, MINUS(sequence, 1)))
  }
}

inline wait_all_posted() {
  d_step {
    POSTED_BY_ALL;
    assert(DONE_BY_ALL(MINUS(sequence, 1)))
  }
}

/* Only the waits in begin() limit a rank's lead, which must never exceed SLOTS (asserted).
 * Mutants are stopped from going further, so that a reader finds them, not the end of the
 * circle. */
#ifdef MUTANT
#define FORGOTTEN(sequence) MINUS(sequence, 3 * SLOTS)
#define LEAD_OVER(member) MINUS(PLUS(sequence, 1), begun[member])
#define WITHIN(member) \
  (LEAD_OVER(member) <= SLOTS + 2 || LEAD_OVER(member) >= SEQUENCES - SLOTS - 2)
#if RANKS > 2
#define WITHIN_CIRCLE (WITHIN(0) && WITHIN(1) && WITHIN(2))
#else
#define WITHIN_CIRCLE (WITHIN(0) && WITHIN(1))
#endif
#else
#define FORGOTTEN(sequence) MINUS(sequence, SLOTS)
#endif

inline begin() {
  atomic {
#if defined(MUTANT_NO_DONE)
    WITHIN_CIRCLE ->
#elif defined(MUTANT_DONE_LATE)
    WITHIN_CIRCLE && DONE_BY_ALL(MINUS(sequence, SLOTS)) ->
#else
    DONE_BY_ALL(MINUS(PLUS(sequence, 1), SLOTS)) ->
#endif
    sequence = PLUS(sequence, 1);
    choose();
    d_step {
      slot = SLOT_OF(sequence);
      begun[me] = sequence;
      if
      :: sequence == PLUS(leader, 1) ->
         leader = sequence;
         /* Old calls are no longer needed. */
         calls[FORGOTTEN(sequence)] = 0
      :: else
      fi;
#ifndef MUTANT
      for (k : 0 .. RANKS - 1) {
        assert(MINUS(sequence, begun[k]) <= SLOTS || MINUS(begun[k], sequence) <= SLOTS)
      }
      k = 0;
#endif
      /* From now on the slot is the writer's: a reader gets an invalid value. */
      memory[PAYLOAD(me, slot)] = NONE;
      /* The same for a buffer that all of its readers have finished. */
      do
      :: k < BUFFERS ->
         if
         :: free_after[k] != NONE && DONE_BY_ALL(free_after[k]) ->
            free_after[k] = NONE;
            memory[STAGE(me, k)] = NONE
         :: else
         fi;
         k++
      :: else -> break
      od;
      k = 0
    }
  }
}

/* Writes the data: into the slot, or into a buffer of the stage, with its place in the slot. */
inline write_data() {
  if
  :: d_step { STAGED -> store(PAYLOAD(me, slot), first) }
     d_step {
#ifndef MUTANT_BUFFER_NOT_AWAITED
       free_after[first] == NONE || DONE_BY_ALL(free_after[first]) ->
#endif
       free_after[first] = NONE;
       store(STAGE(me, first), sequence)
     }
  :: d_step { !STAGED -> store(PAYLOAD(me, slot), sequence) }
  fi
}

#define NEXT_BUFFER ((first + 1) % BUFFERS)

/* Staging::close(). */
inline close_stage() {
  d_step {
    if
    :: STAGED -> free_after[first] = sequence; first = NEXT_BUFFER
    :: else
    fi
  }
}

/* Mailboxes::prefetch_next_slot() and Staging::prefetch_next_range(): overwrite what no rank reads any more,
 * before the next call begins. */
inline prefetch_for_ownership() {
  d_step {
    if
#ifdef MUTANT_OWNS_UNREAD_SLOT
    :: true ->
#else
    :: DONE_BY_ALL(MINUS(PLUS(sequence, 1), SLOTS)) ->
#endif
       memory[PAYLOAD(me, SLOT_OF(PLUS(sequence, 1)))] = NONE
    :: else
    fi;
    if
#ifdef MUTANT_OWNS_BUFFER_IN_USE
    :: STAGED ->
#else
    :: STAGED && NEXT_BUFFER != first ->
#endif
       if
       :: free_after[NEXT_BUFFER] == NONE || DONE_BY_ALL(free_after[NEXT_BUFFER]) ->
          memory[STAGE(me, NEXT_BUFFER)] = NONE
       :: else
       fi
    :: else
    fi
  }
}

inline post() {
  exchange(POSTED(me, slot), PROGRESS(sequence, 1));
  prefetch_for_ownership()
}

/* Reads a member's data. Reading all members in one step loses nothing: it may happen as late as
 * possible, and overwritten data stays overwritten. */
inline read_from(member) {
  if
  :: (member) == me
  :: (member) != me && STAGED ->
     assert(memory[PAYLOAD(member, slot)] < BUFFERS);
     assert(memory[STAGE(member, memory[PAYLOAD(member, slot)])] == sequence)
  :: (member) != me && !STAGED ->
     assert(memory[PAYLOAD(member, slot)] == sequence)
  fi
}

inline read(member) {
  d_step { read_from(member) }
}

inline read_all() {
  d_step {
    for (k : 0 .. RANKS - 1) { read_from(k) }
    k = 0
  }
}

inline end() {
  exchange(DONE(me), sequence)
}

#ifdef MUTANT_EARLY_DONE
#define END_EARLY end();
#else
#define END_EARLY
#endif

proctype rank(byte me) {
  /* Starts as if SLOTS calls had been made. */
  byte sequence = SLOTS - 1;
  byte slot = 0, first = 0, k = 0;
  byte free_after[BUFFERS] = NONE;
  do
  :: begin();
     if
     :: KIND == BARRIER ->
        post();
        wait_all_posted()
     :: KIND == ALL_REDUCE ->
        write_data();
#ifdef MUTANT_WAIT_BEFORE_POST
        wait_all_posted();
#endif
        post();
        wait_all_posted();
        END_EARLY
        read_all();
        close_stage()
     :: KIND == BROADCAST && ROOT == me ->
        write_data();
        post();
        close_stage()
     :: KIND == BROADCAST && ROOT != me ->
        post();
        wait_posted(ROOT);
        END_EARLY
        read(ROOT)
     :: KIND == GATHER && ROOT != me ->
        write_data();
        post();
        close_stage()
     :: KIND == GATHER && ROOT == me ->
        post();
        wait_all_posted();
        END_EARLY
        read_all()
     fi;
     end()
  od
}

init {
  byte r, s;
  atomic {
    leader = SLOTS - 1;
    for (r : 0 .. RANKS - 1) {
      for (s : 0 .. SLOTS - 1) { memory[POSTED(r, SLOT_OF(s))] = PROGRESS(s, 1) }
      memory[DONE(r)] = SLOTS - 1;
      begun[r] = SLOTS - 1
    }
    r = 0;
    s = 0;
    for (r : 0 .. RANKS - 1) { run rank(r) }
    run drain()
  }
}
