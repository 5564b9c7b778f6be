#include "router/http/connection.h"

#include <algorithm>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/beast/http/status.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace router::http {
namespace {

using boost::system::error_code;
using Stage = RequestReader::Stage;

constexpr size_t kSmallRead = 2 << 10;  // idle connections keep this much
constexpr size_t kLargeRead = 64 << 10;
// Requests sent ahead, before which the connection is no longer read.
constexpr size_t kMaxAhead = 64 << 10;
// A client that takes less than this in a write_stall, though there is more, stalls.
constexpr size_t kProgressBytes = 16 << 10;
// What a client may still send after its last response, so that it gets to see that.
constexpr absl::Duration kLingerTime = absl::Seconds(2);
constexpr size_t kLingerBytes = 4 << 20;

const char* ReasonOf(int status) {
  const auto reason = boost::beast::http::obsolete_reason(
      boost::beast::http::int_to_status(static_cast<unsigned>(status)));
  return reason.data();  // a literal
}

}  // namespace

// Its calls reach the connection while this is its present exchange.
class Connection::RequestExchange final : public Exchange {
 public:
  RequestExchange(Request request, std::shared_ptr<Connection> connection)
      : Exchange(std::move(request)),
        work_(boost::asio::make_work_guard(static_cast<boost::asio::io_context&>(
            boost::asio::query(connection->socket_->executor(), boost::asio::execution::context)))),
        connection_(std::move(connection)) {}

  void Watch(std::shared_ptr<Watcher> watcher) override {
    if (ended_) return;
    watcher_ = std::move(watcher);
  }
  void Post(absl::AnyInvocable<void()> task) override {
    boost::asio::post(connection_->socket_->executor(), std::move(task));
  }
  void Respond(const Response& response) override {
    if (ended_ || begun_) return;
    begun_ = true;
    connection_->WriteHead(response, /*has_length=*/true);
    if (request().method != "HEAD") connection_->Queue(response.body);
    connection_->ResponseEnded(/*complete=*/true);
  }
  void BeginStream(const Response& head) override {
    if (ended_ || begun_) return;
    begun_ = true;
    connection_->WriteHead(head, /*has_length=*/false);
    connection_->WriteNext();
  }
  void Write(std::string_view part) override {
    if (ended_ || !begun_ || part.empty()) return;  // an empty chunk would be the last one
    if (connection_->chunked_) connection_->Queue(absl::StrFormat("%x\r\n", part.size()));
    connection_->Queue(part);
    if (connection_->chunked_) connection_->Queue("\r\n");
    connection_->WriteNext();
  }
  void EndStream(bool complete) override {
    if (ended_ || !begun_) return;
    if (connection_->chunked_) connection_->Queue("0\r\n\r\n");
    connection_->ResponseEnded(complete);
  }
  size_t unsent_bytes() const override { return connection_->unsent_bytes_.load(); }

  void Taken() {
    if (watcher_ != nullptr) watcher_->OnTaken();
  }
  // No call gets through from now on.
  void End(bool client_gone) {
    ended_ = true;
    const std::shared_ptr<Watcher> watcher = std::exchange(watcher_, nullptr);
    if (client_gone && watcher != nullptr) watcher->OnClientGone();
  }

 private:
  // The server's threads run until the last exchange is gone, so that what is posted is run.  The
  // guard is the context's and the last member to go: a strand's would look into the context after
  // it had let the server end.
  const boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  const std::shared_ptr<Connection> connection_;
  std::shared_ptr<Watcher> watcher_;
  bool begun_ = false;
  bool ended_ = false;
};

Connection::Connection(std::unique_ptr<Socket> socket, const ServerOptions* options,
                       Handler handler, std::function<void()> on_closed)
    : socket_(std::move(socket)),
      options_(options),
      handler_(std::move(handler)),
      on_closed_(std::move(on_closed)),
      reader_(options->limits),
      timer_(socket_->executor()) {}

void Connection::Start() {
  boost::asio::post(socket_->executor(), [self = shared_from_this()] {
    self->SetReadLimit(self->options_->header_time);
    self->socket_->Handshake([self](error_code error) {
      if (self->state_ == State::kClosed) return;
      if (error) {
        self->CloseNow();
        return;
      }
      self->handshaken_ = true;
      self->ReadRequest();
    });
  });
}

void Connection::StartRead() {
  if (reading_ || state_ == State::kClosed) return;
  if (state_ == State::kAnswering && reader_.unread_bytes() >= kMaxAhead) return;
  reading_ = true;
  read_buffer_.resize(reader_.stage() == Stage::kBody || state_ == State::kLingering ? kLargeRead
                                                                                     : kSmallRead);
  if (read_buffer_.size() == kSmallRead) read_buffer_.shrink_to_fit();
  socket_->Read(boost::asio::buffer(read_buffer_),
                [self = shared_from_this()](error_code error, size_t num_bytes) {
                  self->OnRead(error, num_bytes);
                });
}

void Connection::OnRead(const error_code& error, size_t num_bytes) {
  reading_ = false;
  if (state_ == State::kClosed) return;
  if (error) {
    CloseNow();
    return;
  }
  if (state_ == State::kLingering) {
    discarded_bytes_ += num_bytes;
    if (discarded_bytes_ > kLingerBytes) {
      CloseNow();
    } else {
      StartRead();
    }
    return;
  }
  reader_.Append(std::string_view(read_buffer_).substr(0, num_bytes));
  if (state_ == State::kAnswering) {
    StartRead();  // sent ahead: its turn comes
  } else {
    ReadRequest();
  }
}

void Connection::ReadRequest() {
  if (const auto bad = reader_.Read()) {
    RefuseBytes(bad->status, bad->message);
    return;
  }
  if (reader_.stage() == Stage::kComplete) {
    read_limit_ = Clock::time_point::max();
    waits_for_ = Stage::kComplete;
    state_ = State::kAnswering;
    Request request = reader_.Take();
    keep_alive_ = keep_alive_ && request.keep_alive;
    chunked_ = request.takes_chunks;
    response_ended_ = false;
    exchange_ = std::make_shared<RequestExchange>(std::move(request), shared_from_this());
    StartRead();
    handler_(exchange_);
    return;
  }
  if (reader_.stage() == Stage::kBody && waits_for_ != Stage::kBody &&
      options_->refuse != nullptr) {
    const Request header = reader_.Header();
    if (const std::optional<Response> refusal = options_->refuse(header)) {
      Refuse(header.path, *refusal);
      return;
    }
  }
  if (reader_.TakeExpectation()) {
    Queue("HTTP/1.1 100 Continue\r\n\r\n");
    WriteNext();
  }
  // A limit runs from the beginning of what it is for.
  if (reader_.stage() != waits_for_) {
    const bool first_header = reader_.stage() == Stage::kIdle && waits_for_ == Stage::kHeader;
    if (!first_header) {
      waits_for_ = reader_.stage();
      SetReadLimit(waits_for_ == Stage::kIdle     ? options_->idle
                   : waits_for_ == Stage::kHeader ? options_->header_time
                                                  : options_->body_time);
    }
  }
  StartRead();
}

void Connection::Refuse(const std::string& path, const Response& response) {
  state_ = State::kAnswering;
  keep_alive_ = false;
  read_limit_ = Clock::time_point::max();
  if (options_->on_response != nullptr) options_->on_response(path, response.status);
  WriteHead(response, /*has_length=*/true);
  if (!reader_.is_head()) Queue(response.body);
  ResponseEnded(/*complete=*/true);
}

void Connection::RefuseBytes(int status, const std::string& message) {
  Response response = {.status = status};
  if (options_->error_body != nullptr) response.body = options_->error_body(status, message);
  Refuse("", response);
}

std::string_view Connection::IdToReturn(const Response& response) const {
  constexpr char kRequestId[] = "x-request-id";
  for (const auto& [name, value] : response.headers) {
    if (name == kRequestId) return {};
  }
  const std::string_view id = exchange_ != nullptr ? exchange_->request().Header(kRequestId)
                                                   : reader_.HeaderSoFar(kRequestId);
  return options_->returns_id != nullptr && options_->returns_id(id) ? id : std::string_view();
}

void Connection::WriteHead(const Response& response, bool has_length) {
  if (exchange_ != nullptr && options_->on_response != nullptr) {
    options_->on_response(exchange_->request().path, response.status);
  }
  if (!has_length && !chunked_) keep_alive_ = false;
  std::string head = absl::StrCat("HTTP/1.1 ", response.status, " ", ReasonOf(response.status),
                                  "\r\ncontent-type: ", response.content_type, "\r\n");
  for (const auto& [name, value] : response.headers)
    absl::StrAppend(&head, name, ": ", value, "\r\n");
  if (const std::string_view id = IdToReturn(response); !id.empty()) {
    absl::StrAppend(&head, "x-request-id: ", absl::string_view(id.data(), id.size()), "\r\n");
  }
  if (has_length) {
    absl::StrAppend(&head, "content-length: ", response.body.size(), "\r\n");
  } else if (chunked_) {
    absl::StrAppend(&head, "transfer-encoding: chunked\r\n");
  }
  // HTTP/1.0 does not keep a connection unless both sides say so.
  absl::StrAppend(&head, "connection: ", keep_alive_ ? "keep-alive" : "close", "\r\n\r\n");
  Queue(head);
}

void Connection::Queue(std::string_view bytes) {
  queued_.append(bytes);
  unsent_bytes_ += bytes.size();
}

void Connection::WriteNext() {
  if (written_ < writing_.size() || queued_.empty() || state_ == State::kClosed) return;
  writing_.clear();
  writing_.swap(queued_);
  written_ = 0;
  SetWriteLimit();
  socket_->Write(boost::asio::buffer(writing_),
                 [self = shared_from_this()](error_code error, size_t num_bytes) {
                   self->OnWritten(error, num_bytes);
                 });
}

void Connection::OnWritten(const error_code& error, size_t num_bytes) {
  if (state_ == State::kClosed) return;
  if (error) {
    CloseNow();
    return;
  }
  written_ += num_bytes;
  taken_bytes_ += num_bytes;
  unsent_bytes_ -= num_bytes;
  if (taken_bytes_ >= kProgressBytes) SetWriteLimit();
  if (written_ < writing_.size()) {
    socket_->Write(boost::asio::buffer(writing_) + written_,
                   [self = shared_from_this()](error_code e, size_t n) { self->OnWritten(e, n); });
    return;
  }
  write_limit_ = Clock::time_point::max();
  WriteNext();
  if (exchange_ != nullptr && !response_ended_) exchange_->Taken();
  if (written_ == writing_.size() && response_ended_) FinishResponse();
}

void Connection::ResponseEnded(bool complete) {
  response_ended_ = true;
  if (!complete) keep_alive_ = false;
  WriteNext();
  if (written_ < writing_.size()) return;
  // Everything has been written before.  Not at once: the exchange is in the middle of a call.
  boost::asio::post(socket_->executor(), [self = shared_from_this()] {
    if (self->state_ == State::kAnswering && self->response_ended_) self->FinishResponse();
  });
}

void Connection::FinishResponse() {
  response_ended_ = false;
  if (exchange_ != nullptr) std::exchange(exchange_, nullptr)->End(/*client_gone=*/false);
  writing_ = std::string();  // the largest response is not kept
  written_ = 0;
  if (!keep_alive_) {
    Linger();
    return;
  }
  state_ = State::kReading;
  ReadRequest();
}

void Connection::Linger() {
  state_ = State::kLingering;
  SetReadLimit(kLingerTime);
  socket_->EndWrites([self = shared_from_this()] {});
  StartRead();
}

void Connection::CloseNow() {
  if (state_ == State::kClosed) return;
  state_ = State::kClosed;
  timer_.cancel();
  socket_->Close();
  if (exchange_ != nullptr) std::exchange(exchange_, nullptr)->End(/*client_gone=*/true);
  on_closed_();
}

void Connection::Drain() {
  boost::asio::post(socket_->executor(), [self = shared_from_this()] {
    self->keep_alive_ = false;
    if (self->state_ != State::kReading) return;
    if (self->reader_.stage() == Stage::kIdle) self->CloseNow();
  });
}

void Connection::Close() {
  boost::asio::post(socket_->executor(), [self = shared_from_this()] { self->CloseNow(); });
}

void Connection::SetReadLimit(absl::Duration limit) {
  read_limit_ = Clock::now() + absl::ToChronoNanoseconds(limit);
  ArmTimer();
}

void Connection::SetWriteLimit() {
  write_limit_ = Clock::now() + absl::ToChronoNanoseconds(options_->write_stall);
  taken_bytes_ = 0;
  ArmTimer();
}

void Connection::ArmTimer() {
  // Limits mostly move on: the timer looks again when it fires.
  const Clock::time_point until = std::min(read_limit_, write_limit_);
  if (until >= armed_until_ || state_ == State::kClosed) return;
  armed_until_ = until;
  timer_.expires_at(until);
  timer_.async_wait([self = shared_from_this()](error_code error) {
    if (!error) self->OnTimer();
  });
}

void Connection::OnTimer() {
  if (state_ == State::kClosed) return;
  armed_until_ = Clock::time_point::max();
  const Clock::time_point now = Clock::now();
  const bool slow_request = now >= read_limit_ && state_ == State::kReading && handshaken_ &&
                            reader_.stage() != Stage::kIdle;
  if (slow_request) {
    RefuseBytes(408, absl::StrCat("the request was not complete after ",
                                  absl::FormatDuration(reader_.stage() == Stage::kHeader
                                                           ? options_->header_time
                                                           : options_->body_time)));
  } else if (now >= std::min(read_limit_, write_limit_)) {
    CloseNow();
  } else {
    ArmTimer();
  }
}

}  // namespace router::http
