#include "absl/strings/str_cat.h"
#include "ferry/v1/kv_transfer.pb.h"
#include "model/cache_spec.h"
#include "status/grpc_status.h"
#include "status/status_macros.h"
#include "worker/worker_runtime.h"

namespace worker {
namespace {

constexpr uint32_t kSchema = 1;

// Errors: kFailedPrecondition / INCOMPATIBLE in words.
template <typename T>
absl::Status MustBeEqual(const std::string& field, const T& ours, const T& theirs) {
  if (ours == theirs) return absl::OkStatus();
  return status::WithReason(
      absl::FailedPreconditionError(absl::StrCat("cache layouts differ: ", field, " is ", ours,
                                                 " here and ", theirs, " at the peer")),
      status::kIncompatible);
}

}  // namespace

void FillLayoutRecord(const WorkerRuntime& runtime, ferry::v1::LayoutRecord* record) {
  const model::CacheLayout& layout = runtime.engine->cache_layout();
  record->set_schema(kSchema);
  record->set_model(runtime.model_name);
  record->set_weights(runtime.engine->network().weights_digest());
  record->set_block_size(layout.spec().block_size);
  record->set_block_bytes(layout.block_bytes());
  record->set_state_slot_bytes(layout.spec().state_slot_bytes);
  for (size_t i = 0; i < layout.spec().groups.size(); ++i) {
    const model::CacheGroup& group = layout.spec().groups[i];
    ferry::v1::LayoutGroup* out = record->add_groups();
    out->set_name(group.name);
    out->set_layers(group.layers);
    out->set_entry_bytes(group.entry_bytes);
    out->set_tokens_per_entry(group.tokens_per_entry);
    out->set_format(std::string(model::KvFormatName(group.format)));
    out->set_layer_stride_bytes(layout.layer_stride_bytes(static_cast<int32_t>(i)));
  }
  record->set_byte_order("little");
}

absl::Status CheckLayout(const ferry::v1::LayoutRecord& ours,
                         const ferry::v1::LayoutRecord& theirs) {
  // The schema first: fields of another schema may mean something else.
  RETURN_IF_ERROR(MustBeEqual("schema", ours.schema(), theirs.schema()));
  RETURN_IF_ERROR(MustBeEqual("model", ours.model(), theirs.model()));
  RETURN_IF_ERROR(MustBeEqual("weights", ours.weights(), theirs.weights()));
  RETURN_IF_ERROR(MustBeEqual("block_size", ours.block_size(), theirs.block_size()));
  RETURN_IF_ERROR(MustBeEqual("number of groups", ours.groups_size(), theirs.groups_size()));
  for (int i = 0; i < ours.groups_size(); ++i) {
    const ferry::v1::LayoutGroup& a = ours.groups(i);
    const ferry::v1::LayoutGroup& b = theirs.groups(i);
    const std::string group = absl::StrCat("group ", i, " ");
    RETURN_IF_ERROR(MustBeEqual(group + "name", a.name(), b.name()));
    RETURN_IF_ERROR(MustBeEqual(group + "layers", a.layers(), b.layers()));
    RETURN_IF_ERROR(MustBeEqual(group + "format", a.format(), b.format()));
    RETURN_IF_ERROR(MustBeEqual(group + "entry_bytes", a.entry_bytes(), b.entry_bytes()));
    RETURN_IF_ERROR(
        MustBeEqual(group + "tokens_per_entry", a.tokens_per_entry(), b.tokens_per_entry()));
    RETURN_IF_ERROR(
        MustBeEqual(group + "layer_stride_bytes", a.layer_stride_bytes(), b.layer_stride_bytes()));
  }
  RETURN_IF_ERROR(MustBeEqual("block_bytes", ours.block_bytes(), theirs.block_bytes()));
  RETURN_IF_ERROR(
      MustBeEqual("state_slot_bytes", ours.state_slot_bytes(), theirs.state_slot_bytes()));
  return MustBeEqual("byte_order", ours.byte_order(), theirs.byte_order());
}

}  // namespace worker
