#include "pairing/pair_check.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ferry/v1/kv_transfer.pb.h"
#include "ferry/v1/worker.pb.h"
#include "status/grpc_status.h"

namespace pairing {
namespace {

absl::Status Incompatible(const std::string& words) {
  return status::WithReason(absl::FailedPreconditionError(words), status::kIncompatible);
}

std::string Kinds(const std::vector<Link>& links) {
  if (links.empty()) return "none";
  return absl::StrJoin(links, ",",
                       [](std::string* out, const Link& link) { out->append(link.kind); });
}

bool CanLink(const Link& a, const Link& b) {
  return a.kind == b.kind && (a.kind != "shm" || a.host_id == b.host_id);
}

bool HasShm(const Profile& profile) {
  return std::any_of(profile.links.begin(), profile.links.end(),
                     [](const Link& link) { return link.kind == "shm"; });
}

std::string OrNothing(const std::string& value) { return value.empty() ? "nothing" : value; }

}  // namespace

std::vector<Field> LayoutFields(const ferry::v1::LayoutRecord& record) {
  std::vector<Field> fields;
  const auto add = [&fields](const std::string& name, const auto& value) {
    fields.push_back({name, absl::StrCat(value)});
  };
  add("layout schema", record.schema());
  add("model", record.model());
  add("weights digest", record.weights());
  add("block_size", record.block_size());
  add("number of cache groups", record.groups_size());
  for (int i = 0; i < record.groups_size(); ++i) {
    const ferry::v1::LayoutGroup& group = record.groups(i);
    add(absl::StrCat("name of cache group ", i), group.name());
    const auto of_group = [&](const char* name, const auto& value) {
      add(absl::StrCat(name, " of cache group ", group.name()), value);
    };
    of_group("kv_cache_dtype", group.format());
    of_group("layers", group.layers());
    of_group("entry_bytes", group.entry_bytes());
    of_group("tokens_per_entry", group.tokens_per_entry());
    of_group("layer_stride_bytes", group.layer_stride_bytes());
  }
  add("block_bytes", record.block_bytes());
  add("state_slot_bytes", record.state_slot_bytes());
  add("byte_order", record.byte_order());
  add("layout fingerprint", absl::BytesToHexString(record.fingerprint()));
  return fields;
}

Profile ProfileOf(const ferry::v1::WorkerInfo& info, std::string name) {
  Profile profile = {.name = std::move(name), .layout = LayoutFields(info.layout()), .links = {}};
  for (const std::string& kind : info.transports()) {
    profile.links.push_back({.kind = kind, .host_id = info.host_id()});
  }
  return profile;
}

Profile ProfileOf(const ferry::v1::HandshakeRequest& request, std::string name) {
  Profile profile = {
      .name = std::move(name), .layout = LayoutFields(request.layout()), .links = {}};
  for (const ferry::v1::LinkAddress& link : request.links()) {
    profile.links.push_back({.kind = link.kind(), .host_id = link.host_id()});
  }
  return profile;
}

absl::Status CheckPair(const Profile& prefill, const Profile& decode) {
  const std::vector<Field>& ours = prefill.layout;
  const std::vector<Field>& theirs = decode.layout;
  const size_t common = std::min(ours.size(), theirs.size());
  for (size_t i = 0; i < common; ++i) {
    // Another name at the same place follows from a value that was compared before it.
    if (ours[i] == theirs[i]) continue;
    return Incompatible(absl::StrCat(ours[i].name, " is ", OrNothing(ours[i].value), " at ",
                                     prefill.name, " and ", OrNothing(theirs[i].value), " at ",
                                     decode.name));
  }
  for (const Link& a : prefill.links) {
    for (const Link& b : decode.links) {
      if (CanLink(a, b)) return absl::OkStatus();
    }
  }
  const bool apart = HasShm(prefill) && HasShm(decode);
  return Incompatible(absl::StrCat(
      "no data link in common: --links is ", Kinds(prefill.links), " at ", prefill.name, " and ",
      Kinds(decode.links), " at ", decode.name,
      apart ? ", and shm links only processes of one host, IPC namespace and user" : ""));
}

}  // namespace pairing
