// One rank of vLLM's own operation for CPUs, through the C++ function that Python calls. Compiled
// together with csrc/cpu/shm.cpp of vLLM.
#include <torch/all.h>

#include "all_reduce.h"

// Functions of vLLM.
int64_t init_shm_manager(const std::string& name, int64_t group_size, int64_t rank,
                         int64_t thread_num);
std::string join_shm_manager(int64_t handle, const std::string& name);
void shm_allreduce(int64_t handle, torch::Tensor& data);

int main(int count, char** arguments) {
  const one_host::Options options = one_host::parse(count, arguments);
  one_host::Meeting meeting(options);
  // A name that is not in use, from that of the meeting's file.
  const std::string name = "/vllm_" + options.meet.substr(options.meet.rfind('/') + 1);
  const int64_t handle = init_shm_manager(name, options.ranks, options.rank, 1);
  meeting.meet();
  join_shm_manager(handle, name);
  meeting.meet();
  one_host::measure(options, meeting, [&](void* data, size_t n, one_host::DType dtype) {
    thread_local torch::Tensor tensor;
    const auto type = dtype == one_host::DType::kFloat32 ? torch::kFloat32 : torch::kBFloat16;
    // Made again only for another size or dtype, because no caller makes a tensor for each call.
    if (!tensor.defined() || tensor.numel() != static_cast<int64_t>(n) ||
        tensor.scalar_type() != type)
      tensor = torch::from_blob(data, {static_cast<int64_t>(n)}, type);
    shm_allreduce(handle, tensor);
  });
  return 0;
}
