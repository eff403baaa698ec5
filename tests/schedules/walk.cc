// Walks through schedules: makes a program for each seed, runs it in a new world, and prints
// failing seeds.
//
//   walk [--schedules N] [--seconds S] [--seed FIRST] [--jobs J] [--stop] [--shrink]
//   walk --replay SEED [--shrink]: runs one program, prints it and its result
//   walk --replay SEED --without 3,7 --schedule N: the same without some steps, as printed by
//     --shrink
//   walk --here SEED: runs in this process, for a debugger
//
// --seconds alone limits the time. With --schedules too, it fails if fewer were run by then.
#include <malloc.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "program.h"

using namespace dscomm::schedule;

namespace {

constexpr uint64_t kBatch = 64;  // programs per child process, which frees the memory of killed
                                 // ranks
constexpr uint64_t kTriesToShrink = 40;
constexpr unsigned kMostSeconds = 300;  // limit of one program, which normally takes milliseconds

struct Arguments {
  uint64_t schedules = 0, seed = 1;
  std::optional<uint64_t> schedule;  // for --replay; by default the seed
  std::vector<size_t> without;       // steps of --replay's program to leave out
  double seconds = 0;                // 0: no limit
  int jobs = 2;
  bool replays = false, here = false, shrinks = false, stops = false;
};

constexpr uint64_t kUsualSchedules = 5'000;

std::vector<size_t> parse_numbers(const char* text) {
  std::vector<size_t> numbers;
  for (const char* at = text; *at != '\0';) {
    char* end = nullptr;
    numbers.push_back(std::strtoull(at, &end, 10));
    if (end == at || (*end != ',' && *end != '\0')) {
      std::fprintf(stderr, "walk: --without takes numbers with commas between them\n");
      std::exit(2);
    }
    at = *end == ',' ? end + 1 : end;
  }
  return numbers;
}

Arguments parse(int count, char** words) {
  Arguments arguments;
  for (int k = 1; k < count; ++k) {
    const std::string word = words[k];
    const char* value = k + 1 < count ? words[k + 1] : nullptr;
    if (word == "--shrink" || word == "--stop") {
      (word == "--stop" ? arguments.stops : arguments.shrinks) = true;
      continue;
    }
    if (value == nullptr) {
      std::fprintf(stderr, "walk: %s needs a value\n", word.c_str());
      std::exit(2);
    }
    ++k;
    if (word == "--schedules")
      arguments.schedules = std::strtoull(value, nullptr, 10);
    else if (word == "--seed")
      arguments.seed = std::strtoull(value, nullptr, 10);
    else if (word == "--seconds")
      arguments.seconds = std::strtod(value, nullptr);
    else if (word == "--schedule")
      arguments.schedule = std::strtoull(value, nullptr, 10);
    else if (word == "--without")
      arguments.without = parse_numbers(value);
    else if (word == "--jobs")
      arguments.jobs = std::atoi(value);
    else if (word == "--replay")
      arguments.seed = std::strtoull(value, nullptr, 10), arguments.replays = true;
    else if (word == "--here")
      arguments.seed = std::strtoull(value, nullptr, 10), arguments.here = true;
    else {
      std::fprintf(stderr, "walk: unknown option %s; see the head of walk.cc\n", word.c_str());
      std::exit(2);
    }
  }
  if (!arguments.replays && (arguments.schedule || !arguments.without.empty())) {
    std::fprintf(stderr, "walk: --schedule and --without go with --replay\n");
    std::exit(2);
  }
  if (arguments.schedules == 0 && arguments.seconds <= 0) arguments.schedules = kUsualSchedules;
  return arguments;
}

// The program of a seed, and the steps that are kept.
struct Part {
  Program program;
  std::vector<size_t> kept;

  Part(uint64_t seed, const std::vector<size_t>& without) : program(Program::make(seed)) {
    for (size_t k = 0; k < program.steps.size(); ++k) kept.push_back(k);
    for (size_t k = kept.size(); k-- > 0;)
      if (std::find(without.begin(), without.end(), k) != without.end()) erase(k);
  }
  void erase(size_t k) {
    program.steps.erase(program.steps.begin() + static_cast<ptrdiff_t>(k));
    kept.erase(kept.begin() + static_cast<ptrdiff_t>(k));
  }
  // The argument of --without.
  std::string erased() const {
    std::string text;
    for (size_t k = 0, next = 0; k < Program::make(program.seed).steps.size(); ++k) {
      if (next < kept.size() && kept[next] == k)
        ++next;
      else
        text += (text.empty() ? "" : ",") + std::to_string(k);
    }
    return text;
  }
};

// The kind of a failure: its text without numbers.
std::string kind_of(const std::string& failure) {
  std::string kind;
  for (char letter : failure.substr(0, failure.find('\n')))
    if (letter < '0' || letter > '9') kind += letter;
  return kind.substr(0, 60);
}

// Runs in a child process, so that a crash or killed ranks leave nothing here. "" on success.
std::string run_apart(const Program& program, uint64_t schedule_seed) {
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    const Verdict verdict = run_program(program, schedule_seed);
    const ssize_t written = write(ends[1], verdict.failure.data(), verdict.failure.size());
    _exit(written == static_cast<ssize_t>(verdict.failure.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::string failure;
  char buffer[4096];
  for (ssize_t got; (got = read(ends[0], buffer, sizeof buffer)) > 0;)
    failure.append(buffer, static_cast<size_t>(got));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status))
    failure = std::string("the process was ended by ") + strsignal(WTERMSIG(status));
  return failure;
}

// Finds a program with fewer steps that fails in the same way, under one of several schedules.
void shrink(Part part, uint64_t schedule, std::string failure) {
  const std::string kind = kind_of(failure);
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (size_t k = part.program.steps.size(); k-- > 0;) {
      Part less = part;
      less.erase(k);
      for (uint64_t trial = 0; !less.kept.empty() && trial < kTriesToShrink; ++trial) {
        const uint64_t tried = trial == 0 ? schedule : part.program.seed + trial - 1;
        const std::string how = run_apart(less.program, tried);
        if (how.empty() || kind_of(how) != kind) continue;
        schedule = tried;
        failure = how;
        part = less;
        smaller = true;
        break;
      }
    }
  }
  std::printf("shrunk: %s\n%s\nreplay: --replay %llu --without \"%s\" --schedule %llu\n",
              failure.c_str(), part.program.describe().c_str(),
              static_cast<unsigned long long>(part.program.seed), part.erased().c_str(),
              static_cast<unsigned long long>(schedule));
}

struct Line {
  uint64_t seed, steps, switches;
  char failure[900];
};

// Runs a batch in a child: writes a Line before each program, in case it crashes, and one after it.
void run_batch(uint64_t first, uint64_t count, int to) {
  for (uint64_t seed = first; seed < first + count; ++seed) {
    Line line{seed, 0, 0, ""};
    if (write(to, &line, sizeof line) != sizeof line) _exit(1);
    alarm(kMostSeconds);
    const Verdict verdict = run_program(Program::make(seed), seed);
    line.steps = verdict.steps;
    line.switches = verdict.switches;
    std::snprintf(line.failure, sizeof line.failure, "%s", verdict.failure.c_str());
    if (write(to, &line, sizeof line) != sizeof line) _exit(1);
  }
  _exit(0);
}

struct Batch {
  pid_t child = -1;
  int from = -1;
  uint64_t next = 0, end = 0;  // seeds without a report
  Line line{};                 // partly read line, and its bytes so far
  size_t line_bytes = 0;
  bool runs = false;  // whether the program of `next` runs
};

Batch start_batch(uint64_t first, uint64_t count) {
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    run_batch(first, count, ends[1]);
  }
  close(ends[1]);
  Batch batch;
  batch.child = child;
  batch.from = ends[0];
  batch.next = first;
  batch.end = first + count;
  return batch;
}

struct Total {
  uint64_t schedules = 0, steps = 0, switches = 0;
  std::vector<uint64_t> failed;

  void fail(uint64_t seed, const char* how) {
    std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), how);
    failed.push_back(seed);
  }
};

// Reads a batch's available output. False at its end.
bool read_batch(Batch& batch, Total& total) {
  const ssize_t got = read(batch.from, reinterpret_cast<char*>(&batch.line) + batch.line_bytes,
                           sizeof batch.line - batch.line_bytes);
  if (got <= 0) return false;
  batch.line_bytes += static_cast<size_t>(got);
  if (batch.line_bytes < sizeof batch.line) return true;
  batch.line_bytes = 0;
  batch.runs = !batch.runs;
  if (batch.runs) return true;
  ++batch.next;
  ++total.schedules;
  total.steps += batch.line.steps;
  total.switches += batch.line.switches;
  if (batch.line.failure[0] != '\0') total.fail(batch.line.seed, batch.line.failure);
  return true;
}

// Finishes a batch that has ended. Seeds after a crash get a new batch.
std::optional<Batch> end_batch(Batch& batch, Total& total) {
  close(batch.from);
  int status = 0;
  waitpid(batch.child, &status, 0);
  if (batch.next == batch.end) return {};
  ++total.schedules;
  const std::string how = WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "itself";
  total.fail(batch.next, ("the process was ended by " + how).c_str());
  if (++batch.next == batch.end) return {};
  return start_batch(batch.next, batch.end - batch.next);
}

// Waits for output from any batch.
void read_some(std::vector<Batch>& running, Total& total) {
  std::vector<pollfd> entries;
  for (const Batch& batch : running) entries.push_back({batch.from, POLLIN, 0});
  poll(entries.data(), entries.size(), -1);
  for (size_t k = running.size(); k-- > 0;) {
    if (entries[k].revents == 0 || read_batch(running[k], total)) continue;
    if (std::optional<Batch> rest = end_batch(running[k], total))
      running[k] = *rest;
    else
      running.erase(running.begin() + static_cast<ptrdiff_t>(k));
  }
}

double seconds_since(std::chrono::steady_clock::time_point began) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

}  // namespace

int main(int count, char** words) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  setenv("HWLOC_PLUGINS_PATH", "/nowhere", 1);  // not needed, and slow to load
  mallopt(M_TRIM_THRESHOLD, 256 << 20);         // keeps freed memory for the next program
  mallopt(M_MMAP_THRESHOLD, 64 << 20);
  const Arguments arguments = parse(count, words);
  if (arguments.here) {
    const Verdict verdict = run_program(Program::make(arguments.seed), arguments.seed);
    std::printf("%s\n", verdict.failure.empty() ? "passed" : verdict.failure.c_str());
    return verdict.failure.empty() ? 0 : 1;
  }
  if (arguments.replays) {
    const Part part(arguments.seed, arguments.without);
    const uint64_t schedule = arguments.schedule.value_or(arguments.seed);
    std::printf("seed %llu: %s\n", static_cast<unsigned long long>(arguments.seed),
                part.program.describe().c_str());
    const std::string failure = run_apart(part.program, schedule);
    std::printf("%s\n", failure.empty() ? "passed" : failure.c_str());
    if (!failure.empty() && arguments.shrinks) shrink(part, schedule, failure);
    return failure.empty() ? 0 : 1;
  }
  const auto began = std::chrono::steady_clock::now();
  uint64_t end = arguments.schedules == 0 ? UINT64_MAX : arguments.seed + arguments.schedules;
  uint64_t next = arguments.seed;
  bool is_cut_off = false;  // not enough time for all
  Total total;
  std::vector<Batch> running;
  while (next < end || !running.empty()) {
    const bool in_time = arguments.seconds <= 0 || seconds_since(began) < arguments.seconds;
    if (next < end && !in_time && arguments.schedules != 0) is_cut_off = true;
    if (!in_time || (arguments.stops && !total.failed.empty())) end = next;
    while (next < end && running.size() < static_cast<size_t>(arguments.jobs)) {
      const uint64_t size = std::min(kBatch, end - next);
      running.push_back(start_batch(next, size));
      next += size;
    }
    if (!running.empty()) read_some(running, total);
  }
  if (arguments.shrinks && !total.failed.empty()) {
    const uint64_t seed = total.failed.front();
    const Part part(seed, {});
    if (const std::string failure = run_apart(part.program, seed); !failure.empty())
      shrink(part, seed, failure);
    else
      std::printf("seed %llu passes alone\n", static_cast<unsigned long long>(seed));
  }
  const double took = seconds_since(began);
  std::printf("%.0f schedules a second, %.0f steps and %.0f switches each\n",
              static_cast<double>(total.schedules) / took,
              static_cast<double>(total.steps) /
                  static_cast<double>(std::max<uint64_t>(total.schedules, 1)),
              static_cast<double>(total.switches) /
                  static_cast<double>(std::max<uint64_t>(total.schedules, 1)));
  std::printf("%llu passed, %llu failed\n",
              static_cast<unsigned long long>(total.schedules - total.failed.size()),
              static_cast<unsigned long long>(total.failed.size()));
  if (is_cut_off)
    std::printf("FAILED: %g s were not enough for %llu schedules\n", arguments.seconds,
                static_cast<unsigned long long>(arguments.schedules));
  return total.failed.empty() && !is_cut_off ? 0 : 1;
}
