#include "kv_transfer/ucx_worker.h"

#include <sys/statvfs.h>
#include <ucs/debug/debug.h>
#include <ucs/debug/log_def.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kv_transfer/host_id.h"
#include "kv_transfer/sealed_address.h"
#include "kv_transfer/socket_address.h"
#include "kv_transfer/ucx_config.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace kv_transfer {
namespace {

// UCX takes its buffers for shared memory from here when it is there, and from System V segments
// when it is not.
std::string SharedMemoryRoom() {
  struct statvfs room {};
  if (statvfs("/dev/shm", &room) != 0) return absl::StrCat("/dev/shm: ", std::strerror(errno));
  const bool read_only = (room.f_flag & ST_RDONLY) != 0;
  return absl::StrCat("/dev/shm ", read_only ? "is read-only and " : "", "has ",
                      room.f_bavail * room.f_frsize,
                      " bytes free, a process needs about 5000000; tcp needs none");
}

// UCX writes its messages to standard output, which belongs to the program.
ucs_log_func_rc_t LogToStandardError(const char*, unsigned, const char*, ucs_log_level_t level,
                                     const ucs_log_component_config_t*, const char* message,
                                     va_list arguments) {
  char text[1024];
  std::vsnprintf(text, sizeof(text), message, arguments);
  std::fprintf(stderr, "ucx %s: %s\n", level < UCS_LOG_LEVEL_LAST ? ucs_log_level_names[level] : "",
               text);
  return UCS_LOG_FUNC_RC_STOP;
}

// What UCX does to a process when it is loaded and Ferry does not want: handlers for signals
// (crashes are the process's own business) and messages on standard output.
void TameUcx() {
  static const bool once = [] {
    ucs_log_push_handler(&LogToStandardError);
    for (const int signal : {SIGILL, SIGSEGV, SIGBUS, SIGFPE}) {
      struct sigaction now {};
      // Newer ones leave signals alone, and warn of whoever disables what they have not set.
      if (sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) continue;
      ucs_debug_disable_signal(signal);
    }
    return true;
  }();
  (void)once;
}

}  // namespace

UcxWorker::UcxWorker(const std::string& kind, const UcxOptions& options, const Handlers& handlers)
    : kind_(kind),
      host_id_(HostId()),
      options_(options),
      handlers_(handlers),
      knows_device_memory_(kind == "shm" && options.device_memory) {}

absl::StatusOr<std::unique_ptr<UcxWorker>> UcxWorker::Create(const std::string& kind,
                                                             const UcxOptions& options,
                                                             const Handlers& handlers) {
  TameUcx();
  std::unique_ptr<UcxWorker> worker(new UcxWorker(kind, options, handlers));
  RETURN_IF_ERROR(worker->Init());
  return worker;
}

UcxWorker::~UcxWorker() { Destroy(); }

void UcxWorker::Destroy() {
  probe_.Close();
  if (worker_ != nullptr) {
    // A closed endpoint is taken apart a little later, and destroying the worker before that is
    // done ends in an assertion of UCX.  With all endpoints closed a flush waits for nothing else.
    ucp_request_param_t param{};
    const ucs_status_ptr_t flush = ucp_worker_flush_nbx(worker_, &param);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (UCS_PTR_IS_PTR(flush) && ucp_request_check_status(flush) == UCS_INPROGRESS &&
           std::chrono::steady_clock::now() < deadline) {
      ucp_worker_progress(worker_);
    }
    if (UCS_PTR_IS_PTR(flush)) ucp_request_free(flush);
  }
  for (const ucp_mem_h memory : std::exchange(registered_, {})) ucp_mem_unmap(context_, memory);
  if (listener_ != nullptr) ucp_listener_destroy(std::exchange(listener_, nullptr));
  if (worker_ != nullptr) ucp_worker_destroy(std::exchange(worker_, nullptr));
  if (context_ != nullptr) ucp_cleanup(std::exchange(context_, nullptr));
}

absl::Status UcxWorker::Renew() {
  Destroy();
  const absl::Status status = Init();
  blocked_ = !status.ok();
  if (blocked_) Destroy();
  return status;
}

bool UcxWorker::Progress(InboxProbe::Clock::time_point now) {
  if (worker_ == nullptr) return false;
  const bool worked = ucp_worker_progress(worker_) != 0;
  blocked_ = probe_.Blocked(now, !worked);
  return worked;
}

absl::Status UcxWorker::Init() {
  const std::string& kind = kind_;
  ASSIGN_OR_RETURN(const UcxConfig config, UcxConfigFor(kind, options_, knows_device_memory_));
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.name = "ferry";
  ucs_status_t status = ucp_init(&params, config.get(), &context_);
  if (status != UCS_OK) return UcxError(kind, "no such link here", status);

  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  // Created on one thread and used on another, never on two at once.
  worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  status = ucp_worker_create(context_, &worker_params, &worker_);
  if (status != UCS_OK && kind == "shm") {
    return UcxError(kind, absl::StrCat("creating a worker (", SharedMemoryRoom(), ")"), status);
  }
  if (status != UCS_OK) return UcxError(kind, "creating a worker", status);
  status = ucp_worker_get_efd(worker_, &event_fd_);
  if (status != UCS_OK) return UcxError(kind, "getting its event descriptor", status);

  RETURN_IF_ERROR(SetHandlers());

  ucp_address_t* raw = nullptr;
  size_t raw_bytes = 0;
  status = ucp_worker_get_address(worker_, &raw, &raw_bytes);
  if (status != UCS_OK) return UcxError(kind, "getting its address", status);
  const std::string worker_address(reinterpret_cast<const char*>(raw), raw_bytes);
  if (kind == "shm") status = probe_.Open(worker_, raw, kProbeAm);
  ucp_worker_release_address(worker_, raw);
  if (status != UCS_OK) return UcxError(kind, "connecting to itself", status);
  address_ = {.kind = kind,
              .host_id = host_id_,
              .worker_address = SealAddress(worker_address),
              .listener = ""};
  return kind == "shm" ? absl::OkStatus() : Listen();
}

absl::Status UcxWorker::SetHandlers() {
  const std::pair<unsigned, ucp_am_recv_callback_t> callbacks[] = {
      {kHelloAm, handlers_.on_hello}, {kMessageAm, handlers_.on_message}};
  for (const auto& [id, callback] : callbacks) {
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                         UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = id;
    handler.cb = callback;
    handler.arg = this;
    const ucs_status_t status = ucp_worker_set_am_recv_handler(worker_, &handler);
    if (status != UCS_OK) return UcxError(kind_, "setting a message handler", status);
  }
  return absl::OkStatus();
}

absl::Status UcxWorker::Listen() {
  ASSIGN_OR_RETURN(const SocketAddress wanted,
                   MakeSocketAddress(options_.listen_ip, options_.listen_port));
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr.addr = wanted.get();
  params.sockaddr.addrlen = wanted.length;
  params.conn_handler.cb = handlers_.on_connection;
  params.conn_handler.arg = this;
  const std::string where =
      absl::StrCat("listening on ", options_.listen_ip, " port ", options_.listen_port);
  ucs_status_t status = ucp_listener_create(worker_, &params, &listener_);
  if (status != UCS_OK) return UcxError(kind_, where, status);
  ucp_listener_attr_t attributes{};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  status = ucp_listener_query(listener_, &attributes);
  if (status != UCS_OK) return UcxError(kind_, where, status);
  SocketAddress bound;
  bound.storage = attributes.sockaddr;
  address_.listener = ToText(bound);
  return absl::OkStatus();
}

absl::Status UcxWorker::Register(absl::Span<std::byte> region) {
  if (kind_ != "rc") return absl::OkStatus();  // the others pin nothing
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = region.data();
  params.length = region.size();
  ucp_mem_h memory = nullptr;
  const ucs_status_t status = ucp_mem_map(context_, &params, &memory);
  if (status != UCS_OK) return UcxError(kind_, "registering memory", status);
  registered_.push_back(memory);
  return absl::OkStatus();
}

absl::StatusOr<ucp_ep_h> UcxWorker::CreateEndpoint(ucp_ep_params_t params,
                                                   ucp_err_handler_cb_t on_error,
                                                   void* on_error_arg) {
  params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = on_error;
  params.err_handler.arg = on_error_arg;
  ucp_ep_h endpoint = nullptr;
  const ucs_status_t status = ucp_ep_create(worker_, &params, &endpoint);
  if (status != UCS_OK) return UcxError(kind_, "creating an endpoint", status);
  return endpoint;
}

absl::StatusOr<ucp_ep_h> UcxWorker::ConnectTo(const LinkAddress& peer,
                                              ucp_err_handler_cb_t on_error, void* on_error_arg) {
  if (listener_ == nullptr) {
    return ConnectToWorker(peer.worker_address, on_error, on_error_arg);
  }
  ASSIGN_OR_RETURN(const SocketAddress address, ParseSocketAddress(peer.listener));
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr.addr = address.get();
  params.sockaddr.addrlen = address.length;
  return CreateEndpoint(params, on_error, on_error_arg);
}

absl::StatusOr<ucp_ep_h> UcxWorker::ConnectToWorker(const std::string& worker_address,
                                                    ucp_err_handler_cb_t on_error,
                                                    void* on_error_arg) {
  const absl::StatusOr<std::string> opened = OpenAddress(worker_address);
  if (!opened.ok()) {
    return absl::UnavailableError(
        absl::StrCat("ucx ", kind_, ": ", std::string(opened.status().message())));
  }
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
  params.address = reinterpret_cast<const ucp_address_t*>(opened->data());
  return CreateEndpoint(params, on_error, on_error_arg);
}

absl::StatusOr<ucp_ep_h> UcxWorker::Accept(ucp_conn_request_h request,
                                           ucp_err_handler_cb_t on_error, void* on_error_arg) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  return CreateEndpoint(params, on_error, on_error_arg);
}

bool UcxWorker::TakesDeviceMemory(ucp_ep_h endpoint) const {
  // Without this transport UCX moves it too, in small pieces and slower than staged.
  return knows_device_memory_ && absl::StrContains(LinkName(endpoint), "cuda_ipc");
}

std::string UcxWorker::LinkName(ucp_ep_h endpoint) const {
  // UCX 1.13 tells the transports of an endpoint only in its printed description, in lines such as
  // "#   lane[0]:  2:tcp/lo.0 md[1] ...".
  char* text = nullptr;
  size_t bytes = 0;
  std::FILE* const stream = open_memstream(&text, &bytes);
  FERRY_CHECK(stream != nullptr) << "out of memory";
  ucp_ep_print_info(endpoint, stream);
  std::fclose(stream);
  std::set<std::string> names;
  for (const auto line : absl::StrSplit(std::string(text, bytes), '\n')) {
    const std::string one(line);
    if (one.find("lane[") == std::string::npos) continue;
    const size_t slash = one.find('/');
    const size_t start = one.rfind(':', slash);
    const size_t end = one.find_first_of(". ", slash);
    if (slash == std::string::npos || start == std::string::npos || end == std::string::npos) {
      continue;
    }
    // Of shared memory the transport tells something, of a network the device.
    names.insert(kind_ == "shm" ? one.substr(start + 1, slash - start - 1)
                                : one.substr(slash + 1, end - slash - 1));
  }
  std::free(text);
  std::string joined;
  for (const std::string& name : names) absl::StrAppend(&joined, joined.empty() ? "" : "+", name);
  return absl::StrCat(kind_, "/", joined);
}

}  // namespace kv_transfer
