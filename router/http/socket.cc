#include "router/http/socket.h"

#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <utility>

#include "absl/strings/str_cat.h"

namespace router::http {
namespace {

namespace ssl = boost::asio::ssl;
using boost::asio::ip::tcp;
using boost::system::error_code;

// What the kernel takes for a client that does not read.
constexpr int kSendBufferBytes = 256 << 10;

void EndSending(tcp::socket& socket) {
  error_code ignored;
  socket.shutdown(tcp::socket::shutdown_send, ignored);
}

void CloseNow(tcp::socket& socket) {
  error_code ignored;
  socket.close(ignored);
}

class PlainSocket final : public Socket {
 public:
  explicit PlainSocket(tcp::socket socket) : socket_(std::move(socket)) {}
  boost::asio::any_io_executor executor() override { return socket_.get_executor(); }
  void Handshake(std::function<void(error_code)> done) override { done({}); }
  void Read(boost::asio::mutable_buffer buffer, Done done) override {
    socket_.async_read_some(buffer, std::move(done));
  }
  void Write(boost::asio::const_buffer bytes, Done done) override {
    socket_.async_write_some(bytes, std::move(done));
  }
  void EndWrites(std::function<void()> done) override {
    EndSending(socket_);
    done();
  }
  void Close() override { CloseNow(socket_); }

 private:
  tcp::socket socket_;
};

class TlsSocket final : public Socket {
 public:
  TlsSocket(tcp::socket socket, ssl::context* context) : stream_(std::move(socket), *context) {}
  boost::asio::any_io_executor executor() override { return stream_.get_executor(); }
  void Handshake(std::function<void(error_code)> done) override {
    stream_.async_handshake(ssl::stream_base::server, std::move(done));
  }
  void Read(boost::asio::mutable_buffer buffer, Done done) override {
    stream_.async_read_some(buffer, std::move(done));
  }
  void Write(boost::asio::const_buffer bytes, Done done) override {
    stream_.async_write_some(bytes, std::move(done));
  }
  void EndWrites(std::function<void()> done) override {
    stream_.async_shutdown([this, done = std::move(done)](error_code) {
      EndSending(stream_.next_layer());
      done();
    });
  }
  void Close() override { CloseNow(stream_.next_layer()); }

 private:
  ssl::stream<tcp::socket> stream_;
};

absl::Status Unusable(const char* what, const std::string& path, const error_code& error) {
  return absl::InvalidArgumentError(
      absl::StrCat("tls ", what, " ", path, " cannot be used: ", error.message()));
}

}  // namespace

std::unique_ptr<Socket> MakeSocket(tcp::socket socket, ssl::context* tls) {
  error_code ignored;  // only slower
  socket.set_option(tcp::no_delay(true), ignored);
  socket.set_option(boost::asio::socket_base::keep_alive(true), ignored);
  socket.set_option(boost::asio::socket_base::send_buffer_size(kSendBufferBytes), ignored);
  if (tls == nullptr) return std::make_unique<PlainSocket>(std::move(socket));
  return std::make_unique<TlsSocket>(std::move(socket), tls);
}

absl::StatusOr<std::shared_ptr<ssl::context>> MakeTlsContext(const service::TlsOptions& tls) {
  if (!tls.enabled()) return nullptr;
  auto context = std::make_shared<ssl::context>(ssl::context::tls_server);
  error_code error;
  context->set_options(ssl::context::default_workarounds | ssl::context::no_sslv2 |
                           ssl::context::no_sslv3 | ssl::context::no_tlsv1 |
                           ssl::context::no_tlsv1_1,
                       error);
  context->use_certificate_chain_file(tls.cert_file, error);
  if (error) return Unusable("certificate", tls.cert_file, error);
  context->use_private_key_file(tls.key_file, ssl::context::pem, error);
  if (error) return Unusable("key", tls.key_file, error);
  if (!tls.ca_file.empty()) {
    context->load_verify_file(tls.ca_file, error);
    if (error) return Unusable("ca", tls.ca_file, error);
    context->set_verify_mode(ssl::verify_peer | ssl::verify_fail_if_no_peer_cert, error);
  }
  // Sessions that are resumed need a name when clients are verified.
  static constexpr unsigned char kSessions[] = "ferry";
  SSL_CTX_set_session_id_context(context->native_handle(), kSessions, sizeof(kSessions) - 1);
  return context;
}

}  // namespace router::http
