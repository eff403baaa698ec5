// Ranks that are processes, and the store through which they meet.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/store/store.h"

namespace dscomm::test {

// A store for processes: one file per key.
class FolderStore final : public Store {
 public:
  FolderStore() {
    std::string pattern = ::testing::TempDir() + "/processes_XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~FolderStore() override { std::filesystem::remove_all(folder_); }

  Status set(const std::string& key, std::string_view value) override {
    const std::string file = file_of(key), draft = file + "." + std::to_string(getpid());
    std::ofstream(draft, std::ios::binary) << value;
    std::filesystem::rename(draft, file);
    return {};
  }
  Result<std::string> get(const std::string& key, const Deadline& deadline) override {
    while (!has(key).value()) {
      if (deadline.expired()) return Status(Code::kTimeout, "no key " + key);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::ostringstream text;
    text << std::ifstream(file_of(key), std::ios::binary).rdbuf();
    return text.str();
  }
  Result<bool> has(const std::string& key) override {
    return std::filesystem::exists(file_of(key));
  }
  Result<int64_t> add(const std::string&, int64_t) override {
    return Status(Code::kUnsupported, "no counters here");
  }
  Status remove(const std::string& key) override {
    std::filesystem::remove(file_of(key));
    return {};
  }

 private:
  std::string file_of(std::string key) const {
    std::replace(key.begin(), key.end(), '/', '_');
    return folder_ + "/" + key;
  }
  std::string folder_;
};

// Members are processes, forked before this process has any thread.
class Processes {
 public:
  ~Processes() {
    for (size_t i = 0; i < ids_.size(); ++i)
      if (ids_[i] > 0) {
        signal(static_cast<int>(i), SIGKILL);
        end_of(static_cast<int>(i));
      }
  }
  void start(int count, const std::function<void(Store&, int)>& body) {
    fflush(nullptr);
    for (int i = 0; i < count; ++i) {
      pid_t id = fork();
      ASSERT_GE(id, 0);
      if (id == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        body(store_, i);
        fflush(nullptr);
        _exit(::testing::Test::HasFailure() ? 1 : 0);
      }
      ids_.push_back(id);
    }
  }
  void signal(int i, int number) { kill(ids_[static_cast<size_t>(i)], number); }
  // Returns when it has stopped.
  void stop(int i) {
    int status = 0;
    signal(i, SIGSTOP);
    EXPECT_EQ(waitpid(ids_[static_cast<size_t>(i)], &status, WUNTRACED),
              ids_[static_cast<size_t>(i)]);
    EXPECT_TRUE(WIFSTOPPED(status));
  }
  // Its wait status.
  int end_of(int i) {
    int status = -1;
    waitpid(std::exchange(ids_[static_cast<size_t>(i)], -1), &status, 0);
    return status;
  }
  void expect_good_end(int i) { EXPECT_EQ(end_of(i), 0) << "process " << i; }

  // Blocks until process i has reported `what`.
  void await(const std::string& what, int i) {
    EXPECT_TRUE(
        store_.get(what + std::to_string(i), Deadline::after(std::chrono::seconds(60))).ok())
        << what << i;
  }
  void say(const std::string& what) { EXPECT_TRUE(store_.set(what, "").ok()); }
  FolderStore& store() { return store_; }

 private:
  FolderStore store_;
  std::vector<pid_t> ids_;
};

}  // namespace dscomm::test
