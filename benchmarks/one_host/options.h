// The flags of a benchmark's rank, the same for every peer: its place, and the measurements.
//
//   PROGRAM --rank 0 --ranks 2 --cpu 0 --meet FILE --out FILE --sizes 8,4096 --dtypes float32
//           --modes tight,touch --budget-ms 40 [--memory pool] [--op ping_pong]
#pragma once

#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace one_host {

enum class DType { kFloat32, kBFloat16 };

inline size_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
inline const char* name_of(DType dtype) {
  return dtype == DType::kFloat32 ? "float32" : "bfloat16";
}

enum class Op { kAllReduce, kPingPong };

struct Options {
  int rank = 0;
  int ranks = 1;
  int cpu = -1;               // to run on alone; -1: anywhere
  std::string meet;           // the file through which ranks meet, MeetingPlace::kBytes of zeros
  std::string out;            // rank 0 appends a line of JSON for each case
  std::vector<size_t> sizes;  // bytes
  std::vector<DType> dtypes;
  std::vector<bool> touch;  // for each mode whether it is `touch`
  double budget_ms = 40;    // of timed calls in a case
  Op op = Op::kAllReduce;
  bool from_pool = false;  // --memory pool: dscomm's tensors lie where its ranks read them in place
};

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(2);
}

inline std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

// Reads the flags and moves the process to its cpu, before any thread is started. Ends the process
// if a flag is wrong.
inline Options parse(int count, char** arguments) {
  std::map<std::string, std::string> given;
  for (int i = 1; i + 1 < count; i += 2) given[arguments[i]] = arguments[i + 1];
  const auto take = [&](const char* name) {
    if (given.count(name) == 0) fail(std::string("missing: ") + name);
    return given[name];
  };
  Options options;
  options.rank = std::stoi(take("--rank"));
  options.ranks = std::stoi(take("--ranks"));
  options.cpu = std::stoi(take("--cpu"));
  options.meet = take("--meet");
  options.out = take("--out");
  for (const std::string& size : split(take("--sizes"))) options.sizes.push_back(std::stoull(size));
  for (const std::string& dtype : split(take("--dtypes"))) {
    if (dtype != "float32" && dtype != "bfloat16") fail("no dtype of this benchmark: " + dtype);
    options.dtypes.push_back(dtype == "float32" ? DType::kFloat32 : DType::kBFloat16);
  }
  for (const std::string& mode : split(take("--modes"))) {
    if (mode != "tight" && mode != "touch") fail("no mode of this benchmark: " + mode);
    options.touch.push_back(mode == "touch");
  }
  options.budget_ms = std::stod(take("--budget-ms"));
  options.from_pool = given.count("--memory") != 0 && given["--memory"] == "pool";
  if (given.count("--op") != 0) {
    const std::string op = given["--op"];
    if (op != "all_reduce" && op != "ping_pong") fail("no operation of this benchmark: " + op);
    options.op = op == "ping_pong" ? Op::kPingPong : Op::kAllReduce;
  }
  if (options.cpu >= 0) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(options.cpu, &cpus);
    if (sched_setaffinity(0, sizeof cpus, &cpus) != 0) fail("cannot run on the cpu asked for");
  }
  return options;
}

}  // namespace one_host
