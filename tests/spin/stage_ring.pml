/* No reader reads an overwritten staging buffer, within a call of many rounds and from one call
 * to the next; and no rank waits for ever.
 *
 * Mirrors: csrc/core/shm/staging/staging.cc, open(), fill(), read() and close();
 * csrc/core/shm/collectives/all_reduce.cc, all_reduce_chunked(), with its rounds, its order of steps, one
 * chunk staged ahead and one gathered behind; broadcast.cc and gather.cc, staged, for the two
 * ways in which a writer waits for its readers. The one-round forms are in slot_reuse.pml. The
 * rounds of reduce.cc and scatter.cc are those of gather.cc and broadcast.cc; those of
 * all_gather.cc, reduce_scatter.cc and all_to_all.cc are those of broadcast.cc with every rank a
 * root.
 *
 * Ranks make CALLS calls, each chosen when the first rank reaches it: kind, root, and one to
 * LONGEST chunks or rounds. The ring has the fewest buffers that the code allows for a long
 * call, and all calls have buffers of one size.
 *
 * A buffer holds the call and the round that filled it. Its reader asserts that they are the
 * wanted ones.
 *
 * Left out: slots, which are as many as calls (see slot_reuse.pml), sleeping, hashes, failures. */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef CALLS
#define CALLS 2
#endif
#ifndef LONGEST
#define LONGEST 4
#endif
#define BUFFERS 4
#define PENDING 2

/* Addresses. */
#define POSTED(r, call) ((r) * CALLS + (call) - 1)
#define PLACE(r, call) (RANKS * CALLS + (r) * CALLS + (call) - 1)
#define BUFFER(r, index) (2 * RANKS * CALLS + (r) * BUFFERS + (index))
#define DONE(r) (2 * RANKS * CALLS + RANKS * BUFFERS + (r))
#define WORDS (2 * RANKS * CALLS + RANKS * BUFFERS + RANKS)

#define PROGRESS(call, phase) (16 * (call) + (phase))
#define FILLED_BY(call, round) (16 * (call) + (round))
/* The start of a call's buffers, and their number. */
#define PLACED(from, count) (8 * (count) + (from))
#define READABLE(member, round) \
  memory[BUFFER(member, INDEX(memory[PLACE(member, call)] % 8, memory[PLACE(member, call)] / 8, \
                              round))]

#ifdef MUTANT_FEWER_BUFFERS
#define INDEX(from, count, round) ((from) + (round) % ((count) - ((count) > 1)))
#else
#define INDEX(from, count, round) ((from) + (round) % (count))
#endif

#include "store_buffer.pml"

/* The chunked form of all_reduce: the rounds of a chunk, and when it is posted. */
#define INPUT_ROUND(chunk) ((chunk) == 0 -> 0 : 2 * (chunk) - 1)
#define RESULT_ROUND(chunk) \
  (2 * (chunk) + 2 < 2 * length[call] - 1 -> 2 * (chunk) + 2 : 2 * length[call] - 1)
#define STAGED_PHASE(chunk) (INPUT_ROUND(chunk) + 1)
#ifdef MUTANT_PHASES_MEET
#define REDUCED_PHASE(chunk) RESULT_ROUND(chunk)
#else
#define REDUCED_PHASE(chunk) (RESULT_ROUND(chunk) + 1)
#endif

#define ALL_REDUCE 1
#define BROADCAST 2
#define GATHER 3
byte kind[CALLS + 1], root[CALLS + 1], length[CALLS + 1];

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
       fi;
       length[call] = 1;
       do
       :: length[call] < LONGEST -> length[call] = length[call] + 1
       :: break
       od;
       /* A round of a broadcast does half the work of a chunk of an all-reduce. */
       if
       :: kind[call] != ALL_REDUCE && length[call] > 1 -> length[call] = 2 * length[call] - 1
       :: else
       fi
    fi
  }
}

#define READ_UP_TO(member, word) ((member) == me || memory[DONE(member)] >= (word))
#define POSTED_BY(member, phase) \
  ((member) == me || memory[POSTED(member, call)] >= PROGRESS(call, phase))
#if RANKS > 2
#define READ_BY_ALL(word) (READ_UP_TO(0, word) && READ_UP_TO(1, word) && READ_UP_TO(2, word))
#define POSTED_BY_ALL(phase) (POSTED_BY(0, phase) && POSTED_BY(1, phase) && POSTED_BY(2, phase))
#else
#define READ_BY_ALL(word) (READ_UP_TO(0, word) && READ_UP_TO(1, word))
#define POSTED_BY_ALL(phase) (POSTED_BY(0, phase) && POSTED_BY(1, phase))
#endif

#ifdef MUTANT_ACKNOWLEDGED_TOO_FEW
#define FREED_BY(round) PROGRESS(call, (round) - buffers)
#else
#define FREED_BY(round) PROGRESS(call, (round) - buffers + 1)
#endif

/* Staging::fill(), up to the point at which the buffer may be written. */
#define ALL 255
inline wait_free(round, reader) {
  if
#ifdef MUTANT_LAST_CALL_NOT_AWAITED
  :: (round) < buffers
#else
  :: (round) < buffers && READ_BY_ALL(free_after[first + (round)])
#endif
#if defined(MUTANT_ONE_READER_AWAITED)
  :: (round) >= buffers && (reader) == ALL && READ_UP_TO((me + 1) % RANKS, FREED_BY(round))
#elif defined(MUTANT_ALL_REDUCE_NOT_AWAITED)
  :: (round) >= buffers && (reader) == ALL &&
     (kind[call] == ALL_REDUCE || READ_BY_ALL(FREED_BY(round)))
#else
  :: (round) >= buffers && (reader) == ALL && READ_BY_ALL(FREED_BY(round))
#endif
  :: (round) >= buffers && (reader) != ALL && READ_UP_TO(reader, FREED_BY(round))
  fi
}

inline fill(round) {
  store(BUFFER(me, INDEX(first, buffers, round)), FILLED_BY(call, round))
}

inline post(phase) {
  exchange(POSTED(me, call), PROGRESS(call, phase))
}

inline acknowledge(phase) {
  exchange(DONE(me), PROGRESS(call, phase))
}

/* A member's buffer must hold the wanted round. Reading all members in one step loses nothing:
 * it may happen as late as possible, and overwritten data stays overwritten. */
inline read_from(member, round) {
  if
  :: (member) != me ->
     assert(READABLE(member, round) == FILLED_BY(call, round))
  :: else
  fi
}

inline read(member, round) {
  d_step { read_from(member, round) }
}

inline read_all(round) {
  d_step {
    for (k : 0 .. RANKS - 1) { read_from(k, round) }
    k = 0
  }
}

inline stage_chunk(chunk) {
  wait_free(INPUT_ROUND(chunk), ALL);
  fill(INPUT_ROUND(chunk));
  post(STAGED_PHASE(chunk))
}

inline reduce_slice(chunk) {
  POSTED_BY_ALL(STAGED_PHASE(chunk));
  wait_free(RESULT_ROUND(chunk), ALL);
  read_all(INPUT_ROUND(chunk));
  fill(RESULT_ROUND(chunk));
  post(REDUCED_PHASE(chunk));
  acknowledge(INPUT_ROUND(chunk) + 1)
}

inline gather_slices(chunk) {
  POSTED_BY_ALL(REDUCED_PHASE(chunk));
  read_all(RESULT_ROUND(chunk));
  acknowledge(RESULT_ROUND(chunk) + 1)
}

inline all_reduce_chunked() {
  open(2 * length[call]);
  stage_chunk(0);
  do
  :: step < length[call] ->
     if
     :: step + 1 < length[call] -> stage_chunk(step + 1)
     :: else
     fi;
     reduce_slice(step);
     if
     :: step > 0 -> gather_slices(step - 1)
     :: else
     fi;
     step++
  :: else -> break
  od;
  gather_slices(length[call] - 1);
  close()
}

/* The root of a broadcast, or a non-root rank of a gather. */
inline write_rounds(reader) {
  open(length[call]);
  do
  :: step < length[call] ->
     wait_free(step, reader);
#ifdef MUTANT_POSTED_UNFILLED
     post(step + 1);
#endif
     fill(step);
     post(step + 1);
     step++
  :: else -> break
  od;
  close()
}

/* A non-root rank of a broadcast, or the root of a gather. */
inline read_rounds(from_all) {
  post(1);
  do
  :: step < length[call] ->
     if
     :: from_all -> POSTED_BY_ALL(step + 1)
     :: else -> POSTED_BY(root[call], step + 1)
     fi;
#ifdef MUTANT_ACKNOWLEDGED_UNREAD
     acknowledge(step + 1);
#endif
     if
     :: from_all -> read_all(step)
     :: else -> read(root[call], step)
     fi;
     acknowledge(step + 1);
     step++
  :: else -> break
  od
}

/* The next piece of the ring, or its beginning if the piece does not fit behind the last one.
 * With ANYWHERE, any piece: in the code, small calls stay in place. */
inline open(rounds) {
  atomic {
    buffers = ((rounds) < BUFFERS -> (rounds) : BUFFERS);
#ifdef ANYWHERE
    first = 0;
    do
    :: first + buffers < BUFFERS -> first++
    :: break
    od
#else
    first = (last + buffers <= BUFFERS -> last : 0);
    last = first + buffers
#endif
  }
  store(PLACE(me, call), PLACED(first, buffers))
}

inline close() {
  d_step {
    for (k : first .. first + buffers - 1) { free_after[k] = PROGRESS(call + 1, 0) }
    k = 0
  }
}

inline end() {
  exchange(DONE(me), PROGRESS(call + 1, 0));
}

proctype rank(byte me) {
  byte call = 1, step = 0, first = 0, last = 0, buffers = 1, k = 0;
  byte free_after[BUFFERS];
  do
  :: call <= CALLS ->
     choose();
     if
     :: kind[call] == ALL_REDUCE -> all_reduce_chunked()
     :: kind[call] == BROADCAST && root[call] == me -> write_rounds(ALL)
     :: kind[call] == BROADCAST && root[call] != me -> read_rounds(false)
     :: kind[call] == GATHER && root[call] != me -> write_rounds(root[call])
     :: kind[call] == GATHER && root[call] == me -> read_rounds(true)
     fi;
     step = 0;
     end();
     call++
  :: else -> break
  od
}

init {
  byte r;
  atomic {
    for (r : 0 .. RANKS - 1) { memory[DONE(r)] = PROGRESS(1, 0) }
    r = 0;
    for (r : 0 .. RANKS - 1) { run rank(r) }
    run drain()
  }
}
