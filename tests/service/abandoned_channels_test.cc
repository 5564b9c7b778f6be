#include "service/abandoned_channels.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>

#include "grpcpp/grpcpp.h"
#include "service/grpc_server.h"
#include "tests/fakes/silent_server.h"

namespace service {
namespace {

using fakes::SilentServer;

constexpr int kPatienceMs = 30'000;

// Whether the other end closes the connection in time.
bool IsClosed(int fd) {
  char buffer[4096];
  pollfd waits = {.fd = fd, .events = POLLIN, .revents = 0};
  while (poll(&waits, 1, kPatienceMs) > 0) {
    if (recv(fd, buffer, sizeof(buffer), 0) <= 0) return true;
  }
  return false;
}

TEST(AbandonedChannelsTest, AConnectionThatComesAfterItsChannelHasGoneIsClosed) {
  const SilentServer server;
  auto channel = MakeChannel(server.address(), {});
  channel->GetState(/*try_to_connect=*/true);
  const int fd = server.Accept();
  ASSERT_GE(fd, 0);
  char first[1];
  ASSERT_EQ(recv(fd, first, 1, 0), 1);  // the client's part of the handshake
  ASSERT_EQ(channel->GetState(false), GRPC_CHANNEL_CONNECTING);
  channel.reset();
  // The server goes on: its SETTINGS, which are empty, complete the handshake.
  const std::string settings("\0\0\0\4\0\0\0\0\0", 9);
  ASSERT_EQ(send(fd, settings.data(), settings.size(), MSG_NOSIGNAL), 9);
  EXPECT_TRUE(IsClosed(fd));
  close(fd);
}

TEST(AbandonedChannelsTest, AnAttemptThatFailsEndsWithItsChannel) {
  const SilentServer server;
  auto channel = MakeChannel(server.address(), {});
  channel->GetState(/*try_to_connect=*/true);
  const int fd = server.Accept();
  ASSERT_GE(fd, 0);
  channel.reset();
  EXPECT_TRUE(IsClosed(fd));
  close(fd);
}

TEST(AbandonedChannelsTest, AChannelThatIsNotConnectingEndsAtOnce) {
  const auto server = GrpcServer::Start("127.0.0.1:0", {}, {});
  std::weak_ptr<grpc::Channel> inner;
  {
    auto own = grpc::CreateChannel("127.0.0.1:" + std::to_string((*server)->port()),
                                   grpc::InsecureChannelCredentials());
    inner = own;
    const auto channel = EndedWhenConnected(std::move(own));
    EXPECT_TRUE(channel->WaitForConnected(std::chrono::system_clock::now() +
                                          std::chrono::milliseconds(kPatienceMs)));
  }
  EXPECT_TRUE(inner.expired());
}

}  // namespace
}  // namespace service
