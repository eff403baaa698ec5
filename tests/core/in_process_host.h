// A host in one process: each Context stands for a process, and groups form among ranks of any of
// them through one store.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/engine/context.h"
#include "core/engine/group.h"
#include "shm_ranks.h"

namespace dscomm::test {

// Like torch: each group gets a new prefix each time it is made.
class PrefixedStore final : public Store {
 public:
  PrefixedStore(Store& store, std::string prefix) : store_(store), prefix_(std::move(prefix)) {}
  Status set(const std::string& key, std::string_view value) override {
    return store_.set(prefix_ + key, value);
  }
  Result<std::string> get(const std::string& key, const Deadline& deadline) override {
    const int64_t began_ns = monotonic_ns();
    const int64_t asked_ns = std::max<int64_t>(deadline.remaining_ns(), 0);
    Result<std::string> value = store_.get(prefix_ + key, deadline);
    deadline.note_slice(began_ns, asked_ns);
    return value;
  }
  Result<bool> has(const std::string& key) override { return store_.has(prefix_ + key); }
  Result<std::optional<std::string>> find(const std::string& key) override {
    return store_.find(prefix_ + key);  // the default would wait if the key is removed meanwhile
  }
  Result<int64_t> add(const std::string& key, int64_t amount) override {
    return store_.add(prefix_ + key, amount);
  }
  Status remove(const std::string& key) override { return store_.remove(prefix_ + key); }

 private:
  Store& store_;
  std::string prefix_;
};

// Outlives its processes and groups. Any thread may call it.
class InProcessHost {
 public:
  using ContextPtr = std::shared_ptr<Context>;
  using GroupResult = Result<std::shared_ptr<Group>>;
  using Milliseconds = std::chrono::milliseconds;

  // `host`: the host that it pretends to be on; see Context::create().
  Result<ContextPtr> try_process(const Settings& settings,
                                 TransportFactory make_transport = load_transport,
                                 const std::string& host = "") {
    auto directory = std::make_unique<InProcessDirectory>(registry_);
    InProcessDirectory* life = directory.get();
    Result<ContextPtr> made =
        Context::create(settings, std::move(directory), std::move(make_transport), host);
    std::lock_guard lock(mutex_);
    if (made.ok()) lives_[made.value().get()] = life;
    return made;
  }
  ContextPtr process(const Settings& settings = small_settings()) {
    return try_process(settings).value();
  }
  // Simulates a process that ends without closing its groups.
  void die(const ContextPtr& process) {
    std::lock_guard lock(mutex_);
    lives_.at(process.get())->die();
  }

  // One rank's group. Groups of the same name and ranks must have different prefixes.
  GroupResult try_group(const ContextPtr& process, GroupOptions options,
                        const std::string& prefix = "") {
    auto store = std::make_shared<PrefixedStore>(store_, prefix.empty() ? options.name : prefix);
    return Group::create(process, store, std::move(options));
  }
  std::shared_ptr<Group> group(const ContextPtr& process, int rank, int size,
                               const std::string& name = "world", Milliseconds timeout = kLong) {
    GroupResult made = try_group(process, options(rank, size, name, timeout));
    EXPECT_TRUE(made.ok()) << made.status().message();
    return std::move(made).value();
  }
  void decline(int rank, int size, const std::string& name, const Status& cause) {
    PrefixedStore store(store_, name);
    Group::decline(store, options(rank, size, name, kLong), cause);
  }
  // The groups of all ranks, rank k in processes[k]; returns when all have formed.
  std::vector<std::shared_ptr<Group>> groups(const std::vector<ContextPtr>& processes,
                                             const std::string& name,
                                             Milliseconds timeout = kLong) {
    std::vector<std::shared_ptr<Group>> made(processes.size());
    const int size = static_cast<int>(processes.size());
    run_ranks(size, [&](int rank) {
      const auto k = static_cast<size_t>(rank);
      made[k] = group(processes[k], rank, size, name, timeout);
    });
    return made;
  }

  static GroupOptions options(int rank, int size, const std::string& name, Milliseconds timeout) {
    GroupOptions options;
    options.name = name;
    options.rank = rank;
    options.size = size;
    options.timeout = timeout;
    return options;
  }

 private:
  static constexpr Milliseconds kLong{60'000};

  std::mutex mutex_;
  std::map<const Context*, InProcessDirectory*> lives_;
  std::shared_ptr<Registry> registry_ = std::make_shared<Registry>();
  MemoryStore store_;
};

}  // namespace dscomm::test
