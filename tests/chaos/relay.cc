#include "tests/chaos/relay.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "status/check.h"

namespace chaos {
namespace {

constexpr size_t kMaxWaitingPieces = 64;  // of a direction; then the sender waits
constexpr size_t kPieceBytes = 64 << 10;

sockaddr_in Address(const std::string& ip, int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  FERRY_CHECK(inet_pton(AF_INET, ip.c_str(), &address.sin_addr) == 1) << ip;
  return address;
}

int Socket() { return socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }

// The other side sees a reset, not an end.
void Reset(int fd) {
  const linger at_once = {.l_onoff = 1, .l_linger = 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  close(fd);
}

bool Retryable() { return errno == EAGAIN || errno == EINTR || errno == ENOTCONN; }

}  // namespace

Relay::Relay(const std::string& ip, const std::string& target)
    : target_(target), listener_(Socket()), wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  sockaddr_in address = Address(ip, 0);
  socklen_t length = sizeof(address);
  FERRY_CHECK(bind(listener_, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
              listen(listener_, 64) == 0 &&
              getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length) == 0)
      << "cannot listen on " << ip;
  address_ = absl::StrCat(ip, ":", ntohs(address.sin_port));
  thread_ = std::thread([this] { Main(); });
}

Relay::~Relay() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  Wake();
  thread_.join();
  close(listener_);
  close(wake_);
}

void Relay::Wake() {
  const uint64_t one = 1;
  (void)!write(wake_, &one, sizeof(one));
}

void Relay::Change(const std::function<void()>& change) {
  std::unique_lock lock(mutex_);
  change();
  const int64_t mine = ++num_changes_;
  Wake();
  seen_.wait(lock, [&] { return num_seen_ >= mine; });
}

void Relay::SetDelay(absl::Duration delay) {
  Change([&] { delay_ = delay; });
}

void Relay::SetSilent(bool silent) {
  Change([&] { silent_ = silent; });
}

void Relay::Break() {
  Change([&] { break_ = true; });
}

void Relay::Accept() {
  int client;
  while ((client = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
    const size_t colon = target_.rfind(':');
    int port = 0;
    FERRY_CHECK(absl::SimpleAtoi(target_.substr(colon + 1), &port)) << target_;
    const sockaddr_in address = Address(target_.substr(0, colon), port);
    const int server = Socket();
    if (connect(server, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 &&
        errno != EINPROGRESS) {
      Reset(client);
      close(server);
      continue;
    }
    Connection& connection = connections_.emplace_back();
    connection.client = client;
    connection.server = server;
    connection.ways[0].from = connection.ways[1].to = client;
    connection.ways[1].from = connection.ways[0].to = server;
  }
}

bool Relay::Move(Way& way, absl::Time now, absl::Duration delay) {
  while (!way.from_ended && way.pieces.size() < kMaxWaitingPieces) {
    std::string bytes(kPieceBytes, '\0');
    const ssize_t n = recv(way.from, bytes.data(), bytes.size(), 0);
    if (n < 0 && !Retryable()) return false;
    if (n < 0) break;
    way.from_ended = n == 0;
    bytes.resize(static_cast<size_t>(n));
    if (n > 0) way.pieces.push_back({now + delay, std::move(bytes)});
  }
  while (!way.pieces.empty() && way.pieces.front().due <= now) {
    std::string& bytes = way.pieces.front().bytes;
    const ssize_t n = send(way.to, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n < 0 && !Retryable()) return false;
    if (n < 0) break;
    bytes.erase(0, static_cast<size_t>(n));
    if (bytes.empty()) way.pieces.pop_front();
  }
  if (way.from_ended && way.pieces.empty() && !way.to_ended) {
    way.to_ended = true;
    shutdown(way.to, SHUT_WR);
  }
  return true;
}

void Relay::Main() {
  while (true) {
    absl::Duration delay;
    bool silent, break_all;
    {
      std::lock_guard lock(mutex_);
      if (stop_) break;
      delay = delay_;
      silent = silent_;
      break_all = !silent && std::exchange(break_, false);
      num_seen_ = num_changes_;
      seen_.notify_all();
    }
    std::vector<pollfd> fds = {{.fd = wake_, .events = POLLIN, .revents = 0}};
    const absl::Time now = absl::Now();
    absl::Time next = absl::InfiniteFuture();
    if (!silent) {
      fds.push_back({.fd = listener_, .events = POLLIN, .revents = 0});
      Accept();
      for (Connection& connection : connections_) {
        connection.broken = break_all || !Move(connection.ways[0], now, delay) ||
                            !Move(connection.ways[1], now, delay);
        if (connection.broken) {
          Reset(connection.client);
          Reset(connection.server);
          continue;
        }
        for (const Way& way : connection.ways) {
          if (!way.from_ended && way.pieces.size() < kMaxWaitingPieces) {
            fds.push_back({.fd = way.from, .events = POLLIN, .revents = 0});
          }
          if (way.pieces.empty()) continue;
          if (way.pieces.front().due > now) {
            next = std::min(next, way.pieces.front().due);
          } else {
            fds.push_back({.fd = way.to, .events = POLLOUT, .revents = 0});
          }
        }
      }
      connections_.remove_if([](const Connection& connection) {
        const bool over = connection.ways[0].to_ended && connection.ways[1].to_ended;
        if (over && !connection.broken) {
          close(connection.client);
          close(connection.server);
        }
        return over || connection.broken;
      });
    }
    const int wait = next == absl::InfiniteFuture()
                         ? -1
                         : static_cast<int>(absl::ToInt64Milliseconds(next - now)) + 1;
    poll(fds.data(), fds.size(), wait);
    uint64_t count;
    (void)!read(wake_, &count, sizeof(count));
  }
  for (const Connection& connection : connections_) {
    Reset(connection.client);
    Reset(connection.server);
  }
}

}  // namespace chaos
