#include "ferry/v1/worker.pb.h"
#include "model/cache_spec.h"
#include "worker/worker_runtime.h"

namespace worker {
namespace {

constexpr uint32_t kSchema = 1;

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
  record->set_fingerprint(runtime.layout_fingerprint);
}

}  // namespace worker
