// One rank of dscomm's engine, without torch: calls Group::run(), or Group::blocking_send() and
// blocking_receive(), on the caller's thread.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "all_reduce.h"
#include "core/engine/context.h"
#include "core/engine/group.h"
#include "ping_pong.h"

namespace {

using namespace std::chrono_literals;

// A key is a file, which appears whole, beside the file through which the ranks meet.
class FolderStore final : public dscomm::Store {
 public:
  explicit FolderStore(std::string prefix) : prefix_(std::move(prefix)) {}

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
  dscomm::Result<int64_t> add(const std::string& key, int64_t amount) override {
    int file = ::open((path(key) + ".counter").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    int64_t value = 0;
    // Ranks hold the lock only for this function, and the kernel releases a dead rank's lock.
    bool done =
        file >= 0 && ::flock(file, LOCK_EX) == 0 && ::pread(file, &value, sizeof value, 0) >= 0;
    value += amount;
    done = done && ::pwrite(file, &value, sizeof value, 0) == sizeof value;
    if (file >= 0) ::close(file);
    if (!done) return dscomm::Status(dscomm::Code::kResource, "cannot count in " + path(key));
    return value;
  }
  dscomm::Status remove(const std::string& key) override {
    ::unlink(path(key).c_str());
    ::unlink((path(key) + ".counter").c_str());
    return {};
  }

 private:
  std::string path(std::string key) const {
    for (char& letter : key)
      if (letter == '/') letter = '+';
    return prefix_ + key;
  }
  std::string prefix_;
};

void require(const dscomm::Status& status) {
  if (!status.ok()) one_host::fail(status.message());
}

}  // namespace

int main(int count, char** arguments) {
  const one_host::Options options = one_host::parse(count, arguments);
  one_host::Meeting meeting(options);
  auto context = dscomm::Context::process();
  require(context.status());
  dscomm::GroupOptions of_group;
  of_group.name = "0";
  of_group.rank = options.rank;
  of_group.size = options.ranks;
  of_group.timeout = 60s;
  auto made = dscomm::Group::create(
      context.value(), std::make_shared<FolderStore>(options.meet + ".store."), of_group);
  require(made.status());
  dscomm::Group& group = *made.value();

  // One body for all calls, like in a program that repeats a call.
  void* data = nullptr;
  size_t values = 0;
  dscomm::Reduction reduction;
  const dscomm::Group::Body body = [&](dscomm::Team& team, const dscomm::CallOptions& call) {
    return team.all_reduce(data, data, values, reduction, call);
  };
  const auto all_reduce = [&](void* buffer, size_t n, one_host::DType dtype) {
    data = buffer;
    values = n;
    reduction.dtype =
        dtype == one_host::DType::kFloat32 ? dscomm::DType::kFloat32 : dscomm::DType::kBFloat16;
    const dscomm::OperationInfo info{
        "all_reduce", reduction.dtype, true, dscomm::ReduceOp::kSum, static_cast<int64_t>(n), -1, 0,
        false};
    require(group.run(info, body, 0ms));
  };
  const auto pool = context.value()->pool();
  const auto allocate_from_pool = [&](size_t bytes) -> std::shared_ptr<void> {
    if (pool == nullptr) one_host::fail("there is no pool on this machine");
    dscomm::Result<std::byte*> block = pool->allocate(bytes);
    require(block.status());
    return {block.value(), [&](std::byte* released) { pool->release(released); }};
  };
  const one_host::Allocate allocate =
      options.from_pool ? one_host::Allocate(allocate_from_pool) : one_host::allocate_pages;
  const one_host::Messages messages{
      [&](const void* sent, size_t bytes, int to) {
        require(group.blocking_send(sent, bytes, dscomm::DType::kUInt8, to, 0, 0ms));
      },
      [&](void* received, size_t bytes, int from) {
        require(group.blocking_receive(received, bytes, dscomm::DType::kUInt8, from, 0, 0ms));
      }};
  if (options.op == one_host::Op::kPingPong)
    one_host::measure_messages(options, meeting, messages, allocate);
  else
    one_host::measure(options, meeting, all_reduce, allocate);
  group.shutdown_with_warning();
  return 0;
}
