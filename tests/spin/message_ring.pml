/* A ring of cells between two processes: every message is read once, completely, and no process
 * sleeps for ever.
 *
 * Mirrors: csrc/core/messages/channel.cc, is_full(), publish(), end_message(), next_cell() and
 * consume(); csrc/core/messages/waiting.cc, sleep_once(), as go_to_sleep() and wake_up(); and
 * csrc/core/messages/doorbell.cc.
 *
 * Rank 0 sends MESSAGES cells through a ring of CELLS, rank 1 receives them. A cell may be
 * followed at once by the next one of its message, if that is vacant. Both ranks sleep as soon
 * as they find nothing to do. The doorbell is a socket: a byte in it ends a sleep, now or later,
 * and the system calls that send and take it are full barriers.
 *
 * Left out: spinning and slices. A sleep that never ends is an invalid end state. */
#ifndef CELLS
#define CELLS 2
#endif
#ifndef MESSAGES
#define MESSAGES 5
#endif
#ifndef STORED_EACH
#define STORED_EACH (CELLS / 2)
#endif
#define RANKS 2
#define PENDING 3

/* Addresses. */
#define NUMBER(cell) (cell)
#define DATA(cell) (CELLS + (cell))
#define CONSUMED (2 * CELLS)
#define SLEEPERS(r) (2 * CELLS + 1 + (r))
#define WORDS (2 * CELLS + 3)

#include "store_buffer.pml"

bool doorbell[RANKS];

inline ring_if_asleep(other) {
#ifdef MUTANT_WAKE_DROPPED
  skip
#else
  if
  :: memory[SLEEPERS(other)] != 0 -> empty(pending[me]); doorbell[other] = true
  :: else
  fi
#endif
}

inline go_to_sleep() { fetch_add(SLEEPERS(me), 1) }

inline wake_up() { fetch_add(SLEEPERS(me), -1) }

inline sleep() { d_step { doorbell[me] && empty(pending[me]) -> doorbell[me] = false } }

/* Whether the sender may continue with the next cell at once. */
#ifdef MUTANT_MORE_WITHOUT_ROOM
#define HAS_MORE (published + 1 < MESSAGES)
#else
#define HAS_MORE (published + 1 < MESSAGES && published + 1 - known < CELLS)
#endif

proctype sender(byte me) {
  byte published = 0, known = 0;
  bool more;
  do
  :: published == MESSAGES -> break
  :: else ->
     if
     :: published - known > CELLS / 2 -> known = memory[CONSUMED]
     :: else
     fi;
     do
     :: published - known < CELLS -> break
     :: else ->
        go_to_sleep();
#ifndef MUTANT_NO_SECOND_LOOK
        known = memory[CONSUMED];
#endif
        if
        :: published - known == CELLS -> sleep()
        :: else
        fi;
        wake_up();
        known = memory[CONSUMED]
     od;
     more = false;
     if
     :: HAS_MORE -> more = true
     :: true
     fi;
#ifdef MUTANT_NUMBER_FIRST
     exchange(NUMBER(published % CELLS), published + 1);
     store(DATA(published % CELLS), published + 1);
#else
     store(DATA(published % CELLS), published + 1);
#ifdef MUTANT_LOOK_BEFORE_NUMBER
     ring_if_asleep(1);
#endif
#ifdef MUTANT_PLAIN_NUMBER
     store(NUMBER(published % CELLS), published + 1);
#else
     if
     :: more -> store(NUMBER(published % CELLS), published + 1)
     :: else -> exchange(NUMBER(published % CELLS), published + 1)
     fi;
#endif
#endif
     published++;
#ifndef MUTANT_LOOK_BEFORE_NUMBER
     if
     :: more
     :: else -> ring_if_asleep(1)
     fi;
#endif
     /* The next cell is prefetched for ownership. */
     if
     :: more
#ifdef MUTANT_PREFETCHES_UNREAD
     :: true -> store(DATA(published % CELLS), 0)
#else
     :: published - known < CELLS -> store(DATA(published % CELLS), 0)
#endif
     :: else
     fi
  od
}

proctype receiver(byte me) {
  byte consumed = 0, seen;
  do
  :: consumed == MESSAGES -> break
  :: else ->
     do
     :: seen = memory[NUMBER(consumed % CELLS)];
        if
        :: seen == consumed + 1 -> break
        :: else
        fi;
        assert(seen <= consumed);
        go_to_sleep();
#ifndef MUTANT_NO_SECOND_LOOK
        seen = memory[NUMBER(consumed % CELLS)];
#endif
        if
        :: seen != consumed + 1 -> sleep()
        :: else
        fi;
        wake_up()
     od;
#ifdef MUTANT_CONSUMED_UNREAD
     exchange(CONSUMED, consumed + 1);
     ring_if_asleep(0);
#endif
     assert(memory[DATA(consumed % CELLS)] == consumed + 1);
     consumed++;
#ifndef MUTANT_CONSUMED_UNREAD
     if
     :: consumed % (STORED_EACH) == 0 ->
#ifdef MUTANT_PLAIN_CONSUMED
        store(CONSUMED, consumed);
#else
        exchange(CONSUMED, consumed);
#endif
        ring_if_asleep(0)
     :: else
     fi
#endif
  od
}

init {
  atomic {
    run sender(0);
    run receiver(1);
    run drain()
  }
}
