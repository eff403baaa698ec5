// Tags on the communicator of all members of a transport, which also carries flush()'s barrier. (A
// Team's messages use its own communicators.) MPI guarantees 15 bits.
#pragma once

namespace dscomm {

// MPI_Comm_create_group, and Open MPI's messages for it, use tags 0 to this, excluded.
constexpr int kGroupTags = 0x3800;
// Added to a group tag: the tags of meet().
constexpr int kMeetTags = kGroupTags;
// The tag of point-to-point cells.
constexpr int kCellTag = 0x7000;

}  // namespace dscomm
