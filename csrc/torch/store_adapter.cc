#include "torch/store_adapter.h"

#include <algorithm>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "core/base/format.h"
#include "core/base/settings.h"

namespace dscomm {
namespace {

// Each poll is a request to the store's server, so the pauses grow; ranks that start together still
// find each other's keys within the first few polls.
constexpr std::chrono::milliseconds kFirstPause{1};
constexpr std::chrono::milliseconds kLongestPause{50};

using Bytes = std::vector<uint8_t>;

Bytes to_bytes(std::string_view text) { return Bytes(text.begin(), text.end()); }
std::string to_text(const Bytes& bytes) { return std::string(bytes.begin(), bytes.end()); }

std::string describe_keeper(const c10::intrusive_ptr<c10d::Store>& store) {
  const c10::intrusive_ptr<c10d::Store> root = root_of(store);
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(root.get());
  if (tcp == nullptr) return "";
  return format_text(", which {} keeps at {}:{}{}",
                     launcher_keeps_store() ? "the launcher" : "the job's rank 0", tcp->getHost(),
                     tcp->getPort(),
                     launcher_keeps_store() ? "," : " unless the program made another,");
}

}  // namespace

c10::intrusive_ptr<c10d::Store> root_of(c10::intrusive_ptr<c10d::Store> store) {
  while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get()))
    store = prefixed->getUnderlyingStore();
  return store;
}

StoreAdapter::StoreAdapter(c10::intrusive_ptr<c10d::Store> store)
    : store_(std::move(store)), keeper_text_(describe_keeper(store_)) {}

Status StoreAdapter::failed(const char* what, const std::string& key,
                            const std::exception& error) const {
  // Leaves out the C++ backtrace with which what() of c10's errors ends.
  std::string reason = error.what();
  if (const auto* c10_error = dynamic_cast<const c10::Error*>(&error))
    reason = c10_error->what_without_backtrace();
  return make_status(Code::kResource,
                     "the store through which ranks meet{} failed to {} key '{}': {}; see whether "
                     "the process (or the file) that keeps it is gone, and why",
                     keeper_text_, what, key, reason);
}

template <typename Call>
auto StoreAdapter::attempt(const char* what, const std::string& key, Call call)
    -> decltype(call()) {
  try {
    return call();
  } catch (const std::exception& error) {
    return failed(what, key, error);
  }
}

Status StoreAdapter::set(const std::string& key, std::string_view value) {
  return attempt("set", key, [&] {
    store_->set(key, to_bytes(value));
    return Status();
  });
}

// c10d's get() and wait() apply the store's own timeout, and some stores (FileStore) poll too.
// Polling check() keeps our deadline, and frees a TCPStore between polls for other threads.
Result<std::string> StoreAdapter::get(const std::string& key, const Deadline& deadline) {
  return attempt("get", key, [&]() -> Result<std::string> {
    for (auto pause = kFirstPause; !store_->check({key});
         pause = std::min(pause * 2, kLongestPause)) {
      int64_t remaining_ns = deadline.remaining_ns();
      if (remaining_ns <= 0)
        return make_status(Code::kTimeout, "timed out after {} waiting for key '{}' in the store",
                           deadline.timeout_text(), key);
      deadline.nap(
          std::min<std::chrono::nanoseconds>(pause, std::chrono::nanoseconds(remaining_ns)));
    }
    return to_text(store_->get(key));
  });
}

Result<bool> StoreAdapter::has(const std::string& key) {
  return attempt("look for", key, [&] { return Result<bool>(store_->check({key})); });
}

// c10d's get() blocks if the key is removed after check(). compareSet() does not. It expects `none`
// here, the value of no key, so it sets nothing: it returns the key's value, or `none` without one.
Result<std::optional<std::string>> StoreAdapter::find(const std::string& key) {
  static const Bytes none = to_bytes("dscomm: no such key");
  using Found = std::optional<std::string>;
  return attempt("look for", key, [&]() -> Result<Found> {
    if (has_compare_set_.load(std::memory_order_relaxed)) {  // relaxed: guards no data
      try {
        const Bytes value = store_->compareSet(key, none, none);
        return value == none ? Found() : Found(to_text(value));
      } catch (const std::exception&) {
        // A store written in Python may lack compareSet(). If the store is lost, check() below
        // fails, too.
      }
    }
    if (!store_->check({key})) return Found();
    has_compare_set_.store(false, std::memory_order_relaxed);
    return Found(to_text(store_->get(key)));
  });
}

Result<bool> StoreAdapter::has_all(const std::vector<std::string>& keys) {
  try {
    return store_->check(keys);
  } catch (const std::exception& error) {
    return failed("look for", keys.front(), error);
  }
}

#if DSCOMM_TORCH_2

// Only for more keys, multiGet() and multiSet() are used: multiGet() blocks if a key is removed.
constexpr size_t kFewKeys = 32;

Result<std::optional<std::vector<std::string>>> StoreAdapter::find_all(
    const std::vector<std::string>& keys) {
  if (keys.size() <= kFewKeys || !store_->hasExtendedApi()) return Store::find_all(keys);
  using Found = std::optional<std::vector<std::string>>;
  return attempt("look for", keys.front(), [&]() -> Result<Found> {
    if (!store_->check(keys)) return Found();
    std::vector<std::string> texts;
    for (const Bytes& value : store_->multiGet(keys)) texts.push_back(to_text(value));
    return Found(std::move(texts));
  });
}

Status StoreAdapter::set_all(const KeysAndValues& values) {
  if (values.size() <= kFewKeys || !store_->hasExtendedApi()) return Store::set_all(values);
  std::vector<std::string> keys;
  std::vector<Bytes> bytes;
  for (const auto& [key, value] : values) {
    keys.push_back(key);
    bytes.push_back(to_bytes(value));
  }
  return attempt("set", keys.front(), [&] {
    store_->multiSet(keys, bytes);
    return Status();
  });
}

#endif

Result<int64_t> StoreAdapter::add(const std::string& key, int64_t amount) {
  return attempt("add to", key, [&] { return Result<int64_t>(store_->add(key, amount)); });
}

Status StoreAdapter::remove(const std::string& key) {
  return attempt("remove", key, [&] {
    store_->deleteKey(key);
    return Status();
  });
}

}  // namespace dscomm
