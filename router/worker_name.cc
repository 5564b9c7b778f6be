#include "router/worker_name.h"

#include <arpa/nameser.h>
#include <netdb.h>
#include <netinet/in.h>
#include <resolv.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <set>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "service/listen_address.h"

namespace router {
namespace {

constexpr char kScheme[] = "dns:///";
constexpr size_t kMaxAnswerBytes = 65535;  // of DNS over TCP

absl::Status Missing(const WorkerName& name, const std::string& why) {
  return absl::NotFoundError(absl::StrCat(name.text, " has no address: ", why));
}

absl::Status Unanswered(const WorkerName& name, const std::string& why) {
  return absl::UnavailableError(absl::StrCat(name.text, " cannot be looked up: ", why));
}

absl::StatusOr<std::set<std::string>> LookUpHosts(const WorkerName& name) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(name.host.c_str(), nullptr, &hints, &found);
  if (error == EAI_NONAME || error == EAI_NODATA) return Missing(name, gai_strerror(error));
  if (error == EAI_SYSTEM) {
    return Unanswered(name, std::generic_category().message(errno));
  }
  if (error != 0) return Unanswered(name, gai_strerror(error));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  std::set<std::string> addresses;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    char ip[NI_MAXHOST];
    if (getnameinfo(one->ai_addr, one->ai_addrlen, ip, sizeof(ip), nullptr, 0, NI_NUMERICHOST) ==
        0) {
      addresses.insert(service::HostPort{.host = ip, .port = name.port}.ToString());
    }
  }
  return addresses;
}

// One answer's SRV records.
std::set<std::string> ServicesIn(const ns_msg& answer) {
  constexpr int kPortAt = 4;  // priority, weight, port: two bytes each; then the target
  constexpr int kTargetAt = 6;
  std::set<std::string> addresses;
  for (int i = 0; i < ns_msg_count(answer, ns_s_an); ++i) {
    ns_rr record{};
    ns_msg copy = answer;
    if (ns_parserr(&copy, ns_s_an, i, &record) != 0 || ns_rr_type(record) != ns_t_srv ||
        ns_rr_rdlen(record) <= kTargetAt) {
      continue;
    }
    char target[NS_MAXDNAME];
    if (dn_expand(ns_msg_base(answer), ns_msg_end(answer), ns_rr_rdata(record) + kTargetAt, target,
                  sizeof(target)) <= 0) {
      continue;
    }
    const int32_t port = ns_get16(ns_rr_rdata(record) + kPortAt);
    // The target "." says that there is no such service.
    if (target[0] == 0 || port == 0) continue;
    addresses.insert(service::HostPort{.host = target, .port = port}.ToString());
  }
  return addresses;
}

absl::StatusOr<std::set<std::string>> LookUpServices(const WorkerName& name) {
  // Made anew each time, so that a changed resolv.conf is seen.
  struct __res_state state {};
  if (res_ninit(&state) != 0) return Unanswered(name, "resolv.conf cannot be used");
  const std::unique_ptr<struct __res_state, void (*)(res_state)> owner(&state, res_nclose);
  std::vector<unsigned char> bytes(kMaxAnswerBytes);
  const int length = res_nsearch(&state, name.host.c_str(), ns_c_in, ns_t_srv, bytes.data(),
                                 static_cast<int>(bytes.size()));
  if (length < 0) {
    const std::string why = hstrerror(state.res_h_errno);
    return state.res_h_errno == HOST_NOT_FOUND || state.res_h_errno == NO_DATA
               ? Missing(name, why)
               : Unanswered(name, why);
  }
  ns_msg answer{};
  if (ns_initparse(bytes.data(), length, &answer) != 0) {
    return Unanswered(name, "the answer is malformed");
  }
  return ServicesIn(answer);
}

}  // namespace

absl::StatusOr<WorkerName> ParseWorkerName(const std::string& text) {
  if (!absl::StartsWith(text, kScheme)) {
    const auto parsed = service::ParseListenAddress(text);
    if (!parsed.ok() || parsed->port == 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", text,
          "\" is not host:port with a port of 1 to 65535, dns:///name:port or dns:///_service"));
    }
    return WorkerName{.text = text};
  }
  WorkerName name = {.text = text, .kind = WorkerName::Kind::kServices};
  name.host = text.substr(sizeof(kScheme) - 1);
  if (absl::StartsWith(name.host, "_") && !absl::StrContains(name.host, ':')) return name;
  const auto parsed = service::ParseListenAddress(name.host);
  if (!parsed.ok() || parsed->port == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text,
                     "\" is neither dns:///name:port with a port of 1 to 65535 nor dns:///_service "
                     "(of SRV records, without a port)"));
  }
  name.kind = WorkerName::Kind::kHosts;
  name.host = parsed->host;
  name.port = parsed->port;
  return name;
}

absl::StatusOr<std::vector<std::string>> LookUp(const WorkerName& name) {
  const absl::StatusOr<std::set<std::string>> found =
      name.kind == WorkerName::Kind::kHosts ? LookUpHosts(name) : LookUpServices(name);
  if (!found.ok()) return found.status();
  if (found->empty()) return Missing(name, "the answer holds no record of this kind");
  return std::vector<std::string>(found->begin(), found->end());
}

}  // namespace router
