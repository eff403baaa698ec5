// SocketDirectory between processes that are stopped.
#include "core/shm/memory/socket_directory.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "core/shm/memory/arena.h"

namespace dscomm::test {
namespace {

using std::chrono::milliseconds;

void stop(pid_t process) {
  kill(process, SIGSTOP);
  int status = 0;
  ASSERT_EQ(waitpid(process, &status, WUNTRACED), process);
  ASSERT_TRUE(WIFSTOPPED(status));
}

// Publishes an arena, sends its address, and runs until the other end of the socket is closed.
void serve_arena(int socket) {
  SocketDirectory directory;
  std::shared_ptr<Arena> arena = Arena::create(1 << 20).value();
  PeerAddress own = directory.publish(arena, nullptr, ArenaId()).value();
  char over;
  _exit(write(socket, &own, sizeof own) == sizeof own && read(socket, &over, 1) == 0 ? 0 : 1);
}

void attach_to(const PeerAddress& address, milliseconds timeout) {
  SocketDirectory directory;
  std::shared_ptr<Arena> arena = Arena::create(1 << 20).value();
  if (!directory.publish(arena, nullptr, ArenaId()).ok()) _exit(2);
  Directory::Attached attached = directory.attach(address, Deadline::after(timeout));
  if (attached.peer == nullptr) std::fprintf(stderr, "%s\n", attached.why_not.c_str());
  _exit(attached.peer == nullptr ? 1 : 0);
}

// One process waits for another one's memory, and both are stopped for longer than the timeout.
TEST(SocketDirectory, AttachContinuesAfterJobWasStopped) {
  int sockets[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets), 0);
  const pid_t server = fork();
  ASSERT_GE(server, 0);
  if (server == 0) {
    alarm(60);
    close(sockets[0]);
    serve_arena(sockets[1]);
  }
  close(sockets[1]);
  PeerAddress address;
  ASSERT_EQ(read(sockets[0], &address, sizeof address), static_cast<ssize_t>(sizeof address));
  stop(server);
  const pid_t client = fork();
  ASSERT_GE(client, 0);
  if (client == 0) {
    alarm(60);
    close(sockets[0]);
    attach_to(address, milliseconds(2000));
  }
  std::this_thread::sleep_for(milliseconds(500));
  stop(client);
  std::this_thread::sleep_for(milliseconds(3000));
  kill(client, SIGCONT);
  std::this_thread::sleep_for(milliseconds(300));
  kill(server, SIGCONT);
  int status = -1;
  ASSERT_EQ(waitpid(client, &status, 0), client);
  EXPECT_EQ(status, 0);
  close(sockets[0]);
  ASSERT_EQ(waitpid(server, &status, 0), server);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace dscomm::test
