// Ping-pong between two processes through the engine alone, without torch: how long a message takes
// there and back.
//
//   one_host_ping_pong [--rounds N] [--pool] [--asynchronous] [--cores A,B] [--folder F] BYTES...
//
// For each size it prints the bytes, the minimum and the median of the round trips in us, and
// whether all that came back was right. --pool takes the buffers from the pool of tensors that
// peers read in place; --asynchronous makes send() and receive() and waits for them, instead of
// blocking_send() and blocking_receive().
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/group.h"

namespace {

using namespace std::chrono_literals;

// A key is a file, which appears whole.
class FolderStore final : public dscomm::Store {
 public:
  explicit FolderStore(std::string folder) : folder_(std::move(folder)) {}

  dscomm::Status set(const std::string& key, std::string_view value) override {
    const std::string part = path(key) + "." + std::to_string(getpid());
    std::ofstream(part, std::ios::binary) << value;
    if (std::rename(part.c_str(), path(key).c_str()) == 0) return {};
    return {dscomm::Code::kResource, "cannot write " + path(key)};
  }
  dscomm::Result<std::string> get(const std::string& key,
                                  const dscomm::Deadline& deadline) override {
    while (!deadline.expired()) {
      std::ifstream file(path(key), std::ios::binary);
      if (file) return std::string(std::istreambuf_iterator<char>(file), {});
      std::this_thread::sleep_for(1ms);
    }
    return dscomm::Status(dscomm::Code::kTimeout, "no key " + key);
  }
  dscomm::Result<bool> has(const std::string& key) override {
    return ::access(path(key).c_str(), F_OK) == 0;
  }
  // Every key is counted once by each rank, in a group that is formed once.
  dscomm::Result<int64_t> add(const std::string&, int64_t amount) override { return amount; }

 private:
  std::string path(std::string key) const {
    std::replace(key.begin(), key.end(), '/', '+');
    return folder_ + "/" + key;
  }
  std::string folder_;
};

[[noreturn]] void fail(const std::string& message) {
  std::fprintf(stderr, "one_host_ping_pong: %s\n", message.c_str());
  std::exit(1);
}

void require(const dscomm::Status& status) {
  if (!status.ok()) fail(status.message());
}

struct Options {
  int rounds = 2000;
  bool pool = false, asynchronous = false;
  int cores[2] = {-1, -1};
  std::string folder;
  std::vector<size_t> sizes;
};

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    const auto value = [&] {
      if (++i == count) fail(argument + " wants a value");
      return std::string(arguments[i]);
    };
    if (argument == "--rounds")
      options.rounds = std::atoi(value().c_str());
    else if (argument == "--pool")
      options.pool = true;
    else if (argument == "--asynchronous")
      options.asynchronous = true;
    else if (argument == "--cores")
      std::sscanf(value().c_str(), "%d,%d", &options.cores[0], &options.cores[1]);
    else if (argument == "--folder")
      options.folder = value();
    else
      options.sizes.push_back(std::strtoull(argument.c_str(), nullptr, 10));
  }
  if (options.sizes.empty() || options.rounds < 1) fail("no sizes, or no rounds");
  return options;
}

class Rank {
 public:
  Rank(const Options& options, int rank) : options_(options), rank_(rank) {
    if (options.cores[rank] >= 0) {
      cpu_set_t cores;
      CPU_ZERO(&cores);
      CPU_SET(static_cast<size_t>(options.cores[rank]), &cores);
      if (sched_setaffinity(0, sizeof cores, &cores) != 0) fail("cannot bind to that core");
    }
    auto context = dscomm::Context::process();
    require(context.status());
    context_ = context.value();
    dscomm::GroupOptions of_group;
    of_group.name = "0";
    of_group.rank = rank;
    of_group.size = 2;
    of_group.timeout = 60s;
    auto made =
        dscomm::Group::create(context_, std::make_shared<FolderStore>(options.folder), of_group);
    require(made.status());
    group_ = made.value();
  }
  ~Rank() { group_->shutdown_with_warning(); }

  void measure(size_t bytes) {
    std::vector<std::byte> own_out(options_.pool ? 0 : bytes), own_in(own_out.size());
    std::byte *out = own_out.data(), *in = own_in.data();
    if (options_.pool) {
      if (context_->pool() == nullptr) fail("there is no pool on this machine");
      for (std::byte** buffer : {&out, &in}) {
        auto block = context_->pool()->allocate(std::max<size_t>(bytes, 1));
        require(block.status());
        *buffer = block.value();
      }
    }
    std::vector<double> us;
    bool right = true;
    const int warm_ups = options_.rounds / 10 + 1;
    for (int round = -warm_ups; round < options_.rounds; ++round) {
      if (bytes > 0) out[0] = out[bytes - 1] = std::byte(round & 127);
      const int64_t began = dscomm::monotonic_ns();
      if (rank_ == 0) {
        send(out, bytes);
        receive(in, bytes);
      } else {
        receive(in, bytes);
        send(in, bytes);
      }
      if (round >= 0) us.push_back(static_cast<double>(dscomm::monotonic_ns() - began) / 1000);
      right &= bytes == 0 || (in[0] == std::byte(round & 127) && in[bytes - 1] == in[0]);
    }
    if (options_.pool)
      for (std::byte* buffer : {out, in}) context_->pool()->release(buffer);
    if (!right) fail("what came back was wrong");
    if (rank_ != 0) return;
    std::sort(us.begin(), us.end());
    std::printf("%10zu bytes  min %10.2f us  median %10.2f us\n", bytes, us.front(),
                us[us.size() / 2]);
    std::fflush(stdout);
  }

 private:
  void send(const std::byte* data, size_t bytes) {
#ifndef ONLY_ASYNCHRONOUS
    if (!options_.asynchronous)
      return require(group_->blocking_send(data, bytes, dscomm::DType::kUInt8, 1 - rank_, 0, 0ms));
#endif
    require(group_->send(data, bytes, dscomm::DType::kUInt8, 1 - rank_, 0, nullptr, 0ms)->wait());
  }
  void receive(std::byte* data, size_t bytes) {
#ifndef ONLY_ASYNCHRONOUS
    if (!options_.asynchronous)
      return require(
          group_->blocking_receive(data, bytes, dscomm::DType::kUInt8, 1 - rank_, 0, 0ms));
#endif
    require(
        group_->receive(data, bytes, dscomm::DType::kUInt8, 1 - rank_, 0, nullptr, 0ms)->wait());
  }

  const Options& options_;
  const int rank_;
  std::shared_ptr<dscomm::Context> context_;
  std::shared_ptr<dscomm::Group> group_;
};

}  // namespace

int main(int count, char** arguments) {
  Options options = parse(count, arguments);
  char made[] = "/tmp/ping_pong.XXXXXX";
  const bool own_folder = options.folder.empty();
  if (own_folder) {
    if (mkdtemp(made) == nullptr) fail("cannot make a folder to meet in");
    options.folder = made;
  }
  const pid_t child = fork();
  if (child < 0) fail("cannot fork");
  {
    Rank rank(options, child == 0 ? 1 : 0);
    for (size_t bytes : options.sizes) rank.measure(bytes);
  }
  if (child == 0) return 0;
  int state = 0;
  waitpid(child, &state, 0);
  if (own_folder) {
    const std::string remove = "rm -rf '" + options.folder + "'";
    if (std::system(remove.c_str()) != 0) fail("cannot remove " + options.folder);
  }
  return state == 0 ? 0 : 1;
}
