#include "tests/router/http/http_client.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstdlib>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "gtest/gtest.h"

namespace router::http {
namespace {

constexpr int kPatienceSeconds = 60;

// The data of a chunked body as far as it goes; true: it is complete, `*used` bytes of it.
bool Dechunk(absl::string_view bytes, std::string* body, size_t* used) {
  size_t at = 0;
  while (true) {
    const size_t line_end = bytes.find("\r\n", at);
    if (line_end == absl::string_view::npos) return false;
    const size_t size =
        std::strtoul(std::string(bytes.substr(at, line_end - at)).c_str(), nullptr, 16);
    at = line_end + 2;
    body->append(std::string(bytes.substr(std::min(at, bytes.size()), size)));
    if (at + size + 2 > bytes.size()) return false;
    at += size + 2;
    *used = at;
    if (size == 0) return true;
  }
}

}  // namespace

nlohmann::json Reply::Json() const { return nlohmann::json::parse(body, nullptr, false); }

std::vector<nlohmann::json> Reply::Events() const {
  std::vector<nlohmann::json> events;
  for (absl::string_view event : absl::StrSplit(body, "\n\n", absl::SkipEmpty())) {
    EXPECT_TRUE(absl::ConsumePrefix(&event, "data: ")) << event;
    if (event != "[DONE]")
      events.push_back(nlohmann::json::parse(std::string(event), nullptr, false));
  }
  return events;
}

bool Reply::done() const {
  constexpr absl::string_view kDone = "data: [DONE]\n\n";
  return body.size() >= kDone.size() && body.substr(body.size() - kDone.size()) == kDone;
}

HttpClient::HttpClient(int port) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  timeval patience = {.tv_sec = kPatienceSeconds, .tv_usec = 0};
  setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
  EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
}

void HttpClient::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void HttpClient::LimitReceiveBuffer(int num_bytes) {
  setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &num_bytes, sizeof(num_bytes));
}

void HttpClient::Send(const std::string& bytes) {
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t n = send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) return;  // the server does not want it: its answer tells
    sent += static_cast<size_t>(n);
  }
}

void HttpClient::Ask(const std::string& path, const std::string& body, const std::string& headers) {
  Send(absl::StrCat(body.empty() ? "GET " : "POST ", path, " HTTP/1.1\r\nHost: test\r\n", headers,
                    body.empty() ? "" : absl::StrCat("Content-Length: ", body.size(), "\r\n"),
                    "\r\n", body));
}

bool HttpClient::ReadMore() {
  char buffer[65536];
  const ssize_t n = ended_ ? 0 : recv(fd_, buffer, sizeof(buffer), 0);
  if (n > 0) unread_.append(buffer, static_cast<size_t>(n));
  if (n <= 0) ended_ = true;
  return n > 0;
}

bool HttpClient::Parse(Reply* reply, size_t* used) const {
  const size_t head_end = unread_.find("\r\n\r\n");
  if (head_end == std::string::npos) return false;
  *reply = {};
  for (const absl::string_view line : absl::StrSplit(unread_.substr(0, head_end), "\r\n")) {
    if (reply->status == 0) {
      reply->status = std::atoi(std::string(line.substr(9)).c_str());
      continue;
    }
    const size_t colon = line.find(':');
    reply->headers[absl::AsciiStrToLower(line.substr(0, colon))] =
        std::string(absl::StripAsciiWhitespace(line.substr(colon + 1)));
  }
  const absl::string_view rest = absl::string_view(unread_).substr(head_end + 4);
  *used = head_end + 4;
  if (reply->status == 100) return true;
  if (reply->headers.count("transfer-encoding") > 0) {
    size_t body_bytes = 0;
    reply->complete = Dechunk(rest, &reply->body, &body_bytes);
    *used += body_bytes;
  } else if (reply->headers.count("content-length") > 0) {
    const size_t length = std::strtoul(reply->headers["content-length"].c_str(), nullptr, 10);
    reply->body = std::string(rest.substr(0, length));
    reply->complete = reply->body.size() == length;
    *used += reply->body.size();
  } else {
    reply->body = std::string(rest);
    reply->complete = ended_;
    *used += rest.size();
  }
  return reply->complete || ended_;
}

Reply HttpClient::Read() {
  Reply reply;
  size_t used = 0;
  while (!Parse(&reply, &used) && ReadMore()) {
  }
  Parse(&reply, &used);  // what there is, if the connection has ended
  unread_.erase(0, used);
  return reply;
}

Reply HttpClient::ReadUntil(const std::string& words) {
  Reply reply;
  size_t used = 0;
  do {
    Parse(&reply, &used);
  } while (reply.body.find(words) == std::string::npos && ReadMore());
  return reply;
}

bool HttpClient::AtEnd() { return unread_.empty() && !ReadMore(); }

Reply Post(int port, const std::string& path, const std::string& body, const std::string& headers) {
  HttpClient client(port);
  client.Ask(path, body, headers);
  return client.Read();
}

Reply Get(int port, const std::string& path, const std::string& headers) {
  HttpClient client(port);
  client.Ask(path, "", headers);
  return client.Read();
}

}  // namespace router::http
