/* Ranks that make different calls detect it; ranks that make the same calls never report a
 * mismatch; no rank waits for ever because another one made a different call.
 *
 * Mirrors: csrc/core/shm/mailbox/agreement.cc, compare(), compare_last_calls(), and mismatch() as far
 * as it reads call records; mailboxes.cc, begin(), wait_posted(), wait_acknowledged(), end() and
 * leave(); diagnosis.cc, MemberMonitor::check(); aborts.cc, find().
 *
 * Ranks make CALLS broadcasts and then a barrier. The first rank to reach a call chooses its
 * root and whether it is long: then the root waits within it until all have acknowledged, as
 * with more rounds than buffers. With DEVIATES one rank has another root than the others in one
 * of its calls. With LEAVES there is no barrier: ranks leave after their last broadcast, and
 * with FEWER the deviating rank makes one broadcast less instead.
 *
 * The rolling hash of call s is s plus one bit that is set from the deviating call on: the model
 * assumes that different histories have different hashes.
 *
 * Properties: a rank reports a mismatch only if there is one; a rank whose barrier succeeds has
 * made the same calls as all others; with LEAVES, some rank reports a disagreement when all have
 * left; no rank is stuck; and with DESCRIBES, a reported call of a member is one that it made.
 *
 * Between its slices, a waiting rank also compares the hashes of members that have posted the
 * call meanwhile: otherwise two ranks that both believe to be the root would wait for each
 * other's acknowledgement until their deadlines. A rank that waits in begin() must not, since
 * its own slot still has the hash of an older call.
 *
 * Left out: sleeping (wake_up.pml), payload (slot_reuse.pml), death (faults.pml). */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef CALLS
#define CALLS 3
#endif
#define SLOTS 2
#define PENDING 4

/* Addresses. Two words of a call record are kept: its sequence and its root. */
#define POSTED(r, slot) ((r) * SLOTS + (slot))
#define HASH(r, slot) (RANKS * SLOTS + POSTED(r, slot))
#define RECORD_SEQUENCE(r, slot) (2 * RANKS * SLOTS + POSTED(r, slot))
#define RECORD_ROOT(r, slot) (3 * RANKS * SLOTS + POSTED(r, slot))
#define DONE(r) (4 * RANKS * SLOTS + (r))
#define ABORTED(r) (4 * RANKS * SLOTS + RANKS + (r))
#define CLOSED(r) (4 * RANKS * SLOTS + 2 * RANKS + (r))
#define WORDS (4 * RANKS * SLOTS + 3 * RANKS)

#define PROGRESS(call, phase) (2 * (call) + (phase))
#define SEQUENCE_OF(word) ((word) / 2)

#include "store_buffer.pml"

#define NO_RANK 255
byte deviant = NO_RANK, deviates_at;
byte roots[CALLS + 2] = NO_RANK;  /* of all ranks except the deviant */
bool is_long[CALLS + 2];

#ifdef FEWER
#define HAS_DEVIATED(rank, call) false
#else
#define HAS_DEVIATED(rank, call) (rank == deviant && (call) >= deviates_at)
#endif
#ifdef MUTANT_ONLY_READERS_COMPARE_ONE_CALL
#define HASH_OF(rank, call) (2 * (call) + (rank == deviant && (call) == deviates_at -> 1 : 0))
#else
#define HASH_OF(rank, call) (2 * (call) + (HAS_DEVIATED(rank, call) -> 1 : 0))
#endif
#ifdef FEWER
#define ROOT_OF(rank, call) roots[call]
#define CALLS_OF(rank) (rank == deviant -> CALLS - 1 : CALLS)
#else
#define ROOT_OF(rank, call) \
  ((rank == deviant && (call) == deviates_at -> (roots[call] + 1) % RANKS : roots[call]))
#define CALLS_OF(rank) CALLS
#endif
byte left_count;
bool is_told;

#if RANKS > 2
#define ABORT_SEEN (memory[ABORTED(0)] == 1 || memory[ABORTED(1)] == 1 || memory[ABORTED(2)] == 1)
#else
#define ABORT_SEEN (memory[ABORTED(0)] == 1 || memory[ABORTED(1)] == 1)
#endif

inline adopt_abort() {
  if
  :: ABORT_SEEN -> goto failed
  :: else
  fi
}

/* The call that mismatch() reports for the member. */
inline describe(member) {
#ifdef DESCRIBES
  shown = (checked > SLOTS -> checked - SLOTS + 1 : 1);
  do
  :: shown <= checked ->
     seen = memory[RECORD_SEQUENCE(member, shown % SLOTS)];
     root = memory[RECORD_ROOT(member, shown % SLOTS)];
#ifndef MUTANT_RECORD_READ_ONCE
     if
     :: memory[RECORD_SEQUENCE(member, shown % SLOTS)] != shown -> seen = 0
     :: else
     fi;
#endif
     if
     :: seen == shown && shown <= CALLS -> assert(root == ROOT_OF(member, shown))
     :: else
     fi;
     shown++
  :: else -> break
  od;
#endif
  skip
}

inline verify(member, call) {
  checked = call;
  seen = memory[POSTED(member, checked % SLOTS)];
  if
  :: SEQUENCE_OF(seen) != checked || seen == PROGRESS(checked, 0)
  :: else ->
     seen = memory[HASH(member, checked % SLOTS)];
     if
#ifndef MUTANT_POSTED_LOOKED_AT_ONCE
     :: SEQUENCE_OF(memory[POSTED(member, checked % SLOTS)]) != checked
#endif
     :: else ->
        if
        :: seen != own_hash[checked % SLOTS] ->
           assert(HAS_DEVIATED(member, checked) || HAS_DEVIATED(me, checked));
           describe(member);
           goto failed
        :: else -> verified[member] = checked
        fi
     fi
  fi;
  seen = 0;
  checked = 0
}

/* Whether the member has posted a hash that a watch would compare. */
#if defined(MUTANT_NO_COMPARISON_WHILE_WAITING)
#define UNCOMPARED(member) false
#elif defined(MUTANT_COMPARED_IN_BEGIN)
#define UNCOMPARED(member) \
  ((member) != me && verified[member] < sequence && \
   memory[POSTED(member, slot)] == PROGRESS(sequence, 1))
#else
#define UNCOMPARED(member) \
  ((member) != me && verified[member] < sequence && own_hash[slot] / 2 == sequence && \
   memory[POSTED(member, slot)] == PROGRESS(sequence, 1))
#endif

inline wait(word, target) {
  do
  :: memory[word] >= target -> break
  /* The word may have been stored since it was checked. */
  :: ABORT_SEEN -> goto failed
#ifdef LEAVES
  /* Other ways out are in faults.pml. */
  :: memory[CLOSED(0)] == 1 && memory[word] < target -> goto failed
  :: memory[CLOSED(1)] == 1 && memory[word] < target -> goto failed
#endif
  :: UNCOMPARED(0) -> verify(0, sequence)
  :: UNCOMPARED(1) -> verify(1, sequence)
#if RANKS > 2
  :: UNCOMPARED(2) -> verify(2, sequence)
#endif
  od
}

inline wait_posted(member) {
  wait(POSTED(member, slot), PROGRESS(sequence, 1));
  if
  :: verified[member] < sequence -> verify(member, sequence)
  :: else
  fi
}

inline wait_all_posted() {
  for (member : 0 .. RANKS - 1) {
    if
    :: member != me -> wait_posted(member)
    :: else
    fi
  }
  member = 0
}

inline begin() {
  adopt_abort();
  for (member : 0 .. RANKS - 1) {
    if
    :: member != me ->
       if
#ifndef MUTANT_ONLY_READERS_COMPARE_ONE_CALL
       :: sequence > 1 && verified[member] < sequence - 1 -> verify(member, sequence - 1)
#endif
       :: else
       fi;
       if
       :: sequence > SLOTS ->
          wait(DONE(member), PROGRESS(sequence - SLOTS + 1, 0));
          if
#ifndef MUTANT_ONLY_READERS_COMPARE_ONE_CALL
          :: verified[member] < sequence - SLOTS -> verify(member, sequence - SLOTS)
#endif
          :: else
          fi
       :: else
       fi
    :: else
    fi
  }
  member = 0;
  d_step {
    if
    :: roots[sequence] == NO_RANK && sequence <= CALLS ->
       roots[sequence] = first_choice;
       is_long[sequence] = first_is_long
    :: else
    fi;
    own_hash[slot] = HASH_OF(me, sequence)
  }
#ifdef MUTANT_HASH_BEFORE_MARK
  store(HASH(me, slot), HASH_OF(me, sequence));
  store(POSTED(me, slot), PROGRESS(sequence, 0));
#else
#ifndef MUTANT_NO_MARK
  store(POSTED(me, slot), PROGRESS(sequence, 0));
#endif
  store(HASH(me, slot), HASH_OF(me, sequence));
#endif
#ifdef DESCRIBES
  store(RECORD_SEQUENCE(me, slot), sequence);
  root = ROOT_OF(me, sequence);
  store(RECORD_ROOT(me, slot), root);
#endif
  root = 0
}

inline post() {
  exchange(POSTED(me, slot), PROGRESS(sequence, 1))
}

inline end() {
  exchange(DONE(me), PROGRESS(sequence + 1, 0))
}

/* The newest call of a member is in its newest slot. */
inline leave() {
#ifdef MUTANT_LEAVES_BY_A_STORE
  store(CLOSED(me), 1);
#else
  exchange(CLOSED(me), 1);
#endif
  for (member : 0 .. RANKS - 1) {
    if
    :: member != me ->
       has_left = memory[CLOSED(member)];
       adopt_abort();
       first_choice = sequence;
       do
       :: first_choice > verified[member] && first_choice + SLOTS > sequence ->
          verify(member, first_choice);
          first_choice--
       :: else -> break
       od;
       first_choice = 0;
#ifndef MUTANT_CALLS_NOT_COUNTED
       if
       :: has_left ->
          seen = SEQUENCE_OF(memory[POSTED(member, 0)]);
          if
          :: SEQUENCE_OF(memory[POSTED(member, 1)]) > seen ->
             seen = SEQUENCE_OF(memory[POSTED(member, 1)])
          :: else
          fi;
          if
          :: seen != sequence -> goto failed
          :: else
          fi;
          seen = 0
       :: else
       fi;
#endif
       has_left = false
    :: else
    fi
  }
  member = 0
}

proctype rank(byte me) {
  bool has_left = false;
  byte sequence = 0, slot = 0, member = 0, checked = 0, seen = 0, shown = 0, root = 0, source = 0;
  byte first_choice = 0;
  bool first_is_long = false;
  byte verified[RANKS];
  byte own_hash[SLOTS];
  do
  :: sequence < CALLS_OF(me) ->
     sequence++;
     slot = sequence % SLOTS;
     if
     :: first_choice = 0
     :: first_choice = RANKS - 1
     fi;
     if
#ifndef ONLY_SHORT
     :: first_is_long = true
#endif
     :: first_is_long = false
     fi;
     begin();
     first_choice = 0;
     first_is_long = false;
     post();
     if
     :: ROOT_OF(me, sequence) == me ->
        for (member : 0 .. RANKS - 1) {
          if
          :: member != me && is_long[sequence] -> wait(DONE(member), PROGRESS(sequence, 1))
          :: else
          fi
        }
        member = 0
     :: else ->
        source = ROOT_OF(me, sequence);
        wait_posted(source);
        source = 0;
        exchange(DONE(me), PROGRESS(sequence, 1))
     fi;
     end()
  :: else -> break
  od;
#ifdef LEAVES
  leave();
#else
  sequence++;
  slot = sequence % SLOTS;
  begin();
  post();
  wait_all_posted();
  end();
  assert(deviant == NO_RANK);
#endif
  goto finished;

failed:
  assert(deviant != NO_RANK);
  is_told = true;
  store(ABORTED(me), 1);
  store(CLOSED(me), 1);

finished:
  skip;
  atomic {
    left_count++;
#ifdef LEAVES
    assert(left_count < RANKS || is_told == (deviant != NO_RANK))
#endif
  }
}

init {
  byte r;
  atomic {
#ifdef DEVIATES
    if
    :: deviant = 0
    :: deviant = RANKS - 1
    fi;
    deviates_at = 1;
    do
    :: deviates_at < CALLS -> deviates_at++
    :: break
    od;
#endif
    for (r : 0 .. RANKS - 1) { memory[DONE(r)] = PROGRESS(1, 0) }
    r = 0;
    for (r : 0 .. RANKS - 1) { run rank(r) }
    run drain()
  }
}
