// Meeting: how the ranks that want to form a group find each other in a store that may still hold
// what earlier processes left there.
//
// Every rank puts an entry into the store that carries a random nonce, its own for this attempt;
// or the leader of its host puts one for both (see LocalExchange). Rank 0 collects the entries,
// gives the meeting an id, publishes all entries as its member table, and tells each nonce the id.
// So a rank believes only a table that was made of its own entry. If an entry is of a process that
// has ended, its successor's comes in its place: then rank 0 gathers anew.
//
// Keys below the prefix, where k is a rank in the group; all go when the meeting is over:
//   entry/k     the entry of rank k, and of those for which it speaks, or its failure
//   claims/k    the number of writes to entry/k
//   to/<nonce>  rank 0's answer to that entry: the meeting's id and the rank's RelayPlace, or its
//               failure
//   trouble     a rank whose entry is a failure
//   closed      rank 0's failure, for ranks that arrive later
//   <id>/table  the entries of all; none where rank 0 speaks for all
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/look.h"
#include "core/base/status.h"
#include "core/formation/local_exchange.h"
#include "core/formation/table_relay.h"
#include "core/store/store.h"

namespace dscomm {

// When this process began, by the wall clock.
int64_t process_began_ns();

struct MeetingRequest {
  std::string prefix;  // of the keys in the store
  int rank = 0;
  int size = 1;
  std::string members;                  // its global ranks, as this rank was told; for messages
  std::vector<int> speakers;            // the ranks that will put entries; empty: not known
  Look look = [] { return Status(); };  // a reason of the caller's to give up waiting
  // A failure if rank 0 has formed the group without this rank, and so reads no entry any more.
  Look formed = [] { return Status(); };
  // What was put into the store before this time of the wall clock may be of an earlier attempt.
  int64_t began_ns = process_began_ns();
  // Used by ranks that put an entry; outlives the meeting. Null: the table is read from the store.
  TableRelay* relay = nullptr;
};

class Meeting {
 public:
  // `store` and `deadline` outlive it.
  Meeting(Store& store, MeetingRequest request, const Deadline& deadline);

  struct Table {
    uint64_t id = 0;                  // of this meeting; random, never 0
    std::vector<MemberText> entries;  // by rank
  };
  // Collective. All gather again after the meeting was superseded. With `local`, this rank speaks
  // for the members of that as well, and passes the table on.
  Result<Table> gather(const MemberText& entry, LocalLeader* local = nullptr);
  // In place of gather(), by a rank that has joined a leader: before, whether it may, and when.
  Result<bool> enlist(LocalMember& local, const LocalEntry& own);
  Result<Table> follow(LocalMember& local);
  // A later word of the leader: the table of a meeting that superseded the last.
  Result<Table> take_table(const LocalMessage& message);

  // In place of gather(), by a rank that cannot take part: the others raise `cause` soon.
  void decline(const Status& cause);

  // Of the last table: the ranks that put an entry there, ascending. Each speaks for others, or for
  // itself alone.
  const std::vector<int>& speakers() const { return speakers_; }

  // Each of them, when it has the table and is about to say so to rank 0: takes its entry back.
  // kMismatch where another process has put one in its place.
  Status withdraw();
  // Rank 0, while it waits for what `rank` says of the table: whether another process has come in
  // the place of the one that is in it. Asks the store now and then.
  bool is_superseded(int rank);
  // A rank that has the table and raises `cause`, as rank 0 may have died before it told all
  // others: those that have not taken back their entry raise it too.
  void tell_others(const Status& cause);
  // Why a member of the table has ended, if it has said so in its entry since the table was made.
  Status last_word(int rank);
  // Rank 0, when all have said that they have the table.
  void remove_tables() {
    for (const std::string& name : tables_) remove(name);
  }
  // Of keys for what is agreed on in this meeting.
  std::string prefix() const { return key(id_text() + "/"); }

  // Whether the entry of `rank` in the table may be one that an earlier process left. Then its
  // successor may still come, for which one waits so long.
  bool may_be_old(int rank) const { return is_old(entry_of(rank).time_ns); }
  static int64_t successor_limit_ns();

 private:
  struct Entry {
    uint64_t nonce = 0;
    int64_t time_ns = 0;   // when it was put there, by the clock of its host
    bool follows = false;  // another was there before
    int size = 0;          // of the group, as its rank was told
    std::string members;
    Status cause;                      // why its rank cannot take part, or OK
    std::map<int, MemberText> bodies;  // of all for which its rank speaks, itself included
    std::vector<int> awaited;          // for which it will speak when they have come
    std::string relay;                 // the address of its TableRelay; empty: none
    int64_t since_ns = 0;              // when this rank saw it first
    bool is_there = false;             // as this rank read last
  };

  std::string key(const std::string& name) const { return request_.prefix + name; }
  std::string id_text() const;
  static std::string pack(const Entry& entry);
  static bool unpack(std::string_view bytes, Entry* entry);
  Status error(const std::string& text) const;
  Status put(const Status& cause);
  Status set(const Status& cause);
  Status put_if_due();
  Result<bool> read(int rank);
  Result<bool> take_back();
  void remove(const std::string& name) { static_cast<void>(store_.remove(key(name))); }
  void remove_entry(int rank);
  Result<Table> finish();
  void begin();

  Result<Table> decide();
  Status collect();
  Status fetch();
  Result<bool> take_entry_of(int rank, std::vector<int>* taken_by);
  Result<bool> is_sole_entry_of(const std::map<int, MemberText>& bodies, int speaker,
                                std::vector<int>* taken_by);
  Result<bool> is_settled(int rank);
  Status fault_of(int rank) const;
  Status look();
  Status ask_caller();
  Status look_for_trouble();
  Status give_up(const Status& cause);
  void tell(uint64_t nonce, const Status& cause);

  Result<Table> follow();
  Result<bool> is_told();
  Status read_table();
  Deadline relay_limit(std::chrono::milliseconds most) const;
  Status look_during_relay();
  Status look_at_closed();

  Status look_at_own();
  Status look_for_the_awaited();
  Status listen(std::chrono::milliseconds pause, const Deadline& deadline);
  Status conflict(const Entry& other);
  std::string claimed_twice(int rank) const;
  std::vector<bool> have_come();
  const Entry& entry_of(int rank) const {
    return table_.at(speaker_of_[static_cast<size_t>(rank)]);
  }
  std::string missing();
  bool is_old(int64_t time_ns) const;

  Store& store_;
  const MeetingRequest request_;
  const Deadline& deadline_;
  uint64_t nonce_ = 0, id_ = 0;
  MemberText body_;
  LocalLeader* local_ = nullptr;  // for whose members this rank speaks
  std::string relay_;             // the address of this rank's TableRelay; empty: none
  RelayPlace place_;              // as rank 0 said in the last table
  // Of its entry with this nonce: whether it was put there, when, with how many changes of those
  // members, and whether it follows another.
  bool is_put_ = false, follows_ = false;
  int64_t put_ns_ = 0;
  uint64_t put_changes_ = 0;
  bool has_conflict_ = false;               // another process believes to be this rank
  bool has_trouble_ = false;                // rank 0 has read the key
  bool is_closed_ = false;                  // the key is there, perhaps from an earlier attempt
  bool is_formed_ = false;                  // without this rank
  std::map<int, int64_t> removed_ns_;       // when rank 0 removed the entry of that rank
  std::vector<int> expected_;               // by rank 0: the others of request_.speakers
  std::map<int, std::string> fetched_;      // their entries, until they are read
  std::vector<Entry> seen_;                 // by rank, as this rank read them last
  std::map<int, Entry> table_;              // by speaker
  std::vector<int> speakers_, speaker_of_;  // of the table; the second by rank
  std::string table_bytes_;
  std::vector<std::string> tables_;          // keys of rank 0's, those of superseded meetings too
  std::optional<std::string> closed_first_;  // what was there of it when this rank came
  int64_t came_ns_ = 0, look_again_ns_ = 0, ask_again_ns_ = 0;
  int64_t excuse_again_ns_ = 0, excuse_pause_ns_ = 0;
};

}  // namespace dscomm
