// MPI's view of dscomm's arithmetic: an MPI_Op for each dtype and operator, all of them calling
// dscomm::reduce.
//
// MPI's own operators are not used, not even where they mean the same. They run in whichever thread
// happens to poll, in that thread's mode of denormals; they leave open what MIN does with NaN and
// with signed zeros; they know neither halves nor bool as we define it. And one arithmetic is
// tested once: reduce() is compared with its scalar twin on every instruction set. It costs no time
// (float32 SUM of 1 MiB between 2 ranks: 0.85 ms with either).
//
// Same bits on every rank. Open MPI reduces an element on one rank and hands the result out, or (by
// recursive doubling) computes it on all ranks along one tree with the two sides swapped. The
// operators commute bit for bit: sums and products of two numbers do, of complex ones too, and MIN
// and MAX treat their operands alike, NaN and signed zeros included. Left open is only which of two
// NaNs a sum keeps, and then only where MPI was told to use recursive doubling.
#pragma once

#include <mpi.h>

#include "core/base/status.h"
#include "core/types/reduce_op.h"

namespace dscomm {

// A type of the dtype's size. The operators below know what it holds; MPI need not.
MPI_Datatype mpi_datatype(DType dtype);

// The operator, commutative, made when it is first asked for and kept as long as MPI lives. AVG and
// PREMUL_SUM have none: their sums are SUM's, see WireReduction. Any thread; does not communicate.
Result<MPI_Op> mpi_reduce_op(DType dtype, ReduceOp op);

}  // namespace dscomm
