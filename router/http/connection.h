// Connection: reads requests from a socket, one after the other, and writes their responses.
// Include this in .cc files only: it drags Asio in.
//
//   handshake ─► read a request ─► Handler: exchange ─► response written ─┬─► read the next one
//                     │                                                   └─► linger, close
//                     └─ bad bytes, too slow: an error response ─► linger, close
//
// Everything on the socket's strand, except Post and unsent_bytes.

#ifndef ROUTER_HTTP_CONNECTION_H_
#define ROUTER_HTTP_CONNECTION_H_

#include <atomic>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <memory>
#include <string>

#include "router/http/http_server.h"
#include "router/http/socket.h"

namespace router::http {

class Connection final : public std::enable_shared_from_this<Connection> {
 public:
  // `options` must outlive the connection.  `on_closed` is called once, on the strand.
  Connection(std::unique_ptr<Socket> socket, const ServerOptions* options, Handler handler,
             std::function<void()> on_closed);

  void Start();  // any thread
  // Ends after the response that is under way, at once if there is none.  Any thread.
  void Drain();
  // Any thread.
  void Close();

 private:
  class RequestExchange;
  enum class State { kReading, kAnswering, kLingering, kClosed };
  using Clock = std::chrono::steady_clock;

  void StartRead();
  void OnRead(const boost::system::error_code& error, size_t num_bytes);
  void ReadRequest();
  // Responses to what no handler sees; the connection ends with them.
  void Refuse(const std::string& path, const Response& response);
  void RefuseBytes(int status, const std::string& message);
  // The client's name for its request; "" if the response has its own, or there is none to be said.
  std::string_view IdToReturn(const Response& response) const;
  // Without a length the body is chunked, or its end is that of the connection.
  void WriteHead(const Response& response, bool has_length);
  void Queue(std::string_view bytes);
  void WriteNext();
  void OnWritten(const boost::system::error_code& error, size_t num_bytes);
  void ResponseEnded(bool complete);
  void FinishResponse();
  void Linger();
  void CloseNow();
  // The time until which the next byte must be read or written.
  void SetReadLimit(absl::Duration limit);
  void SetWriteLimit();
  void ArmTimer();
  void OnTimer();

  const std::unique_ptr<Socket> socket_;
  const ServerOptions* const options_;
  const Handler handler_;
  const std::function<void()> on_closed_;

  State state_ = State::kReading;
  bool handshaken_ = false;
  RequestReader reader_;
  RequestReader::Stage waits_for_ = RequestReader::Stage::kHeader;  // what the read limit is for
  std::string read_buffer_;
  bool reading_ = false;
  size_t discarded_bytes_ = 0;  // while lingering

  std::shared_ptr<RequestExchange> exchange_;  // while answering
  bool keep_alive_ = true;                     // after this response
  bool chunked_ = false;                       // the stream's body
  bool response_ended_ = false;                // all of it is queued
  std::string queued_;                         // goes out after writing_
  std::string writing_;                        // from written_ on being written
  size_t written_ = 0;
  size_t taken_bytes_ = 0;  // since the write limit was set
  std::atomic<size_t> unsent_bytes_{0};

  boost::asio::steady_timer timer_;
  Clock::time_point armed_until_ = Clock::time_point::max();
  Clock::time_point read_limit_ = Clock::time_point::max();
  Clock::time_point write_limit_ = Clock::time_point::max();
};

}  // namespace router::http

#endif  // ROUTER_HTTP_CONNECTION_H_
