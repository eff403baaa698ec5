// Exit hook: a library that calls exit() inside guarded() does not end the process. Runs without
// MPI. Each test needs its own process, since MPI has given up afterwards.

#include "mpi/mpich/exit_hook.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

#include "mpi/guarded.h"

namespace dscomm {
namespace {

using EndProcess = int (*)(int);

// `binding`: when the loader fills in the library's function table.
EndProcess load(const std::string& binding) {
  const std::string path = CALLS_EXIT + binding + ".so";
  void* const library = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  EXPECT_NE(library, nullptr) << dlerror();
  return reinterpret_cast<EndProcess>(dlsym(library, "end_process"));
}

void expect_left(const std::string& binding) {
  const EndProcess end_process = load(binding);
  ASSERT_TRUE(hook_exit(reinterpret_cast<const void*>(end_process)));
  EXPECT_EQ(guarded([&] { return guarded([&] { return end_process(3); }); }), MPI_ERR_OTHER);
  EXPECT_TRUE(mpi_gave_up());
  EXPECT_NE(mpi_abort_message(), "");
  EXPECT_EQ(guarded([] { return MPI_SUCCESS; }), MPI_ERR_OTHER);
}

TEST(ExitHook, ExitInCallWithLazyBindingIsIntercepted) { expect_left("lazy"); }
TEST(ExitHook, ExitInCallWithReadOnlyTableIsIntercepted) { expect_left("now"); }

TEST(ExitHook, ExitInBlockingCallIsIntercepted) {
  const EndProcess end_process = load("lazy");
  ASSERT_TRUE(hook_exit(reinterpret_cast<const void*>(end_process)));
  EXPECT_EQ(guarded_blocking([&] { return end_process(3); }), MPI_ERR_OTHER);
  EXPECT_TRUE(mpi_gave_up());
}

TEST(ExitHook, ExitOutsideOfCallsEndsTheProcess) {
  const EndProcess end_process = load("now");
  ASSERT_TRUE(hook_exit(reinterpret_cast<const void*>(end_process)));
  EXPECT_EXIT(end_process(3), testing::ExitedWithCode(3), "");
  EXPECT_FALSE(mpi_gave_up());
}

TEST(ExitHook, LibraryWithoutExitIsNotHooked) {
  void* const library = dlopen("libm.so.6", RTLD_LAZY);
  ASSERT_NE(library, nullptr);
  EXPECT_FALSE(hook_exit(dlsym(library, "cos")));
}

TEST(ExitHook, NullAddressIsNotHooked) { EXPECT_FALSE(hook_exit(nullptr)); }

}  // namespace
}  // namespace dscomm
