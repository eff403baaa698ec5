// Tags of messages on the communicator of a transport's members; bring-up uses them on
// MPI_COMM_WORLD, too. A Team has communicators of its own for its messages. MPI guarantees tags of
// 15 bits.
#pragma once

namespace dscomm {

// MPI_Comm_create_group, and Open MPI's messages for it, use the tags below this one.
constexpr int kGroupTags = 0x3800;
// meet() uses a group's tag plus this.
constexpr int kMeetTags = kGroupTags;
// The tag of point-to-point cells.
constexpr int kCellTag = 0x7000;

}  // namespace dscomm
