// Tags on the communicator of all members of a transport: what goes there besides flush()'s
// barrier. (A Team's messages are on its own communicators.) MPI promises 15 bits.
#pragma once

namespace dscomm {

// Of MPI_Comm_create_group, and of Open MPI's own messages for it: 0 to this, the end not included.
constexpr int kGroupTags = 0x3800;
// Added to these: those of meet().
constexpr int kMeetTags = kGroupTags;
// Of point-to-point.
constexpr int kCellTag = 0x7000;

}  // namespace dscomm
