// Socket: an accepted connection, plain or TLS, with the few operations that HTTP needs.  Include
// this in .cc files only: it drags Asio in.
//
// All calls and handlers on the socket's executor, a strand.

#ifndef ROUTER_HTTP_SOCKET_H_
#define ROUTER_HTTP_SOCKET_H_

#include <boost/asio/buffer.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "service/grpc_server.h"

namespace boost::asio::ssl {
class context;
}

namespace router::http {

class Socket {
 public:
  using Done = std::function<void(boost::system::error_code, size_t)>;

  virtual ~Socket() = default;
  virtual boost::asio::any_io_executor executor() = 0;
  // What comes before the first byte.
  virtual void Handshake(std::function<void(boost::system::error_code)> done) = 0;
  // Reads and writes at least one byte.  One of each may be under way.
  virtual void Read(boost::asio::mutable_buffer buffer, Done done) = 0;
  virtual void Write(boost::asio::const_buffer bytes, Done done) = 0;
  // The client sees the end after what has been written.  `done` when that is under way.
  virtual void EndWrites(std::function<void()> done) = 0;
  // Ends what is under way with an error.
  virtual void Close() = 0;
};

// `tls` may be null: plain; else it must outlive the socket.
std::unique_ptr<Socket> MakeSocket(boost::asio::ip::tcp::socket socket,
                                   boost::asio::ssl::context* tls);

// nullptr without files.  Errors: kInvalidArgument naming the file.
absl::StatusOr<std::shared_ptr<boost::asio::ssl::context>> MakeTlsContext(
    const service::TlsOptions& tls);

}  // namespace router::http

#endif  // ROUTER_HTTP_SOCKET_H_
