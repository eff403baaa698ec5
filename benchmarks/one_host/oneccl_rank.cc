// One rank of oneCCL: ccl::allreduce in place, and wait().
#include <unistd.h>

#include <fstream>
#include <oneapi/ccl.hpp>

#include "all_reduce.h"

// Hooks of Intel's profilers, which the static library lacks: null, as there is no profiler.
extern "C" {
void* __itt_domain_create_ptr__3_0 = nullptr;
void* __itt_event_create_ptr__3_0 = nullptr;
void* __itt_event_end_ptr__3_0 = nullptr;
void* __itt_event_start_ptr__3_0 = nullptr;
void* __itt_metadata_add_ptr__3_0 = nullptr;
void* __itt_string_handle_create_ptr__3_0 = nullptr;
void* __itt_task_begin_ptr__3_0 = nullptr;
void* __itt_task_end_ptr__3_0 = nullptr;
void* __itt_thread_set_name_ptr__3_0 = nullptr;
}

namespace {

// Passes on rank 0's address, in a file beside the one through which the ranks meet.
ccl::shared_ptr_class<ccl::kvs> connect(const one_host::Options& options,
                                        one_host::Meeting& meeting) {
  const std::string file = options.meet + ".kvs";
  ccl::shared_ptr_class<ccl::kvs> store;
  ccl::kvs::address_type address;
  if (options.rank == 0) {
    store = ccl::create_main_kvs();
    address = store->get_address();
    std::ofstream(file, std::ios::binary).write(address.data(), address.size());
  }
  meeting.meet();
  if (options.rank != 0) {
    std::ifstream(file, std::ios::binary).read(address.data(), address.size());
    store = ccl::create_kvs(address);
  }
  return store;
}

}  // namespace

int main(int count, char** arguments) {
  const one_host::Options options = one_host::parse(count, arguments);
  one_host::Meeting meeting(options);
  ccl::init();
  auto store = connect(options, meeting);
  auto world = ccl::create_communicator(options.ranks, options.rank, store);
  one_host::measure(options, meeting, [&](void* data, size_t n, one_host::DType dtype) {
    const auto type =
        dtype == one_host::DType::kFloat32 ? ccl::datatype::float32 : ccl::datatype::bfloat16;
    ccl::allreduce(data, data, n, type, ccl::reduction::sum, world).wait();
  });
  return 0;
}
