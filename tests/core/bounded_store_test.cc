// BoundedStore over a store in memory, and over one that does not answer.
#include "core/store/bounded_store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "in_process.h"

namespace dscomm::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Answers nothing while it is stopped, like a store whose process is stopped.
class StoppableStore final : public Store {
 public:
  ~StoppableStore() override { *is_gone_ = true; }
  Status set(const std::string& key, std::string_view value) override {
    answer();
    return store_.set(key, value);
  }
  Result<std::string> get(const std::string& key, const Deadline& deadline) override {
    answer();
    return store_.get(key, deadline);
  }
  Result<bool> has(const std::string& key) override {
    answer();
    return store_.has(key);
  }
  Result<int64_t> add(const std::string& key, int64_t amount) override {
    answer();
    return store_.add(key, amount);
  }
  Status remove(const std::string& key) override {
    answer();
    return store_.remove(key);
  }

  std::atomic<bool> is_stopped{false};
  std::shared_ptr<std::atomic<bool>> is_gone_ = std::make_shared<std::atomic<bool>>(false);

 private:
  void answer() const {
    while (is_stopped) std::this_thread::sleep_for(milliseconds(1));
  }
  MemoryStore store_;
};

TEST(BoundedStore, CallsAreForwarded) {
  BoundedStore store(std::make_shared<MemoryStore>(), Deadline::after(seconds(60)));
  EXPECT_FALSE(store.has("key").value());
  EXPECT_TRUE(store.set("key", std::string("a\0b", 3)).ok());
  EXPECT_TRUE(store.has("key").value());
  EXPECT_EQ(store.get("key", Deadline::after(seconds(1))).value(), std::string("a\0b", 3));
  EXPECT_EQ(store.add("count", 2).value(), 2);
  EXPECT_EQ(store.add("count", 3).value(), 5);
  EXPECT_EQ(store.get("none", Deadline::after(milliseconds(5))).status().code(), Code::kTimeout);
}

TEST(BoundedStore, BlockedGetDoesNotBlockOtherCalls) {
  BoundedStore store(std::make_shared<MemoryStore>(), Deadline::after(seconds(60)));
  std::thread waiting(
      [&] { EXPECT_EQ(store.get("late", Deadline::after(seconds(60))).value(), "there"); });
  EXPECT_FALSE(store.has("other").value());
  EXPECT_TRUE(store.set("late", "there").ok());
  waiting.join();
}

TEST(BoundedStore, CallsToStoppedStoreTimeOut) {
  auto behind = std::make_shared<StoppableStore>();
  behind->is_stopped = true;
  std::atomic<bool>& is_stopped = behind->is_stopped;
  const auto is_gone = behind->is_gone_;
  const int64_t began_ns = monotonic_ns();
  {
    BoundedStore store(std::move(behind), Deadline::after(milliseconds(200)));
    const Status first = store.set("key", "value");
    EXPECT_GE(monotonic_ns() - began_ns, 1'200'000'000);
    EXPECT_EQ(first.code(), Code::kResource);
    EXPECT_NE(first.message().find("timed out after 200 ms: the store through which ranks meet "
                                   "did not answer (set key 'key')"),
              std::string::npos)
        << first.message();
    EXPECT_EQ(store.has("key").status().message(), first.message());
    EXPECT_EQ(store.add("count", 1).status().message(), first.message());
    EXPECT_EQ(store.get("key", Deadline::after(seconds(60))).status().message(), first.message());
  }
  // The abandoned call keeps what it uses until it returns.
  EXPECT_FALSE(*is_gone);
  is_stopped = false;
  const Deadline soon = Deadline::after(seconds(60));
  while (!*is_gone && !soon.expired()) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_TRUE(*is_gone);
}

TEST(BoundedStore, GetTimeoutAfterStoreDeadlineLeavesStoreUsable) {
  BoundedStore store(std::make_shared<MemoryStore>(), Deadline::after(milliseconds(1)));
  const Status late = store.get("none", Deadline::after(milliseconds(1500))).status();
  EXPECT_EQ(late.code(), Code::kTimeout) << late.message();
  EXPECT_TRUE(store.set("key", "value").ok());  // one timeout does not mark the store as lost
}

TEST(BoundedStore, SetAfterStoreDeadlineSucceeds) {
  auto behind = std::make_shared<MemoryStore>();
  BoundedStore store(behind, Deadline::after(milliseconds(1)));
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_TRUE(store.set("failed", "why").ok());
  EXPECT_TRUE(behind->has("failed").value());
}

}  // namespace
}  // namespace dscomm::test
