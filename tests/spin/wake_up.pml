/* No rank sleeps for ever on a word that has reached its target.
 *
 * Mirrors: csrc/core/shm/mailbox/wait.cc, wait_slowly(), from the first look on; csrc/core/shm/mailbox/mailboxes.cc,
 * post(), acknowledge(), end() and wake_sleepers() as publish(); aborts.cc, abort() as give_up();
 * and the two futex calls of csrc/core/base/futex.h.
 *
 * Ranks make CALLS barriers with a single slot, so that each also waits for every other's done
 * word. With ABORTS a rank may give up before any of its waits, as at its deadline or when
 * another thread aborts.
 *
 * Left out: spinning and yielding, which only load the word again. The kernel's queue of
 * sleepers is one variable per rank: FUTEX_WAIT compares and queues, and FUTEX_WAKE empties the
 * queue, both under one lock of the kernel, so each is one step; FUTEX_WAKE has a full barrier
 * before it looks.
 *
 * Time slices are off, so only a wake-up ends a sleep; a lost one is an invalid end state. With
 * SLICES a sleep also ends when nothing else in the system can move, and the wait must then be
 * over. */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef CALLS
#define CALLS 2
#endif
#define PENDING 2

/* Addresses. */
#define POSTED(r) (r)
#define DONE(r) (RANKS + (r))
#define SLEEPERS(r) (2 * RANKS + (r))
#define ABORTED(r) (3 * RANKS + (r))
#define WORDS (4 * RANKS)

/* Values: a posted word holds progress(call, phase), with one bit of phase. */
#define PROGRESS(call, phase) (2 * (call) + (phase))

#include "store_buffer.pml"

#define AWAKE 255
byte sleeps_on[RANKS] = AWAKE;

/* FUTEX_WAKE. */
inline wake_all(word) {
  d_step {
    k = 0;
    do
    :: k < RANKS ->
       if
       :: sleeps_on[k] == word -> sleeps_on[k] = AWAKE;
#ifdef MUTANT_WAKE_ONE
          break
#endif
       :: else
       fi;
       k++
    :: else -> break
    od;
    k = 0
  }
}

inline wake_sleepers(word) {
  other = 0;
  do
  :: other == me -> other++
  :: other < RANKS && other != me ->
     if
     :: memory[SLEEPERS(other)] == 0 -> other++
     :: else ->
#ifndef MUTANT_WAKE_DROPPED
        wake_all(word);
#endif
        break
     fi
  :: other >= RANKS -> break
  od;
  other = 0
}

inline publish(word, value) {
#ifdef MUTANT_PLAIN_STORE
  store(word, value);
  wake_sleepers(word)
#else
#ifdef MUTANT_LOOK_BEFORE_STORE
  wake_sleepers(word);
  exchange(word, value)
#else
  exchange(word, value);
  wake_sleepers(word)
#endif
#endif
}

/* MemberMonitor::check(), as far as it concerns aborts. */
inline look() {
#ifdef ABORTS
  other = 0;
  do
  :: other < RANKS && other != me && memory[ABORTED(other)] == 1 -> goto give_up
  :: other < RANKS && (other == me || memory[ABORTED(other)] == 0) -> other++
  :: other >= RANKS -> break
  od;
  other = 0
#else
  skip
#endif
}

inline wait_slowly(word, target) {
  do
  :: memory[word] >= target -> break
  :: memory[word] < target ->
     look();
     fetch_add(SLEEPERS(me), 1);
     seen = memory[word];
     if
#ifdef MUTANT_NO_SECOND_LOOK
     :: true ->
#else
     :: seen < target ->
#endif
#ifdef SLICES
        assert(!slice_passed);
#endif
        atomic {
          if
#ifdef MUTANT_NO_COMPARE
          :: true -> sleeps_on[me] = word
#else
          :: memory[word] == seen -> sleeps_on[me] = word
          :: else
#endif
          fi;
          seen = 0
        }
        if
        :: sleeps_on[me] == AWAKE
#ifdef SLICES
        :: timeout -> sleeps_on[me] = AWAKE; slice_passed = true
#endif
        fi
     :: else -> seen = 0
     fi;
     fetch_add(SLEEPERS(me), -1)
  od
#ifdef SLICES
  ; slice_passed = false
#endif
}

proctype rank(byte me) {
  byte call = 1, member = 0, other = 0, k = 0, seen = 0;
  bool slice_passed = false;
  do
  :: call > CALLS -> break
  :: call <= CALLS ->
     for (member : 0 .. RANKS - 1) {
       if
       :: member != me ->
#ifdef ABORTS
          if
          :: true
          :: goto give_up
          fi;
#endif
          wait_slowly(DONE(member), call - 1)
       :: else
       fi
     }
     store(POSTED(me), PROGRESS(call, 0));
     publish(POSTED(me), PROGRESS(call, 1));
     for (member : 0 .. RANKS - 1) {
       if
       :: member != me ->
#ifdef ABORTS
          if
          :: true
          :: goto give_up
          fi;
#endif
          wait_slowly(POSTED(member), PROGRESS(call, 1))
       :: else
       fi
     }
     publish(DONE(me), call);
     call++
  od;
  goto finished;

give_up:
  store(ABORTED(me), 1);
  empty(pending[me]);
  wake_all(POSTED(me));
  wake_all(DONE(me));

finished:
  skip
}

init {
  byte r;
  atomic {
    for (r : 0 .. RANKS - 1) { run rank(r) }
    run drain()
  }
}
