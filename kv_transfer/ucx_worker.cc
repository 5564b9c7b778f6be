#include "kv_transfer/ucx_worker.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
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

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kv_transfer/host_id.h"
#include "kv_transfer/sealed_address.h"
#include "kv_transfer/socket_address.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace kv_transfer {
namespace {

absl::Status UcxError(const std::string& kind, const std::string& what, ucs_status_t status) {
  return absl::UnavailableError(
      absl::StrCat("ucx ", kind, ": ", what, ": ", ucs_status_string(status)));
}

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

// The devices of the tcp link.  UCX listens on each, whatever the address of Ferry's own listener:
// so only on the interface that has this address, unless it is that of all.
std::string TcpDevices(const UcxOptions& options) {
  const absl::StatusOr<SocketAddress> wanted = MakeSocketAddress(options.listen_ip, 0);
  ifaddrs* first = nullptr;
  if (!wanted.ok() || wanted->get()->sa_family != AF_INET || getifaddrs(&first) != 0) {
    return options.net_devices;
  }
  const auto ip = [](const sockaddr* address) {
    return reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr;
  };
  std::string found = options.net_devices;
  for (const ifaddrs* one = first; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET) continue;
    // The loopback interface has all addresses of its network.
    const in_addr_t mask =
        (one->ifa_flags & IFF_LOOPBACK) != 0 ? ip(one->ifa_netmask) : ~in_addr_t{0};
    if (((ip(one->ifa_addr) ^ ip(wanted->get())) & mask) == 0) found = one->ifa_name;
  }
  freeifaddrs(first);
  return found;
}

using Settings = std::vector<std::pair<const char*, std::string>>;

// Keys are UCX's without their prefixes: "UCX_TCP_KEEPIDLE" is KEEPIDLE here, and another spelling
// is only warned about and ignored.  One keepalive interval does not suit both kinds: on shared
// memory it is what notices a dead peer (in about one interval), on sockets a short one keeps the
// kernel's own keepalive from noticing a silent cut.
absl::StatusOr<Settings> SettingsFor(const std::string& kind, const UcxOptions& options) {
  if (kind == "shm") {
    return Settings{
        // Without "self", which would carry a probe past the queue that it is to test.
        {"TLS", "shm"},
        // Without the next two no endpoint with peer error handling uses shared memory (the first)
        // and copies between processes (the second), which are more than ten times as fast.
        {"MM_ERROR_HANDLING", "y"},
        {"MEMORY_INVALIDATE", "y"},
        // The receiver copies out of the sender's memory: no other process ever writes into ours,
        // and what a stopped receiver has started is over when its own thread says so.
        {"RNDV_SCHEME", "get_zcopy"},
        {"KEEPALIVE_INTERVAL", "500ms"}};
  }
  if (kind == "tcp") {
    return Settings{{"TLS", "tcp"},
                    {"NET_DEVICES", TcpDevices(options)},
                    {"KEEPALIVE_INTERVAL", "10s"},
                    {"KEEPIDLE", "1s"},
                    {"KEEPINTVL", "1s"},
                    {"KEEPCNT", "3"},
                    // UCX 1.13 dies on an assertion when a connection fails under an emulated put
                    // or a zero-copy send.  Sends through its buffers do not have that, and large
                    // ones make them as fast; of 512K one is twice as fast as of 256K or 1M.  Both
                    // sides of a connection need the same size.
                    {"PUT_ENABLE", "n"},
                    {"ZCOPY_THRESH", "inf"},
                    {"TX_SEG_SIZE", "512K"},
                    {"RX_SEG_SIZE", "512K"}};
  }
  if (kind == "rc") {
    return Settings{
        {"TLS", "rc"}, {"NET_DEVICES", options.net_devices}, {"KEEPALIVE_INTERVAL", "10s"}};
  }
  return absl::InvalidArgumentError(
      absl::StrCat("link kind \"", kind, "\" is none of shm, tcp, rc"));
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
    for (const int signal : {SIGILL, SIGSEGV, SIGBUS, SIGFPE}) ucs_debug_disable_signal(signal);
    ucs_log_push_handler(&LogToStandardError);
    return true;
  }();
  (void)once;
}

}  // namespace

UcxWorker::UcxWorker(const std::string& kind, const UcxOptions& options, const Handlers& handlers)
    : kind_(kind), host_id_(HostId()), options_(options), handlers_(handlers) {}

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
  ASSIGN_OR_RETURN(const Settings settings, SettingsFor(kind, options_));

  ucp_config_t* config = nullptr;
  ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return UcxError(kind, "reading its configuration", status);
  for (const auto& [name, value] : settings) {
    status = ucp_config_modify(config, name, value.c_str());
    if (status != UCS_OK) {
      ucp_config_release(config);
      return UcxError(kind, name, status);
    }
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.name = "ferry";
  status = ucp_init(&params, config, &context_);
  ucp_config_release(config);
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
