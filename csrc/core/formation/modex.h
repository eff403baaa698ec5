// Modex: how the ranks of a new group find each other in a store that may still contain entries
// of earlier processes.
//
// Every rank puts an entry into the store, with a random nonce for this attempt; or the leader of
// its host puts one for all (see local_exchange.h). Rank 0 collects the entries, gives the meeting
// an id, publishes all entries as its member table, and answers each nonce with the id. So a rank
// believes only a table that contains its own entry. If the process of an entry has ended, its
// successor replaces the entry, and rank 0 gathers anew.
//
// Keys below the prefix, where k is a rank in the group; all are removed once the group has formed:
//   entry/k     the entry of rank k, and of those for which it speaks, or its failure
//   claims/k    the number of writes to entry/k
//   to/<nonce>  rank 0's answer to the entry with this nonce: the meeting's id and the rank's place
//               in the relay of the table (RelayNode), or rank 0's failure
//   trouble     a rank whose entry is a failure
//   closed      rank 0's failure, for ranks that arrive later
//   <id>/table  the entries of all; missing if rank 0 speaks for all
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/give_up_check.h"
#include "core/base/status.h"
#include "core/formation/local_exchange.h"
#include "core/formation/table_relay.h"
#include "core/store/store.h"

namespace dscomm {

// When this process began, by the wall clock, in ns.
int64_t process_began_ns();

struct ModexRequest {
  std::string prefix;  // of the keys in the store
  int rank = 0;
  int size = 1;
  std::string members;                          // the group's global ranks, as this rank sees them
  std::vector<int> entry_owners;                // the ranks that will put entries; empty: unknown
  GiveUpCheck check = [] { return Status(); };  // the caller's reason to give up, or OK
  // A failure if rank 0 has formed the group without this rank, and so reads no more entries.
  GiveUpCheck formed = [] { return Status(); };
  // Entries from before this time of the wall clock may be of an earlier attempt.
  int64_t began_ns = process_began_ns();
  // Used by ranks that put an entry; must outlive the meeting. Null: the store serves the table.
  TableRelay* relay = nullptr;
};

class Modex {
 public:
  // `store` and `deadline` must outlive the Modex.
  Modex(Store& store, ModexRequest request, const Deadline& deadline);

  struct Table {
    uint64_t id = 0;                   // of this meeting; random, never 0
    std::vector<MemberEntry> entries;  // by rank
  };
  // Collective. If another meeting supersedes this one, all call it again. With `local`, this rank
  // speaks for the members of `local`, too, and passes the table on to them.
  Result<Table> gather(const MemberEntry& entry, LocalLeader* local = nullptr);
  // Call instead of gather() on a rank that may have a leader: join_leader() returns whether one
  // speaks for this rank. If so, follow() returns the table.
  Result<bool> join_leader(LocalMember& local, const LocalEntry& own);
  Result<Table> follow(LocalMember& local);
  // Reads a later message of the leader: the table of a meeting that superseded the last one.
  Result<Table> take_table(const LocalMessage& message);

  // Call instead of gather() if this rank cannot take part: the others soon raise `cause`.
  void decline(const Status& cause);

  // The ranks that put an entry into the last table, ascending. Some speak for others, too.
  const std::vector<int>& entry_owners() const { return entry_owners_; }

  // Call on each owner that has the table, before it reports to rank 0: removes the owner's entry.
  // kMismatch if another process has replaced the entry.
  Status remove_own_entry();
  // Call on rank 0, while it waits for the report of `rank`: whether the entry of `rank` in the
  // table no longer counts. Asks the store only now and then, and returns false in between.
  bool is_superseded(int rank);
  // Call on a rank that has the table and raises `cause`: sends `cause` to the ranks whose entries
  // are still in the store, because rank 0 may have died before it answered them.
  void fail_others(const Status& cause);
  // The cause that a member has put into its entry since the table was made, or OK.
  Status final_cause(int rank);
  // Call on rank 0, once all have said that they have the table.
  void remove_tables() {
    for (const std::string& name : tables_) remove(name);
  }
  // The prefix of the keys through which the ranks agree on the verdict.
  std::string prefix() const { return key(id_text() + "/"); }

  // Whether the entry of `rank` in the table may be left from an earlier process. Then a successor
  // of that process may still come, and the ranks wait for it for successor_limit_ns().
  bool may_be_stale(int rank) const { return is_stale(entry_of(rank).time_ns); }
  static int64_t successor_limit_ns();

 private:
  struct Entry {
    uint64_t nonce = 0;
    int64_t time_ns = 0;   // when it was put, by the clock of its host
    bool follows = false;  // it replaced another entry
    int size = 0;          // of the group, as its rank sees it
    std::string members;
    Status cause;                       // why its rank cannot take part, or OK
    std::map<int, MemberEntry> bodies;  // of the ranks that its rank speaks for, including itself
    std::vector<int> awaited;           // ranks that it will speak for once they have come
    std::string relay;                  // the address of its TableRelay; empty: none
    int64_t since_ns = 0;               // when this rank saw it first
    bool is_there = false;              // at this rank's last read
  };

  std::string key(const std::string& name) const { return request_.prefix + name; }
  std::string id_text() const;
  static std::string pack(const Entry& entry);
  static bool unpack(std::string_view bytes, Entry* entry);
  Status put(const Status& cause);
  Status set(const Status& cause);
  Status put_if_due();
  Result<bool> read(int rank);
  Result<bool> remove_if_own();
  void remove(const std::string& name) { static_cast<void>(store_.remove(key(name))); }
  void remove_entry(int rank);
  Result<Table> finish();
  void begin();

  Result<Table> decide();
  Status collect();
  Status fetch();
  Result<bool> take_entry_of(int rank, std::vector<int>* taken_by);
  Result<bool> is_sole_entry_of(const std::map<int, MemberEntry>& bodies, int owner,
                                std::vector<int>* taken_by);
  Result<bool> is_settled(int rank);
  Status fault_of(int rank) const;
  Status check();
  Status ask_caller();
  Status check_failed_ranks();
  Status give_up(const Status& cause);
  void answer(uint64_t nonce, const Status& cause);

  Result<Table> follow();
  Result<bool> has_answer();
  Status read_table();
  Deadline relay_limit(std::chrono::milliseconds most) const;
  Status check_during_relay();
  Status check_closed();

  Status check_own_entry();
  Status check_awaited();
  Status listen(std::chrono::milliseconds pause, const Deadline& deadline);
  Status conflict(const Entry& other);
  std::string duplicate_rank_text(int rank) const;
  std::vector<bool> ranks_with_entries();
  const Entry& entry_of(int rank) const { return table_.at(owner_of_[static_cast<size_t>(rank)]); }
  std::string missing();
  bool is_stale(int64_t time_ns) const;

  Store& store_;
  const ModexRequest request_;
  const Deadline& deadline_;
  uint64_t nonce_ = 0, id_ = 0;
  MemberEntry body_;
  LocalLeader* local_ = nullptr;  // the members that this rank speaks for, or null
  std::string relay_;             // the address of this rank's TableRelay; empty: none
  RelayNode node_;                // from rank 0's last answer
  // Of this rank's entry with nonce_: whether it was put, whether it replaced another, when it was
  // put, and local_->changes() then.
  bool is_put_ = false, follows_ = false;
  int64_t put_ns_ = 0;
  uint64_t put_changes_ = 0;
  bool has_conflict_ = false;                 // another process claims this rank
  bool has_trouble_ = false;                  // rank 0 has read the key `trouble`
  bool is_closed_ = false;                    // the key `closed` counts as rank 0's failure
  bool is_formed_ = false;                    // the others have formed the group, without this rank
  std::map<int, int64_t> removed_ns_;         // when rank 0 removed the entry of that rank
  std::vector<int> expected_;                 // on rank 0: other owners, until fetch() finds all
  std::map<int, std::string> fetched_;        // entries from fetch(), until read() uses them
  std::vector<Entry> seen_;                   // by rank, as last read
  std::map<int, Entry> table_;                // by owner
  std::vector<int> entry_owners_, owner_of_;  // of the table; owner_of_ is by rank
  std::string table_bytes_;
  std::vector<std::string> tables_;          // keys of rank 0's tables, including superseded ones
  std::optional<std::string> closed_first_;  // the value of `closed` when this rank came
  int64_t came_ns_ = 0, check_again_ns_ = 0, ask_again_ns_ = 0;
  int64_t recheck_ns_ = 0, recheck_pause_ns_ = 0;
};

}  // namespace dscomm
