#include "router/http/http_server.h"

#include <spdlog/spdlog.h>

#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <condition_variable>
#include <future>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "router/http/connection.h"
#include "service/listen_address.h"
#include "service/process.h"
#include "status/status_macros.h"

namespace router::http {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

// When no file is left for another connection.
constexpr std::chrono::milliseconds kAcceptPause{100};

absl::Status CannotListen(const std::string& address, const error_code& error) {
  return absl::UnavailableError(absl::StrCat("cannot listen on ", address, ": ", error.message()));
}

}  // namespace

class HttpServer::Impl final {
 public:
  Impl(const ServerOptions& options, Handler handler)
      : options_(options),
        handler_(std::move(handler)),
        acceptor_(asio::make_strand(context_)),
        pause_(acceptor_.get_executor()) {}

  absl::Status Listen() {
    ASSIGN_OR_RETURN(tls_, MakeTlsContext(options_.tls));
    ASSIGN_OR_RETURN(const service::HostPort own, service::ParseListenAddress(options_.listen));
    error_code error;
    tcp::resolver resolver(context_);
    const auto found =
        resolver.resolve(own.host, std::to_string(own.port), tcp::resolver::passive, error);
    if (error || found.empty()) return CannotListen(options_.listen, error);
    const tcp::endpoint endpoint = *found.begin();
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(asio::socket_base::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (error) return CannotListen(options_.listen, error);
    port_ = acceptor_.local_endpoint(error).port();
    return absl::OkStatus();
  }

  void Start() {
    asio::post(acceptor_.get_executor(), [this] { Accept(); });
    for (int32_t i = 0; i < options_.num_threads; ++i) {
      threads_.emplace_back([this] { context_.run(); });
    }
  }

  int32_t port() const { return port_; }
  int64_t num_connections() const { return num_connections_; }

  void Retire() {
    if (threads_.empty()) return;
    std::promise<void> closed;
    asio::post(acceptor_.get_executor(), [this, &closed] {
      error_code ignored;
      acceptor_.close(ignored);
      pause_.cancel();
      closed.set_value();
    });
    closed.get_future().wait();
    ForEach([](Connection& connection) { connection.Drain(); });
  }

  void Shutdown(absl::Duration grace) {
    if (threads_.empty()) return;
    Retire();
    if (!WaitForNone(grace)) {
      ForEach([](Connection& connection) { connection.Close(); });
      WaitForNone(absl::InfiniteDuration());
    }
    work_.reset();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  void Accept() {
    if (!acceptor_.is_open()) return;
    acceptor_.async_accept(asio::make_strand(context_), [this](error_code error,
                                                               tcp::socket socket) {
      if (error == asio::error::operation_aborted) return;
      if (error) {
        spdlog::warn("http connection not accepted cause={}", service::LogValue(error.message()));
        pause_.expires_after(kAcceptPause);
        pause_.async_wait([this](error_code) { Accept(); });
        return;
      }
      if (num_connections_ >= options_.max_connections) {
        TurnAway(std::move(socket));
      } else {
        Open(std::move(socket));
      }
      Accept();
    });
  }

  void TurnAway(tcp::socket socket) {
    if (options_.on_response != nullptr) options_.on_response("", 503);
    if (tls_ != nullptr) return;
    const std::string body =
        options_.error_body == nullptr
            ? ""
            : options_.error_body(
                  503, absl::StrCat(options_.max_connections, " connections are open, no more"));
    const std::string response = absl::StrCat(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        "connection: close\r\ncontent-length: ",
        body.size(), "\r\n\r\n", body);
    error_code ignored;
    socket.non_blocking(true, ignored);
    socket.write_some(asio::buffer(response), ignored);
  }

  void Open(tcp::socket socket) {
    const int64_t id = next_id_++;
    const auto connection = std::make_shared<Connection>(
        MakeSocket(std::move(socket), tls_.get()), &options_, handler_, [this, id] { Closed(id); });
    {
      const std::lock_guard lock(mutex_);
      connections_[id] = connection;
      ++num_connections_;
    }
    if (options_.on_connection != nullptr) options_.on_connection(1);
    connection->Start();
  }

  void Closed(int64_t id) {
    if (options_.on_connection != nullptr) options_.on_connection(-1);
    const std::lock_guard lock(mutex_);
    connections_.erase(id);
    --num_connections_;
    if (connections_.empty()) none_.notify_all();
  }

  template <typename Function>
  void ForEach(Function function) {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, connection] : connections_) {
      if (const auto open = connection.lock()) function(*open);
    }
  }

  bool WaitForNone(absl::Duration limit) {
    std::unique_lock lock(mutex_);
    const auto none = [this] { return connections_.empty(); };
    if (limit == absl::InfiniteDuration()) {
      none_.wait(lock, none);
      return true;
    }
    return none_.wait_for(lock, absl::ToChronoNanoseconds(limit), none);
  }

  const ServerOptions options_;
  const Handler handler_;
  std::shared_ptr<asio::ssl::context> tls_;  // null: plain
  asio::io_context context_;
  asio::executor_work_guard<asio::io_context::executor_type> work_ =
      asio::make_work_guard(context_);
  tcp::acceptor acceptor_;
  asio::steady_timer pause_;
  int32_t port_ = 0;
  std::atomic<int64_t> num_connections_{0};
  int64_t next_id_ = 0;  // of the acceptor's strand

  std::mutex mutex_;  // guards connections_
  std::condition_variable none_;
  std::map<int64_t, std::weak_ptr<Connection>> connections_;

  std::vector<std::thread> threads_;
};

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const ServerOptions& options,
                                                              Handler handler) {
  auto impl = std::make_unique<Impl>(options, std::move(handler));
  RETURN_IF_ERROR(impl->Listen());
  impl->Start();
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpServer::~HttpServer() { Shutdown(absl::ZeroDuration()); }
int32_t HttpServer::port() const { return impl_->port(); }
int64_t HttpServer::num_connections() const { return impl_->num_connections(); }
void HttpServer::Retire() { impl_->Retire(); }
void HttpServer::Shutdown(absl::Duration grace) { impl_->Shutdown(grace); }

}  // namespace router::http
