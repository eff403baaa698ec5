// Measures the kernels of reduce() on this machine, in bytes of all sources per second: those of
// the best instruction set, and the scalar code (reduce_scalar.cc).
//
//   reduce_benchmark --benchmark_filter='SUM/bfloat16/.*'
//
// The sources and the destination are this thread's own and stay in its cache when they fit, so
// this is the speed of the arithmetic; a collective is slower.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/reduce/reduce.h"

namespace {

using dscomm::DType;
using dscomm::ReduceOp;
using dscomm::Reduction;

void run(benchmark::State& state, decltype(&dscomm::reduce) reduce, Reduction reduction) {
  const int n = static_cast<int>(state.range(0));
  const auto bytes = static_cast<size_t>(state.range(1));
  const size_t count = bytes / dscomm::dtype_bytes(reduction.dtype);
  // 0x3f in every byte is an ordinary number in every dtype, which no operator makes a denormal.
  const std::vector<uint8_t> numbers(bytes, 0x3f);
  const std::vector<std::vector<uint8_t>> memory(static_cast<size_t>(n), numbers);
  std::vector<const void*> sources;
  for (const auto& source : memory) sources.push_back(source.data());
  std::vector<uint8_t> destination(bytes);
  for (auto _ : state) {
    reduce(destination.data(), sources.data(), n, count, reduction, n);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * n * static_cast<int64_t>(bytes));
}

void add(const Reduction& reduction) {
  const std::string name = std::string(dscomm::reduce_op_name(reduction.op)) + "/" +
                           dscomm::dtype_name(reduction.dtype) + "/";
  const auto add_one = [&](const char* kernel, decltype(&dscomm::reduce) reduce) {
    benchmark::RegisterBenchmark((name + kernel).c_str(), run, reduce, reduction)
        ->ArgNames({"sources", "bytes"})
        ->ArgsProduct({{2, 4, 8}, {64, 4 << 10, 256 << 10, 16 << 20}});
  };
  add_one(dscomm::reduce_target_name(), dscomm::reduce);
  add_one("scalar twin", dscomm::reduce_scalar);
}

}  // namespace

int main(int argument_count, char** arguments) {
  for (int dtype = 0; dtype < dscomm::kDTypeCount; ++dtype) {
    for (int op = 0; op < dscomm::kReduceOpCount; ++op) {
      const Reduction reduction{static_cast<DType>(dtype), static_cast<ReduceOp>(op), 0.5};
      if (dscomm::check_reduction(reduction).ok()) add(reduction);
    }
  }
  benchmark::Initialize(&argument_count, arguments);
  if (benchmark::ReportUnrecognizedArguments(argument_count, arguments)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
