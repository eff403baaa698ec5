// One rank of a job that brings MPI up, for test_bring_up.py. Prints its progress, one line each.
//
//   mpi_bring_up_rank STORE RANK HOSTS [OPTION...]
//
// STORE is a folder that all ranks share. RANK is -1 if mpirun starts it. HOSTS are numbers
// separated by commas, one per rank: the host on which the rank pretends to be. Options:
//   helper=PATH      path of dscomm-pmix
//   limit_ms=N       timeout of the bring-up
//   name=TEXT        name of all hosts; by default host0, host1, ...
//   initialise=N     calls MPI_Init_thread with this level first
//   ifname=TEXT      value of DSCOMM_IFNAME
//   network=TEXT     "address/prefix" of its host; N in it is replaced by the host's number
//   late=FILE        waits for this file in STORE before the bring-up
//   stall=FILE       waits for this file in STORE before dscomm-pmix is started
//   hold=FILE        repeats all-reduces until this file is in STORE
//   children=yes     checks the environment of a child process
//   finalise=yes     calls MPI_Finalize itself
//   abort=RANK       this rank calls MPI_Abort(9)
//   fork=yes         a forked child outlives the rank for two seconds
//   twice=yes        brings MPI up a second time
#include <fcntl.h>
#include <mpi.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "code_name.h"
#include "core/base/log.h"
#include "mpi/bring_up.h"

namespace dscomm {
namespace {

using namespace std::chrono_literals;

void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
void say(const char* format, ...) {
  char line[4096];
  va_list arguments;
  va_start(arguments, format);
  int length = std::vsnprintf(line, sizeof line - 1, format, arguments);
  va_end(arguments);
  length = std::min(length, static_cast<int>(sizeof line) - 2);
  line[length++] = '\n';
  [[maybe_unused]] ssize_t written = ::write(STDOUT_FILENO, line, static_cast<size_t>(length));
}

// A key is a file, which appears complete.
class FolderStore : public Store {
 public:
  explicit FolderStore(std::string folder) : folder_(std::move(folder)) {}

  Status set(const std::string& key, std::string_view value) override {
    std::string part = path(key) + "." + std::to_string(getpid()) + ".part";
    std::ofstream(part, std::ios::binary) << value;
    if (std::rename(part.c_str(), path(key).c_str()) == 0) return {};
    return Status(Code::kResource, "the store failed to set " + key);
  }
  Result<std::string> get(const std::string& key, const Deadline& deadline) override {
    while (!deadline.expired()) {
      std::ifstream file(path(key), std::ios::binary);
      std::ostringstream text;
      if (file && text << file.rdbuf()) return text.str();
      if (file) return std::string();  // an empty file is no failure
      std::this_thread::sleep_for(1ms);
    }
    return Status(Code::kTimeout, "no key " + key);
  }
  Result<bool> has(const std::string& key) override {
    return ::access(path(key).c_str(), F_OK) == 0;
  }
  // The rank that creates the file of a number has counted to it.
  Result<int64_t> add(const std::string& key, int64_t) override {
    for (int64_t count = 1;; ++count) {
      const int made = ::open(counted(key, count).c_str(), O_CREAT | O_EXCL | O_CLOEXEC, 0600);
      if (made < 0) continue;
      ::close(made);
      return count;
    }
  }
  Status remove(const std::string& key) override {
    ::unlink(path(key).c_str());
    for (int64_t count = 1; ::unlink(counted(key, count).c_str()) == 0;) ++count;
    return {};
  }

 private:
  std::string path(std::string key) const {
    for (char& letter : key)
      if (letter == '/') letter = '+';
    return folder_ + "/" + key;
  }
  std::string counted(const std::string& key, int64_t count) const {
    return path(key) + "." + std::to_string(count);
  }
  std::string folder_;
};

std::vector<int> numbers(const std::string& text) {
  std::vector<int> found;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) found.push_back(std::stoi(part));
  return found;
}

class Rank {
 public:
  Rank(std::string folder, int rank, std::vector<int> hosts,
       std::map<std::string, std::string> options)
      : folder_(std::move(folder)),
        store_(std::make_shared<FolderStore>(folder_)),
        hosts_(std::move(hosts)),
        options_(std::move(options)) {
    request_.id = 0x1234;
    request_.name = "test";
    request_.rank = rank;
    request_.prefix = "test/";
    request_.settings.ifname = option("ifname");
  }

  int run() {
    if (!option("initialise").empty()) {
      int level = 0;
      MPI_Init_thread(nullptr, nullptr, std::stoi(option("initialise")), &level);
    }
    if (!option("late").empty()) await_file(option("late"));
    describe_members();
    std::unique_ptr<MpiWorld> world = start();
    if (world == nullptr) return 7;
    if (option("twice") == "yes") {
      request_.prefix = "again/";
      std::unique_ptr<MpiWorld> again = start();
      if (again == nullptr) return 7;
    }
    if (option("children") == "yes") look_at_child();
    if (option("fork") == "yes" && fork() == 0) {
      world->close_descriptors();
      std::this_thread::sleep_for(2s);
      _exit(0);
    }
    int status = all_reduce(world->comm());
    if (option("abort") == std::to_string(request_.rank)) MPI_Abort(MPI_COMM_WORLD, 9);
    if (option("finalise") == "yes") say("MPI_Finalize %d", MPI_Finalize());
    world->leave(Deadline::after(5s));
    int finalised = 0;
    MPI_Finalized(&finalised);
    say("left, finalised %d", finalised);
    return status;
  }

 private:
  std::string option(const std::string& name) const {
    auto found = options_.find(name);
    return found == options_.end() ? "" : found->second;
  }

  bool has_file(const std::string& name) const {
    return ::access((folder_ + "/" + name).c_str(), F_OK) == 0;
  }
  void await_file(const std::string& name) const {
    while (!has_file(name)) std::this_thread::sleep_for(2ms);
  }

  void describe_members() {
    for (size_t rank = 0; rank < hosts_.size(); ++rank) {
      TransportMember member;
      member.id = {1, rank};
      member.host = hosts_[rank];
      member.global_rank = static_cast<int>(rank);
      member.pid = getpid();
      member.host_name =
          option("name").empty() ? "host" + std::to_string(member.host) : option("name");
      std::string network = option("network");
      if (size_t place = network.find('N'); place != std::string::npos)
        network.replace(place, 1, std::to_string(member.host + 1));
      if (!network.empty()) member.networks = {network};
      request_.members.push_back(member);
    }
  }

  std::unique_ptr<MpiWorld> start() {
    auto begin = std::chrono::steady_clock::now();
    int64_t limit_ms = option("limit_ms").empty() ? 60000 : std::stoll(option("limit_ms"));
    auto world = bring_up(request_, store_, Deadline::after(std::chrono::milliseconds(limit_ms)),
                          option("helper"), [this] { return stall(); });
    std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    if (!world.ok()) {
      say("error %s after %.2f s: %s", code_name(world.status().code()), seconds.count(),
          world.status().message().c_str());
      return nullptr;
    }
    int rank = -1, size = 0;
    MPI_Comm_rank(world.value()->comm(), &rank);
    MPI_Comm_size(world.value()->comm(), &size);
    say("up after %.2f s: %s, rank %d of %d, world ranks%s", seconds.count(),
        world.value()->started_by(), rank, size, world_ranks(world.value()->comm(), size).c_str());
    return std::move(world).value();
  }

  // " 0 1 3": the members' ranks in MPI_COMM_WORLD.
  static std::string world_ranks(MPI_Comm comm, int size) {
    MPI_Group members, all;
    MPI_Comm_group(comm, &members);
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    std::string ranks;
    for (int member = 0; member < size; ++member) {
      int rank = MPI_UNDEFINED;
      MPI_Group_translate_ranks(members, 1, &member, all, &rank);
      ranks += " " + std::to_string(rank);
    }
    MPI_Group_free(&members);
    MPI_Group_free(&all);
    return ranks;
  }

  // Called during waits.
  Status stall() const {
    if (!option("stall").empty() && has_file("test+mpi+plan+decided")) await_file(option("stall"));
    return {};
  }

  static void look_at_child() {
    std::FILE* child = popen("env", "r");
    char line[4096];
    std::string found;
    while (std::fgets(line, sizeof line, child) != nullptr) {
      std::string text(line);
      for (const char* prefix : {"PMIX_", "OMPI_", "JSM_", "OPAL_"})
        if (text.starts_with(prefix)) found += " " + text.substr(0, text.find('='));
    }
    pclose(child);
    say("child sees:%s", found.c_str());
  }

  // One all-reduce, and more of them while `hold` is set. 9 if one does not end.
  int all_reduce(MPI_Comm comm) {
    int rank = 0, size = 0;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    for (int round = 0; round == 0 || !option("hold").empty(); ++round) {
      // All ranks must leave the loop in the same round, so rank 0 decides.
      std::vector<int> in(1000, rank + round), out(1000, 0);
      in[999] = rank == 0 && !option("hold").empty() && has_file(option("hold"));
      MPI_Request request;
      MPI_Iallreduce(in.data(), out.data(), 1000, MPI_INT, MPI_SUM, comm, &request);
      auto end = std::chrono::steady_clock::now() + 5s;
      for (int done = 0; done == 0;) {
        MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (done == 0 && std::chrono::steady_clock::now() > end) {
          say("no all-reduce in 5 s");
          return 9;
        }
        if (done == 0) std::this_thread::yield();
      }
      int expected = size * (size - 1) / 2 + round * size;
      if (out[0] != expected || out[998] != expected) {
        say("wrong sum %d", out[0]);
        return 8;
      }
      if (round == 0) say("sum right");
      if (out[999] != 0) break;
    }
    return 0;
  }

  std::string folder_;
  std::shared_ptr<FolderStore> store_;
  std::vector<int> hosts_;
  std::map<std::string, std::string> options_;
  TransportRequest request_;
};

}  // namespace
}  // namespace dscomm

int main(int count, char** arguments) {
  if (count < 4) return 2;
  std::map<std::string, std::string> options;
  for (int i = 4; i < count; ++i) {
    std::string text = arguments[i];
    options[text.substr(0, text.find('='))] = text.substr(text.find('=') + 1);
  }
  int rank = std::atoi(arguments[2]);
  if (rank < 0) rank = std::atoi(std::getenv("OMPI_COMM_WORLD_RANK"));
  dscomm::set_log_rank(rank);
  if (std::getenv("LOG_LEVEL") != nullptr) dscomm::set_log_level(std::getenv("LOG_LEVEL"));
  return dscomm::Rank(arguments[1], rank, dscomm::numbers(arguments[3]), options).run();
}
