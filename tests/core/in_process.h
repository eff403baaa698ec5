// Ranks as threads: a store in memory, a directory that shares arenas within the process (with one
// mapping for all ranks, so that ThreadSanitizer sees their accesses), and a function that runs
// ranks.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/shm/memory/directory.h"
#include "core/shm/memory/socket_directory.h"
#include "core/store/store.h"

namespace dscomm::test {

class MemoryStore final : public Store {
 public:
  Status set(const std::string& key, std::string_view value) override {
    std::lock_guard lock(mutex_);
    values_[key] = std::string(value);
    changed_.notify_all();
    return {};
  }
  Result<std::string> get(const std::string& key, const Deadline& deadline) override {
    std::unique_lock lock(mutex_);
    bool there = changed_.wait_for(
        lock, std::chrono::nanoseconds(std::max<int64_t>(deadline.remaining_ns(), 0)),
        [&] { return values_.count(key) != 0; });
    if (!there) return Status(Code::kTimeout, "no key " + key);
    return values_[key];
  }
  Result<bool> has(const std::string& key) override {
    std::lock_guard lock(mutex_);
    return values_.count(key) != 0;
  }
  Result<std::optional<std::string>> find(const std::string& key) override {
    std::lock_guard lock(mutex_);
    auto found = values_.find(key);
    return found == values_.end() ? std::optional<std::string>() : found->second;
  }
  Result<int64_t> add(const std::string& key, int64_t amount) override {
    std::lock_guard lock(mutex_);
    return counters_[key] += amount;
  }
  Status remove(const std::string& key) override {
    std::lock_guard lock(mutex_);
    values_.erase(key);
    counters_.erase(key);
    return {};
  }
  std::vector<std::string> keys() {
    std::lock_guard lock(mutex_);
    std::vector<std::string> keys;
    for (const auto& [key, value] : values_) keys.push_back(key);
    for (const auto& [key, value] : counters_) keys.push_back(key);
    return keys;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::map<std::string, int64_t> counters_;
};

// Forwards all calls; tests override one.
class ForwardingStore : public Store {
 public:
  explicit ForwardingStore(Store& store) : store_(store) {}
  Status set(const std::string& key, std::string_view value) override {
    return store_.set(key, value);
  }
  Result<std::string> get(const std::string& key, const Deadline& deadline) override {
    return store_.get(key, deadline);
  }
  Result<bool> has(const std::string& key) override { return store_.has(key); }
  Result<int64_t> add(const std::string& key, int64_t amount) override {
    return store_.add(key, amount);
  }
  Status remove(const std::string& key) override { return store_.remove(key); }

 protected:
  Store& store_;
};

// Counts the writes and reads of one rank. (Waiting ranks also read failures.)
class RecordingStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  Status set(const std::string& key, std::string_view value) override {
    ++writes;
    return store_.set(key, value);
  }
  Result<int64_t> add(const std::string& key, int64_t amount) override {
    ++writes;
    return store_.add(key, amount);
  }
  Status remove(const std::string& key) override {
    ++writes;
    return store_.remove(key);
  }
  int writes = 0;
};

// Finds the arenas of all ranks of a test.
class Registry {
 public:
  struct Entry {
    std::shared_ptr<Arena> arena;
    std::shared_ptr<TensorPool> pool;
  };
  void add(Entry entry) {
    std::lock_guard lock(mutex_);
    const ArenaId id = entry.arena->id();
    entries_[id] = std::move(entry);
  }
  Entry find(const ArenaId& id) {
    std::lock_guard lock(mutex_);
    auto found = entries_.find(id);
    return found == entries_.end() ? Entry() : found->second;
  }

 private:
  std::mutex mutex_;
  std::map<ArenaId, Entry> entries_;
};

class InProcessDirectory final : public Directory {
 public:
  explicit InProcessDirectory(std::shared_ptr<Registry> registry)
      : registry_(std::move(registry)) {}
  ~InProcessDirectory() override { die(); }

  Result<PeerAddress> publish(std::shared_ptr<Arena> arena, std::shared_ptr<TensorPool> pool,
                              const ArenaId& doorbell) override {
    arena_ = std::move(arena);
    std::mutex mutex;
    std::condition_variable born;
    bool alive = false;
    life_ = std::thread([&, this] {
      arena_->begin_life();
      {
        std::lock_guard lock(mutex);
        alive = true;
        born.notify_one();
      }
      std::unique_lock lock(end_mutex_);
      ended_.wait(lock, [this] { return end_; });
      arena_->end_life();
    });
    std::unique_lock lock(mutex);
    born.wait(lock, [&] { return alive; });
    registry_->add({arena_, std::move(pool)});
    PeerAddress address = describe_this_process(*arena_);
    address.doorbell = doorbell;
    return address;
  }
  Attached attach(const PeerAddress& address, const Deadline&) override {
    Registry::Entry entry = registry_->find(address.arena);
    if (entry.arena == nullptr) return {nullptr, "it is not in this test"};
    if (hides_pools && entry.arena != arena_) {
      Result<Mapping> view = map_for_reading(entry.arena->fd(), entry.arena->size());
      if (!view.ok()) return {nullptr, view.status().message()};
      return {std::make_shared<Peer>(address, std::move(view).value(), UniqueFd(),
                                     Peer::PoolView{.missing = true}),
              ""};
    }
    return {std::make_shared<Peer>(address, std::move(entry.arena), std::move(entry.pool)), ""};
  }
  bool hides_pools = false;  // this rank cannot map the pools of others

  // Simulates the end of the process.
  void die() {
    {
      std::lock_guard lock(end_mutex_);
      end_ = true;
      ended_.notify_one();
    }
    if (life_.joinable()) life_.join();
  }

 private:
  std::shared_ptr<Registry> registry_;
  std::shared_ptr<Arena> arena_;
  std::thread life_;
  std::mutex end_mutex_;
  std::condition_variable ended_;
  bool end_ = false;
};

// Runs body(rank) on one thread per rank and waits for all of them.
inline void run_ranks(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back([&body, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace dscomm::test
