// One rank of DeepSpeed's own operation for CPUs, through the C++ function that Python calls.
// Compiled together with csrc/cpu/comm/shm.cpp of DeepSpeed.
#include <sys/mman.h>
#include <torch/extension.h>

#include "all_reduce.h"
#include "shm.h"  // DeepSpeed's

int main(int count, char** arguments) {
  const one_host::Options options = one_host::parse(count, arguments);
  one_host::Meeting meeting(options);
  // DeepSpeed names its memory after the address and the port, and never removes it. The meeting's
  // file has a unique name, which serves as the address.
  std::string address = options.meet.substr(options.meet.rfind('/') + 1), port = "0";
  shm_initialize(options.ranks, options.rank, address.data(), port.data());
  meeting.meet();
  const std::string name = "/deepspeed_allreduce_buffer_" + std::to_string(getuid()) + "_" +
                           address + "_" + port + "_" + std::to_string(options.rank);
  ::shm_unlink(name.c_str());
  one_host::measure(options, meeting, [&](void* data, size_t n, one_host::DType dtype) {
    thread_local torch::Tensor tensor;
    const auto type = dtype == one_host::DType::kFloat32 ? torch::kFloat32 : torch::kBFloat16;
    // Made again only for another size or dtype, because no caller makes a tensor for each call.
    if (!tensor.defined() || tensor.numel() != static_cast<int64_t>(n) ||
        tensor.scalar_type() != type)
      tensor = torch::from_blob(data, {static_cast<int64_t>(n)}, type);
    all_reduce_outer_loop(tensor, n, static_cast<int>(n * one_host::bytes_of(dtype)));
  });
  return 0;
}
