#include "mpi/mpich/pmi_session.h"

#include <algorithm>
#include <utility>

#include "core/base/packer.h"

namespace dscomm {
namespace {

// In bytes; Hydra's limits, except for longer values.
constexpr const char* kLimits = "kvsname_max=256 keylen_max=64 vallen_max=4096";
constexpr const char* kSpaceName = "dscomm";

// The value of `name` in a line, up to the next blank or, with to_end, up to the end.
std::string_view value_of(std::string_view line, std::string_view name, bool to_end = false) {
  for (size_t begin = 0; begin < line.size();) {
    const size_t end = std::min(line.find(' ', begin), line.size());
    const std::string_view word = line.substr(begin, end - begin);
    if (word.size() > name.size() && word.starts_with(name) && word[name.size()] == '=')
      return (to_end ? line.substr(begin) : word).substr(name.size() + 1);
    begin = end + 1;
  }
  return "";
}

}  // namespace

std::string PmiSession::answer(std::string_view line) {
  // A command of several lines, such as the one that spawns ranks (MPI_Comm_spawn).
  if (line.starts_with("mcmd=")) is_in_long_question_ = true;
  if (is_in_long_question_) {
    if (line != "endcmd") return "";
    is_in_long_question_ = false;
    return "cmd=spawn_result rc=-1 status=dscomm_starts_no_ranks\n";
  }
  const std::string_view command = value_of(line, "cmd");
  if (command == "init") return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n";
  if (command == "get_maxes") return std::string("cmd=maxes ") + kLimits + " rc=0\n";
  if (command == "get_appnum") return "cmd=appnum appnum=0 rc=0\n";
  if (command == "get_universe_size")
    return "cmd=universe_size size=" + std::to_string(size_) + " rc=0\n";
  if (command == "get_my_kvsname")
    return std::string("cmd=my_kvsname kvsname=") + kSpaceName + " rc=0\n";
  if (command == "get") return get(value_of(line, "key"));
  if (command == "finalize") return "cmd=finalize_ack rc=0\n";
  if (command == "put") {
    put_[std::string(value_of(line, "key"))] = value_of(line, "value", /*to_end=*/true);
    return "cmd=put_result rc=0 msg=success\n";
  }
  if (command == "barrier_in") {
    is_in_barrier_ = true;
    return "";
  }
  // MPI prints the reason itself and ends the process.
  if (command == "abort") return "";
  return "cmd=" + std::string(command) + "_result rc=-1 msg=not_known_to_dscomm\n";
}

std::string PmiSession::get(std::string_view key) const {
  if (key == "PMI_process_mapping")
    return "cmd=get_result rc=0 msg=success value=" + node_map_ + "\n";
  for (const Values* values : {&put_, &known_})
    if (auto found = values->find(key); found != values->end())
      return "cmd=get_result rc=0 msg=success value=" + found->second + "\n";
  return "cmd=get_result rc=-1 msg=key_not_found value=unknown\n";
}

std::string PmiSession::take_values() {
  Packer packer;
  packer.number(put_.size());
  for (const auto& [key, value] : put_) packer.text(key).text(value);
  known_.merge(put_);
  put_.clear();
  return packer.take();
}

bool PmiSession::add_values(const std::vector<std::string>& said) {
  for (const std::string& text : said) {
    Unpacker unpacker(text);
    for (uint64_t left = unpacker.count(); left > 0; --left) {
      std::string key = unpacker.text();
      known_[std::move(key)] = unpacker.text();
    }
    if (!unpacker.whole()) return false;
  }
  return true;
}

std::string PmiSession::leave_barrier() {
  is_in_barrier_ = false;
  return "cmd=barrier_out rc=0\n";
}

std::string node_map_of(const std::vector<size_t>& hosts) {
  std::string map = "(vector";
  for (size_t begin = 0, end; begin < hosts.size(); begin = end) {
    end = begin + 1;
    while (end < hosts.size() && hosts[end] == hosts[begin]) ++end;
    map += ",(" + std::to_string(hosts[begin]) + ",1," + std::to_string(end - begin) + ")";
  }
  return map + ")";
}

}  // namespace dscomm
