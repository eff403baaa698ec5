// mpirun starts this program on every rank. A failure on any rank fails the job.
#include <gtest/gtest.h>
#include <mpi.h>

#include "mpi_ranks.h"

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  if (provided < MPI_THREAD_MULTIPLE) return 3;
  // Rank 0 prints the tests that run; all ranks print failures.
  if (dscomm::testing::Job::get().rank() != 0) GTEST_FLAG_SET(brief, true);
  ::testing::InitGoogleTest(&argc, argv);
  int failed = RUN_ALL_TESTS();
  dscomm::testing::Job::get().meet();
  MPI_Finalize();
  return failed;
}
