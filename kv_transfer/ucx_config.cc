#include "kv_transfer/ucx_config.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kv_transfer/socket_address.h"
#include "status/status_macros.h"

namespace kv_transfer {
namespace {

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

// UCX_<component>_<name>=<value>; the component is empty for what is UCX's own.
struct Setting {
  const char* component;
  const char* name;
  std::string value;
  bool optional = false;  // not every UCX has it
};
using Settings = std::vector<Setting>;

// One keepalive interval does not suit both kinds: on shared memory it is what notices a dead peer
// (in about one interval), on sockets a short one keeps the kernel's own keepalive from noticing a
// silent cut.
absl::StatusOr<Settings> SettingsFor(const std::string& kind, const UcxOptions& options,
                                     bool device_memory) {
  if (kind == "shm") {
    Settings settings = {
        // Without "self", which would carry a probe past the queue that it is to test.
        {"", "TLS", device_memory ? "shm,cuda_copy,cuda_ipc" : "shm"},
        // Without the next two no endpoint with peer error handling uses shared memory (the first)
        // and copies between processes (the second), which are more than ten times as fast.
        {"", "MM_ERROR_HANDLING", "y"},
        {"CMA", "MEMORY_INVALIDATE", "y"},
        // The receiver copies out of the sender's memory: no other process ever writes into ours,
        // and what a stopped receiver has started is over when its own thread says so.
        {"", "RNDV_SCHEME", "get_zcopy"},
        {"", "KEEPALIVE_INTERVAL", "500ms"}};
    // By itself it has the sender write where it sees no NVLink.
    if (device_memory) settings.push_back({"CUDA_IPC", "ENABLE_GET_ZCOPY", "y", true});
    return settings;
  }
  if (kind == "tcp") {
    return Settings{{"", "TLS", "tcp"},
                    {"", "NET_DEVICES", TcpDevices(options)},
                    {"", "KEEPALIVE_INTERVAL", "10s"},
                    {"TCP", "KEEPIDLE", "1s"},
                    {"TCP", "KEEPINTVL", "1s"},
                    {"TCP", "KEEPCNT", "3"},
                    // UCX 1.13 dies on an assertion when a connection fails under an emulated put
                    // or a zero-copy send.  Sends through its buffers do not have that, and large
                    // ones make them as fast; of 512K one is twice as fast as of 256K or 1M.  Both
                    // sides of a connection need the same size.
                    {"TCP", "PUT_ENABLE", "n"},
                    {"", "ZCOPY_THRESH", "inf"},
                    {"TCP", "TX_SEG_SIZE", "512K"},
                    {"TCP", "RX_SEG_SIZE", "512K"}};
  }
  if (kind == "rc") {
    return Settings{{"", "TLS", "rc"},
                    {"", "NET_DEVICES", options.net_devices},
                    {"", "KEEPALIVE_INTERVAL", "10s"}};
  }
  return absl::InvalidArgumentError(
      absl::StrCat("link kind \"", kind, "\" is none of shm, tcp, rc"));
}

// UCX 1.13 has a component's settings without its name, and only warns, later, about one that it
// does not know; newer ones have them with it, and refuse others.
ucs_status_t Apply(const Setting& setting, ucp_config_t* config) {
  const ucs_status_t status = ucp_config_modify(config, setting.name, setting.value.c_str());
  if (status == UCS_OK || *setting.component == '\0') return status;
  return ucp_config_modify(config, absl::StrCat(setting.component, "_", setting.name).c_str(),
                           setting.value.c_str());
}

}  // namespace

absl::Status UcxError(const std::string& kind, const std::string& what, ucs_status_t status) {
  return absl::UnavailableError(
      absl::StrCat("ucx ", kind, ": ", what, ": ", ucs_status_string(status)));
}

bool UcxKnowsDeviceMemory() {
  ucp_config_t* config = nullptr;
  if (ucp_config_read(nullptr, nullptr, &config) != UCS_OK) return false;
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM;
  ucp_context_h context = nullptr;
  const ucs_status_t status = ucp_init(&params, config, &context);
  ucp_config_release(config);
  if (status != UCS_OK) return false;
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  const bool known = ucp_context_query(context, &attributes) == UCS_OK &&
                     (attributes.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0;
  ucp_cleanup(context);
  return known;
}

std::string UcxVersion() {
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  return absl::StrCat(major, ".", minor, ".", release);
}

absl::StatusOr<UcxConfig> UcxConfigFor(const std::string& kind, const UcxOptions& options,
                                       bool device_memory) {
  ASSIGN_OR_RETURN(const Settings settings, SettingsFor(kind, options, device_memory));
  ucp_config_t* raw = nullptr;
  const ucs_status_t read = ucp_config_read(nullptr, nullptr, &raw);
  if (read != UCS_OK) return UcxError(kind, "reading its configuration", read);
  UcxConfig config(raw, &ucp_config_release);
  for (const Setting& setting : settings) {
    const ucs_status_t status = Apply(setting, raw);
    if (status != UCS_OK && !setting.optional) return UcxError(kind, setting.name, status);
  }
  return config;
}

}  // namespace kv_transfer
