#include "ferry/v1/worker.pb.h"
#include "worker/worker_runtime.h"

namespace worker {

void FillGroupBytes(const model::GroupBytes& group, ferry::v1::CacheGroupBytes* out) {
  out->set_name(group.name);
  out->set_useful_bytes(group.useful);
  out->set_padding_bytes(group.padding);
}

void FillRuntimeInfo(const WorkerRuntime& runtime, ferry::v1::WorkerInfo* info) {
  info->set_epoch(runtime.epoch.ToBytes());
  info->set_model(runtime.model_name);
  info->set_tokenizer_hash(runtime.tokenizer_hash);
  FillLayoutRecord(runtime, info->mutable_layout());
  info->set_block_size(runtime.block_size());
  info->set_block_bytes(runtime.block_bytes());
  info->set_num_blocks(runtime.pool->num_blocks() - 1);
  info->set_num_state_slots(runtime.num_state_slots());
  info->set_snapshot_blocks(runtime.snapshots.every_blocks);
  for (const model::GroupBytes& group :
       runtime.engine->cache_layout().BytesOf(0, runtime.block_size(), /*state_slot=*/false)) {
    FillGroupBytes(group, info->add_block_groups());
  }
  info->set_max_model_len(runtime.engine->network().max_model_len());
  info->set_vocab_size(runtime.engine->network().config().vocab_size);
  info->set_hash_seed(runtime.options.hash_seed);
  info->set_tp_rank(0);
  info->set_tp_size(1);
  for (const kv_transfer::LinkAddress& link : runtime.transport->addresses()) {
    info->add_transports(link.kind);
    info->set_host_id(link.host_id);  // the same for all of them
  }
  info->set_cache_path(runtime.cache_path);
  info->set_cancel_during_transfer(true);
  info->set_prefill_tokens_per_s(runtime.speed.prefill_tokens_per_s);
  info->set_prefill_s_per_token2(runtime.speed.prefill_s_per_token2);
  info->set_decode_step_ms(runtime.speed.decode_step_ms);
  info->set_decode_step_ms_per_seq(runtime.speed.decode_step_ms_per_seq);
  info->set_version(service::kVersion);
}

}  // namespace worker
