// The table of all DSCOMM_* settings.
//
// A row is NUMBER(field, environment name, default, smallest, largest, unit, meaning), or
// TEXT(field, environment name, default, allowed values, meaning). The environment is read once,
// when the process first makes a Context. A value that is not allowed is an error, which names the
// allowed ones. A DSCOMM_* name that is not in the table is an error, which names the nearest
// setting. docs/settings.md is generated from this table.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/base/status.h"

// Unless the row says otherwise, defaults were measured on 2 cores of a Zen 4 virtual machine.
#define DSCOMM_SETTINGS(NUMBER, TEXT)                                                              \
  NUMBER(                                                                                          \
      staging_bytes, "DSCOMM_STAGING_BYTES", 2621440, 16384, 1073741824, "bytes",                  \
      "staging that a group with a large operation in flight holds in each rank, at least four "   \
      "chunks; more than a core's own cache, so that what is written again has left the "          \
      "readers' caches; the rank 0 of a group decides for all of it")                              \
  NUMBER(staging_chunk_bytes, "DSCOMM_STAGING_CHUNK_BYTES", 524288, 4096, 67108864, "bytes",       \
         "largest piece in which data goes through the staging; the rank 0 of a group decides "    \
         "for all of it")                                                                          \
  NUMBER(one_shot_bytes, "DSCOMM_ONE_SHOT_BYTES", 32768, 0, 67108864, "bytes",                     \
         "most that a rank reads in an all-reduce in which each reads all data of the others; "    \
         "beyond it, or beyond a staging chunk, each reduces a slice and they exchange the "       \
         "results; the rank 0 of a group decides for all of it")                                   \
  NUMBER(                                                                                          \
      arena_bytes, "DSCOMM_ARENA_BYTES", 1073741824, 16777216, 1099511627776, "bytes",             \
      "address space that a process reserves for mailboxes and staging; memory is taken as it is " \
      "used")                                                                                      \
  NUMBER(pool_bytes, "DSCOMM_POOL_BYTES", 68719476736, 0, 1099511627776, "bytes",                  \
         "address space that a process reserves for tensors which its peers read where they are "  \
         "(deepspeed_comm.empty()), at most as much as this machine's memory; memory is taken "    \
         "only for the tensors that are made; 0: there is no pool")                                \
  NUMBER(in_place_bytes, "DSCOMM_IN_PLACE_BYTES", -1, -1, 1099511627776, "bytes",                  \
         "smallest data that a rank has its peers read where it is, if it lies in the pool; "      \
         "smaller data is staged; -1 decides by what was measured: collectives from 2 MiB on "     \
         "where the cores of the ranks share a cache, else from 16 MiB on; messages from 64 KiB "  \
         "up to 8 MiB where they share one, else up to 2 MiB")                                     \
  NUMBER(channel_bytes, "DSCOMM_CHANNEL_BYTES", 4194304, 4096, 67108864, "bytes",                  \
         "longest ring for the pieces of messages of more than a page, made when a rank first "    \
         "sends one to another; more than cores' own caches, so that what is written again has "   \
         "left them; from the ninth peer on, between hosts, and once half of the arena is used, "  \
         "at most 256 KiB")                                                                        \
  NUMBER(unexpected_bytes, "DSCOMM_UNEXPECTED_BYTES", 1073741824, 0, 1099511627776, "bytes",       \
         "most memory that holds messages which arrived before their receive was posted")          \
  NUMBER(spin_pauses, "DSCOMM_SPIN_PAUSES", -1, -1, 1000000, "pauses",                             \
         "pause instructions in a wait before it yields; -1 decides by ranks and usable cores: "   \
         "100 when the ranks of this host fit, 20 when they do not")                               \
  NUMBER(yield_us, "DSCOMM_YIELD_US", 200, 0, 1000000, "us",                                       \
         "time a wait yields the core before it sleeps")                                           \
  NUMBER(sleep_slice_ms, "DSCOMM_SLEEP_SLICE_MS", 10, 0, 1000, "ms",                               \
         "longest sleep before a wait looks at peers and deadline again; 0, for tests of "         \
         "wake-ups alone, sleeps until woken and notices neither deaths nor deadlines")            \
  NUMBER(recorder_entries, "DSCOMM_RECORDER_ENTRIES", 256, 0, 1000000, "operations",               \
         "operations that the flight recorder keeps for each group")                               \
  NUMBER(worker_idle_ms, "DSCOMM_WORKER_IDLE_MS", 10000, 0, 3600000, "ms",                         \
         "how long an idle worker thread stays before it ends")                                    \
  NUMBER(relay_hosts, "DSCOMM_RELAY_HOSTS", 33, 2, 1000000, "hosts",                               \
         "hosts from which on their leaders pass a group's member table along a tree, instead of " \
         "each reading it from the store; set it the same on all ranks")                           \
  TEXT(hierarchy, "DSCOMM_HIERARCHY", "auto", "auto|flat|hosts|numa|l3",                           \
       "which ranks reduce among themselves first: flat, none; hosts, those of a host; numa and "  \
       "l3, also those of a NUMA node or L3 cache inside it; auto is numa or l3 where the ranks "  \
       "of a group are bound to several, and else hosts; the rank 0 of a group decides for all "   \
       "of it")                                                                                    \
  TEXT(wire_halves, "DSCOMM_WIRE_HALVES", "half", "half|float32",                                  \
       "how float16 and bfloat16 travel between hosts to be reduced: as they are, rounded once "   \
       "on every host and between hosts, or as float32, rounded once; the rank 0 of a group "      \
       "decides for all of it")                                                                    \
  TEXT(topology, "DSCOMM_TOPOLOGY", "",                                                            \
       "empty, a path to hwloc XML, or hwloc's synthetic description",                             \
       "the topology to believe instead of this host's own")                                       \
  TEXT(mpi, "DSCOMM_MPI", "auto", "auto|openmpi|mpich",                                            \
       "which MPI carries groups between hosts: auto takes what the program has loaded, else "     \
       "Open MPI, else MPICH; set it the same on all ranks")                                       \
  TEXT(ifname, "DSCOMM_IFNAME", "",                                                                \
       "empty, or interfaces and networks (address/prefix), separated by commas",                  \
       "what joins the hosts; empty takes the networks that all of them are in")                   \
  TEXT(ports, "DSCOMM_PORTS", "", "empty, or first-last",                                          \
       "the ports at which a rank listens for ranks of other hosts, MPI over TCP included, as in " \
       "20000-20999: four for each rank of a host; empty takes any")                               \
  TEXT(flight_record_dir, "DSCOMM_FLIGHT_RECORD_DIR", "", "empty, or a folder",                    \
       "where each rank writes its flight record, a JSON file, when one of its groups ends by a "  \
       "timeout, a mismatch, a death or another failure; empty writes none")                       \
  TEXT(flight_record_signal, "DSCOMM_FLIGHT_RECORD_SIGNAL", "none", "none|SIGUSR2",                \
       "a signal upon which a rank writes its flight record; needs DSCOMM_FLIGHT_RECORD_DIR")      \
  TEXT(debug, "DSCOMM_DEBUG", "warn", "error|warn|info|debug",                                     \
       "what is logged to standard error; info adds how each group communicates, debug the "       \
       "algorithms of its calls: each at its first use, and all by size when the group ends")

namespace dscomm {

struct PortRange {
  uint16_t first = 0, last = 0;  // 0: any port

  bool is_any() const { return last == 0; }
};
// Parses "20000-20999"; an empty text is any port. Nothing if the text is no valid range.
std::optional<PortRange> parse_ports(const std::string& text);

// Ports that a rank needs: two, for its failure detector and MPI, doubled because the system keeps
// the ports of closed connections for a minute.
inline constexpr int kPortsOfRank = 4;
// The part of `range` for one of the `ranks` ranks of a host, so that two ranks never try the same
// port at once; all of `range` if a part would have fewer than kPortsOfRank ports.
PortRange ports_of_rank(const PortRange& range, int rank, int ranks);

struct Settings {
#define DSCOMM_FIELD_NUMBER(field, name, value, smallest, largest, unit, meaning) \
  int64_t field = value;
#define DSCOMM_FIELD_TEXT(field, name, value, allowed, meaning) std::string field = value;
  DSCOMM_SETTINGS(DSCOMM_FIELD_NUMBER, DSCOMM_FIELD_TEXT)
#undef DSCOMM_FIELD_NUMBER
#undef DSCOMM_FIELD_TEXT

  // The defaults, overridden by the environment. kInvalidArgument names a wrong variable.
  static Result<Settings> from_environment();
};

// Whether torchrun started this process. Then several processes may have the same rank, one after
// another.
bool started_by_torchrun();
// The variables that torchrun sets for a worker. The ranks of a host are consecutive.
struct TorchrunWorker {
  int rank = -1, world_size = -1, local_rank = -1, local_world_size = -1;  // -1: not set
  std::string attempt;  // identifies the job on this host, and the restart
};
// The variables of this process; nothing if torchrun did not start it. Processes that a worker
// starts inherit its variables.
std::optional<TorchrunWorker> torchrun_worker();
// Whether the launcher, and not rank 0, hosts the job's store.
bool launcher_keeps_store();

// One row of the table as text, for docs and the doctor.
struct SettingRow {
  std::string name, default_value, allowed, unit, meaning;
};
std::vector<SettingRow> setting_rows();

}  // namespace dscomm
