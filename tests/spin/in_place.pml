/* A call never succeeds with data, read in place, other than what the tensor's owner published,
 * although the owner overwrites the tensor as soon as its call returns or raises; and no rank
 * waits for ever.
 *
 * Mirrors: csrc/core/shm/collectives/all_reduce.cc, all_reduce_chunked(), with the same or separate input
 * and output; broadcast.cc, gather.cc and all_gather.cc, in place; csrc/core/shm/staging/staging.cc,
 * close(); mailboxes.cc, end(); aborts.cc, abort() and check_each_source(). The rounds of
 * reduce.cc and scatter.cc are those of gather.cc and broadcast.cc, and those of
 * reduce_scatter.cc and all_to_all.cc are those of all_gather.cc.
 *
 * Ranks make CALLS calls, each chosen when the first rank reaches it: kind, root, one to LONGEST
 * chunks or rounds. Each rank chooses for each call whether its tensor is read in place. If not,
 * others read its staging, which stage_ring.pml verifies: such a rank only posts and
 * acknowledges here.
 *
 * A word of a tensor, one for each slice of a chunk, holds the input of a call or its result.
 * Its reader asserts that it has the expected value. Every call begins with a new input.
 *
 * With ABORTS one rank gives up in one of its waits, as at its deadline, and overwrites its
 * tensor; so do all ranks that see an abort while the awaited data has not come. Then reads may
 * be wrong, and the reader asserts that it does not succeed. A rank may put such a value into
 * its result, staged or not, before it fails; so a result made of a wrong value is wrong for its
 * readers.
 *
 * Left out: slots, which are as many as calls (see slot_reuse.pml), sleeping, hashes, deaths. */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef CALLS
#define CALLS 2
#endif
#ifndef LONGEST
#define LONGEST 3
#endif
#define PENDING 2

/* Addresses. */
#define POSTED(r, call) ((r) * CALLS + (call) - 1)
#define DONE(r) (RANKS * CALLS + (r))
#define TENSOR(r, chunk, slice) (RANKS * CALLS + RANKS + ((r) * LONGEST + (chunk)) * RANKS + (slice))
#define ABORTED(r) (RANKS * CALLS + RANKS + RANKS * LONGEST * RANKS + (r))
#define WORDS (RANKS * CALLS + 2 * RANKS + RANKS * LONGEST * RANKS)

#define PROGRESS(call, phase) (16 * (call) + (phase))
#define INPUT(call) (2 * (call))
#define RESULT(call) (2 * (call) + 1)
#define GARBAGE 1

#include "store_buffer.pml"

/* The chunked form of all_reduce: the rounds of a chunk. Phases are one more. */
#define INPUT_ROUND(chunk) ((chunk) == 0 -> 0 : 2 * (chunk) - 1)
#define RESULT_ROUND(chunk) \
  (2 * (chunk) + 2 < 2 * length[call] - 1 -> 2 * (chunk) + 2 : 2 * length[call] - 1)
#ifdef MUTANT_GATHERED_EARLY
#define GATHERED_AFTER(chunk) (INPUT_ROUND(chunk) + 1)
#else
#define GATHERED_AFTER(chunk) (RESULT_ROUND(chunk) + 1)
#endif
#ifdef MUTANT_LAST_ROUND_NOT_AWAITED
#define LAST_READ(rounds) PROGRESS(call, (rounds) - 1)
#else
#define LAST_READ(rounds) PROGRESS(call, rounds)
#endif

#define ALL_REDUCE 1
#define ALL_GATHER 2
#define BROADCAST 3
#define GATHER 4
byte kind[CALLS + 1], root[CALLS + 1], length[CALLS + 1];
/* Read in place, in the slot of the call. An all_reduce with separate output has only its input
 * read in place. */
#define STAGED 0
#define INPUT_ALONE 1
#define WHOLE 2
#define IN_PLACE(r) in_place[(r) * CALLS + call - 1]
byte in_place[RANKS * CALLS];
/* By rank: it has made a result of a wrong value. */
bool is_spoilt[RANKS];

inline choose() {
  atomic {
    if
    :: kind[call] != 0
    :: else ->
       if
       :: kind[call] = ALL_REDUCE
       :: kind[call] = ALL_GATHER
       :: kind[call] = BROADCAST; root[call] = 0
       :: kind[call] = BROADCAST; root[call] = RANKS - 1
       :: kind[call] = GATHER; root[call] = 0
       :: kind[call] = GATHER; root[call] = RANKS - 1
       fi;
       length[call] = 1;
       do
       :: length[call] < LONGEST -> length[call] = length[call] + 1
       :: break
       od
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

#if RANKS > 2
#define IS_ABORTED (memory[ABORTED(0)] || memory[ABORTED(1)] || memory[ABORTED(2)])
#else
#define IS_ABORTED (memory[ABORTED(0)] || memory[ABORTED(1)])
#endif

bool given_up;
inline await(condition) {
  if
  :: condition
#ifdef ABORTS
  :: IS_ABORTED && !(condition) -> goto gone
  :: d_step { !given_up -> given_up = true }; goto gone
#endif
  fi
}

inline post(phase) {
  exchange(POSTED(me, call), PROGRESS(call, phase))
}

inline acknowledge(phase) {
  exchange(DONE(me), PROGRESS(call, phase))
}

/* The caller overwrites the tensor. Readers know by then whether it is read in place, since it
 * is posted. */
inline write_input() {
  atomic {
    if
    :: IN_PLACE(me) = STAGED
    :: IN_PLACE(me) = WHOLE
    :: kind[call] == ALL_REDUCE -> IN_PLACE(me) = INPUT_ALONE
    fi
  }
  k = 0;
  do
  :: k < length[call] * RANKS ->
     store(TENSOR(me, k / RANKS, k % RANKS), INPUT(call));
     k++
  :: else -> break
  od;
  k = 0
}

/* The same for a caller whose call has failed, in one step: readers come before or after it. */
inline spoil() {
  d_step {
    empty(pending[me]);
    for (k : TENSOR(me, 0, 0) .. TENSOR(me, LONGEST - 1, RANKS - 1)) { memory[k] = GARBAGE }
    k = 0; step = 0
  }
}

/* Reading all members in one step loses nothing: it may happen as late as possible, and
 * overwritten words stay overwritten. */
inline read_from(member, chunk, slice, wanted) {
  if
  :: (member) != me &&
     (IN_PLACE(member) == WHOLE || IN_PLACE(member) == INPUT_ALONE && (wanted) == INPUT(call)) ->
#ifdef ABORTS
     sources = sources | (1 << (member));
#endif
     is_wrong = is_wrong || memory[TENSOR(member, chunk, slice)] != (wanted);
#ifndef ABORTS
     assert(!is_wrong)
#endif
  :: else
  fi
}

inline read(member, chunk, slice, wanted) {
  d_step { read_from(member, chunk, slice, wanted) }
}

inline store_result(chunk, slice) {
  if
  :: IN_PLACE(me) != INPUT_ALONE -> store(TENSOR(me, chunk, slice), RESULT(call))
  :: else
  fi
}

inline reduce_slice(chunk) {
  await(POSTED_BY_ALL(INPUT_ROUND(chunk) + 1));
  d_step {
    for (k : 0 .. RANKS - 1) { read_from(k, chunk, me, INPUT(call)) }
    k = 0
  }
  store_result(chunk, me);
  is_spoilt[me] = is_spoilt[me] || is_wrong;
  post(RESULT_ROUND(chunk) + 1);
  acknowledge(INPUT_ROUND(chunk) + 1)
}

inline gather_slices(chunk) {
  await(POSTED_BY_ALL(GATHERED_AFTER(chunk)));
  k = 0;
  do
  :: k < RANKS ->
     if
     :: k != me ->
#ifndef MUTANT_GATHERED_EARLY
        read(k, chunk, k, RESULT(call));
        is_wrong = is_wrong || is_spoilt[k];
#endif
        store_result(chunk, k)
     :: else
     fi;
     k++
  :: else -> break
  od;
  k = 0;
#ifdef MUTANT_AWAITED_BEFORE_ACKNOWLEDGED
  if
  :: chunk + 1 == length[call] -> await_readers(RESULT_ROUND(chunk) + 1)
  :: else
  fi;
#endif
  acknowledge(RESULT_ROUND(chunk) + 1)
}

/* The wait before the call returns, if this rank is read in place. */
inline await_readers(rounds) {
#ifdef MUTANT_READERS_NOT_AWAITED
  skip
#else
  if
  :: IN_PLACE(me) == WHOLE -> await(READ_BY_ALL(LAST_READ(rounds)))
  :: else
  fi
#endif
}

inline all_reduce_chunked() {
  post(INPUT_ROUND(0) + 1);
  do
  :: step < length[call] ->
     if
     :: step + 1 < length[call] -> post(INPUT_ROUND(step + 1) + 1)
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
  gather_slices(step - 1);
  await_readers(RESULT_ROUND(step - 1) + 1)
}

/* A tensor in place is published whole; a staged one, round by round. Posting either early is
 * allowed here, since staged data is not checked. */
inline all_gather() {
  post(length[call]);
  read_rounds(true);
  await_readers(length[call])
}

inline read_rounds(from_all) {
  do
  :: step < length[call] ->
     if
     :: from_all -> await(POSTED_BY_ALL(step + 1))
     :: else -> await(POSTED_BY(root[call], step + 1))
     fi;
#ifdef MUTANT_ACKNOWLEDGED_UNREAD
     acknowledge(step + 1);
#endif
     d_step {
       for (k : 0 .. RANKS - 1) {
         if
         :: from_all || k == root[call] -> read_from(k, step, 0, INPUT(call))
         :: else
         fi
       }
       k = 0
     }
     acknowledge(step + 1);
     step++
  :: else -> break
  od
}

#ifdef MUTANT_SUCCESS_ASSUMED_EARLY
#define DONE_BY_THEN PROGRESS(call, 1)
#else
#define DONE_BY_THEN PROGRESS(call + 1, 0)
#endif
inline end() {
#ifdef ABORTS
#ifndef MUTANT_NO_LOOK_AT_THE_END
  k = 0;
  do
  :: k < RANKS ->
     if
     :: (sources >> k) % 2 == 1 && memory[ABORTED(k)] == 1 ->
        if
        :: memory[DONE(k)] >= DONE_BY_THEN  /* it had succeeded */
        :: else -> goto gone
        fi
     :: else
     fi;
     k++
  :: else -> break
  od;
  k = 0;
#endif
  assert(!is_wrong);
#ifdef REACHES_SUCCESS_AFTER_ABORT
  assert(!IS_ABORTED);
#endif
#endif
  sources = 0;
  exchange(DONE(me), PROGRESS(call + 1, 0));
}

proctype rank(byte me) {
  byte call = 1, step = 0, k = 0, sources = 0;
  bool is_wrong = false;
  do
  :: call <= CALLS ->
     choose();
     write_input();
     if
     :: kind[call] == ALL_REDUCE -> all_reduce_chunked()
     :: kind[call] == ALL_GATHER -> all_gather()
     :: kind[call] == BROADCAST && root[call] == me ->
        post(length[call]);
        await_readers(length[call])
     :: kind[call] == BROADCAST && root[call] != me ->
        post(1);
        read_rounds(false)
     :: kind[call] == GATHER && root[call] != me ->
        post(length[call]);
        if
#ifndef MUTANT_READERS_NOT_AWAITED
        :: IN_PLACE(me) == WHOLE -> await(READ_UP_TO(root[call], LAST_READ(length[call])))
#endif
        :: else
        fi
     :: kind[call] == GATHER && root[call] == me ->
        post(1);
        read_rounds(true)
     fi;
     step = 0;
     end();
     call++
  :: else -> goto done
  od;
gone:
#ifdef MUTANT_OVERWRITTEN_BEFORE_THE_ABORT
  spoil();
#endif
  exchange(ABORTED(me), 1);
  spoil();
done:
  skip
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
