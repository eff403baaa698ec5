/* When a rank dies or stops, every other rank ends, and those that fail all name it.
 *
 * Mirrors: csrc/core/shm/mailbox/diagnosis.cc, MemberMonitor::check() and timed_out(); members.cc,
 * member_state(); aborts.cc, find(), fail() and abort(); mailboxes.cc, begin(), leave() and end();
 * csrc/core/shm/memory/peer_liveness.cc, alive(); and the shape of all_reduce.cc, broadcast.cc and
 * gather.cc with two rounds and a stage of one buffer, so that writers wait for readers too.
 *
 * Ranks make CALLS calls, leave the group, and exit. At most one rank goes without leaving, at
 * any point: it dies, which the kernel shows after all its stores; or with STOPS it only stops,
 * without any notice, and ranks that wait for it end at their deadlines.
 *
 * A wait blocks in the model until there is something to see: its word, an abort record, the end
 * of the member's process, or that it left. (Looks that see nothing change nothing.) Loads that
 * the code makes in sequence are separate steps wherever another rank can come between.
 * Deadlines pass when nothing else can move (Promela's `timeout`), in any order.
 *
 * An abort of a rank that had finished a call is ignored when another rank begins that call. It
 * may or may not end a wait in the call, depending on the grace.
 *
 * Properties: no rank is stuck; no rank fails unless one has gone; the cause names that rank
 * (with STOPS: it is among those that the message names); data that a rank reads before it
 * reports success is the written data.
 *
 * Left out: slot reuse, hashes, sleeping. The model assumes one more slot than calls. */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef CALLS
#define CALLS 2
#endif
#define PENDING 4

/* Addresses. */
#define POSTED(r, call) ((r) * CALLS + (call) - 1)
#define STAGE(r) (RANKS * CALLS + (r))
#define DONE(r) (RANKS * (CALLS + 1) + (r))
#define ABORTED(r) (RANKS * (CALLS + 2) + (r))
#define CAUSE(r) (RANKS * (CALLS + 3) + (r))
#define LEFT(r) (RANKS * (CALLS + 4) + (r))
#define DEAD(r) (RANKS * (CALLS + 5) + (r))
#define FINISHED(r) (RANKS * (CALLS + 6) + (r))
#define WORDS (RANKS * (CALLS + 7))

#define PROGRESS(call, phase) (4 * (call) + (phase))
#define FILLED_BY(call, round) (4 * (call) + (round))

#include "store_buffer.pml"

/* Causes: the event and its rank. A timeout names a set of ranks. */
#define DIED(r) (16 + (r))
#define HAS_LEFT(r) (32 + (r))
#define TIMED_OUT(names) (64 + (names))
#define NAMES_RANK(c, r) ((c) >= 64 && ((c) >> (r)) % 2 == 1)

#define NO_RANK 255
byte victim = NO_RANK;     /* the rank that will go, once chosen */
bool gone = false;        /* whether it has gone */

#define ALL_REDUCE 1
#define BROADCAST 2
#define GATHER 3
byte kind[CALLS + 1], root[CALLS + 1];

inline choose() {
  atomic {
    if
    :: kind[call] != 0
    :: else ->
       if
       :: kind[call] = ALL_REDUCE
       :: kind[call] = BROADCAST; root[call] = 0
       :: kind[call] = BROADCAST; root[call] = RANKS - 1
       :: kind[call] = GATHER; root[call] = 0
       :: kind[call] = GATHER; root[call] = RANKS - 1
       fi
    fi
  }
}

#if RANKS > 2
#define ABORT_SEEN (memory[ABORTED(0)] == 1 || memory[ABORTED(1)] == 1 || memory[ABORTED(2)] == 1)
#else
#define ABORT_SEEN (memory[ABORTED(0)] == 1 || memory[ABORTED(1)] == 1)
#endif

/* Takes any of several records: they all name the victim. */
inline adopt() {
  if
  :: memory[ABORTED(0)] == 1 -> cause = memory[CAUSE(0)]
  :: memory[ABORTED(1)] == 1 -> cause = memory[CAUSE(1)]
#if RANKS > 2
  :: memory[ABORTED(2)] == 1 -> cause = memory[CAUSE(2)]
#endif
  fi;
  goto failed
}

inline adopt_abort() {
  if
  :: ABORT_SEEN -> adopt()
  :: else
  fi
}

/* In begin(): ignores ranks that had finished this call. */
#define ENDS_CALL(r) (memory[ABORTED(r)] == 1 && memory[FINISHED(r)] < call)
inline adopt_abort_of_call() {
  if
  :: ENDS_CALL(0) -> cause = memory[CAUSE(0)]; goto failed
  :: ENDS_CALL(1) -> cause = memory[CAUSE(1)]; goto failed
#if RANKS > 2
  :: ENDS_CALL(2) -> cause = memory[CAUSE(2)]; goto failed
#endif
  :: else
  fi
}

/* The ranks that timed_out() names: those that have not posted the call, the one that this wait
 * is for, and those with the lowest done words, even if all are equal: a writer that waits for
 * its readers has acknowledged no more than a reader that stopped before it read. */
#define HAS_POSTED(r) (memory[POSTED(r, call)] >= PROGRESS(call, 1))
#define SLOWEST_OF_OTHERS(r) \
  ((me == 0 || memory[DONE(r)] <= memory[DONE(0)]) && \
   (me == 1 || memory[DONE(r)] <= memory[DONE(1)]) && \
   (RANKS == 2 || me == 2 || memory[DONE(r)] <= memory[DONE(RANKS - 1)]))
inline timed_out(member) {
  d_step {
    cause = TIMED_OUT(0);
    k = 0;
    do
    :: k < RANKS ->
       if
       :: k == me
       :: k != me && (k == member || !HAS_POSTED(k)) -> cause = cause + (1 << k)
#if defined(MUTANT_EQUALLY_SLOW_NOT_NAMED)
       :: k != me && k != member && HAS_POSTED(k) && SLOWEST_OF_OTHERS(k) &&
          !SLOWEST_OF_OTHERS(member) ->
          cause = cause + (1 << k)
#elif !defined(MUTANT_ONLY_THE_AWAITED_NAMED)
       :: k != me && k != member && HAS_POSTED(k) && SLOWEST_OF_OTHERS(k) ->
          cause = cause + (1 << k)
#endif
       :: else
       fi;
       k++
    :: else -> break
    od;
    k = 0
  }
  goto failed
}

inline wait(word, target, member) {
  do
  :: memory[word] >= target -> break
  :: ABORT_SEEN ->
     /* Data that the rank published before its abort counts. */
     if
     :: memory[word] >= target -> break
     :: else -> adopt()
     fi
#ifdef STOPS
  :: timeout && memory[word] < target -> timed_out(member)
#endif
#ifndef MUTANT_LIFE_NOT_WATCHED
  :: memory[LEFT(member)] == 1 || memory[DEAD(member)] == 1 ->
     /* By now the word may be stored, and the member may have left and died since it was
      * checked. The code checks whether it lives before it checks whether it has left. */
     is_dead = memory[DEAD(member)];
     if
     :: memory[LEFT(member)] == 1 -> cause = HAS_LEFT(member)
     :: else -> cause = DIED(member); assert(is_dead)
     fi;
     is_dead = false;
#ifndef MUTANT_LAST_WORD_NOT_READ
     if
     :: memory[word] >= target -> cause = 0; break
     :: else
     fi;
#endif
#ifndef MUTANT_MESSENGER_BLAMED
     adopt_abort();
#endif
     goto failed
#endif
  od
}

inline wait_posted(member, phase) {
  wait(POSTED(member, call), PROGRESS(call, phase), member)
}

inline wait_all_posted(phase) {
  for (other : 0 .. RANKS - 1) {
    if
    :: other != me -> wait_posted(other, phase)
    :: else
    fi
  }
  other = 0
}

inline wait_all_acknowledged(word) {
  for (other : 0 .. RANKS - 1) {
    if
    :: other != me -> wait(DONE(other), word, other)
    :: else
    fi
  }
  other = 0
}

inline post(phase) {
  exchange(POSTED(me, call), PROGRESS(call, phase))
}

inline acknowledge(phase) {
  exchange(DONE(me), PROGRESS(call, phase))
}

inline fill(round) {
  store(STAGE(me), FILLED_BY(call, round))
}

inline read(member, round) {
  assert((member) == me || memory[STAGE(member)] == FILLED_BY(call, round))
}

inline read_all(round) {
  d_step {
    for (other : 0 .. RANKS - 1) { read(other, round) }
    other = 0
  }
}

inline end() {
  exchange(DONE(me), PROGRESS(call + 1, 0))
}

inline collective() {
  if
  :: kind[call] == ALL_REDUCE ->
     wait_all_acknowledged(PROGRESS(call, 0));
     fill(1);
     post(1);
     wait_all_posted(1);
     read_all(1)
  :: kind[call] == BROADCAST && root[call] == me ->
     wait_all_acknowledged(PROGRESS(call, 0));
     fill(1);
     post(1);
     wait_all_acknowledged(PROGRESS(call, 1));
     fill(2);
     post(2)
  :: kind[call] == BROADCAST && root[call] != me ->
     post(1);
     wait_posted(root[call], 1);
     read(root[call], 1);
     acknowledge(1);
     wait_posted(root[call], 2);
     read(root[call], 2);
     acknowledge(2)
  :: kind[call] == GATHER && root[call] != me ->
     wait_all_acknowledged(PROGRESS(call, 0));
     fill(1);
     post(1);
     wait(DONE(root[call]), PROGRESS(call, 1), root[call]);
     fill(2);
     post(2)
  :: kind[call] == GATHER && root[call] == me ->
     post(1);
     wait_all_posted(1);
     read_all(1);
     acknowledge(1);
     wait_all_posted(2);
     read_all(2);
     acknowledge(2)
  fi
}

/* Fails, in the order of Mailboxes::abort() and then leave(). */
inline publish_abort() {
#if defined(MUTANT_FLAG_BEFORE_RECORD)
  store(ABORTED(me), 1);
  store(FINISHED(me), call - 1);
  store(CAUSE(me), cause)
#elif defined(MUTANT_ABORT_NOT_PUBLISHED)
  skip
#else
  store(CAUSE(me), cause);
  store(FINISHED(me), call - 1);
  store(ABORTED(me), 1)
#endif
}

inline leave_and_exit() {
  store(LEFT(me), 1);
  exchange(DEAD(me), 1)
}

proctype rank(byte me) {
  byte call = 1, k = 0, other = 0, cause = 0;
  bool is_dead = false;
  {
    do
    :: call <= CALLS ->
       choose();
       adopt_abort_of_call();
       collective();
       end();
       call++
    :: else -> break
    od;
#ifdef REACHES_SUCCESS_AFTER_DEATH
    assert(!gone);
#endif
    leave_and_exit();
    goto ended;

failed:
    assert(gone);
#ifdef STOPS
    assert(NAMES_RANK(cause, victim));
#else
    assert(cause == DIED(victim));
#endif
    publish_abort();
    leave_and_exit();

ended:
    skip
  } unless {
    victim == me && !gone;
    gone = true;
#ifndef STOPS
    exchange(DEAD(me), 1)
#endif
  }
}

/* Chooses the victim and the moment: any rank, at any time, or none. */
proctype fate() {
  if
  :: victim = 0
  :: victim = RANKS - 1
#if RANKS > 2
  :: victim = 1
#endif
  :: skip
  fi
}

init {
  byte r;
  atomic {
    for (r : 0 .. RANKS - 1) { memory[DONE(r)] = PROGRESS(1, 0) }
    r = 0;
    for (r : 0 .. RANKS - 1) { run rank(r) }
    run drain();
    run fate()
  }
}
