#include "cli/inspect_command.h"

#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "model/cache_spec.h"
#include "model/config.h"
#include "model/safetensors.h"
#include "model/weights.h"
#include "status/status_macros.h"

namespace cli {
namespace {

// 1234567 -> "1.2 MB".
std::string Bytes(int64_t bytes) {
  const char* const units[] = {"B", "kB", "MB", "GB", "TB"};
  auto value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1000 && unit < 4; ++unit) value /= 1000;
  return unit == 0 ? absl::StrCat(bytes, " B") : absl::StrFormat("%.1f %s", value, units[unit]);
}

void PrintAttention(const model::ModelConfig& config, std::ostream& out) {
  if (config.family != model::ModelFamily::kDeepseekV4) {
    out << absl::StrFormat(
        "attention    %d heads, query and key %d + %d rotary, value %d; latent %d; query rank %s\n",
        config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim,
        config.v_head_dim, config.kv_lora_rank,
        config.q_lora_rank == 0 ? "full" : absl::StrCat(config.q_lora_rank));
    return;
  }
  out << absl::StrFormat(
      "attention    %d heads of %d + %d rotary, one key that is the value; query rank %d\n",
      config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim,
      config.q_lora_rank);
  out << absl::StrFormat(
      "layers       %d with a window of %d tokens only, %d with the best entries of %d tokens too, "
      "%d with all entries of %d\n",
      config.CountLayers(model::LayerType::kSlidingAttention), config.sliding_window,
      config.CountLayers(model::LayerType::kCompressedSparseAttention), config.csa_ratio,
      config.CountLayers(model::LayerType::kHeavilyCompressedAttention), config.hca_ratio);
}

void PrintShape(const model::ModelConfig& config, std::ostream& out) {
  int32_t moe_layers = 0;
  for (int32_t i = 0; i < config.num_hidden_layers; ++i) moe_layers += config.IsMoeLayer(i);
  out << absl::StrFormat("model        %s: %d layers (%d dense, %d of experts), hidden size %d\n",
                         config.model_type, config.num_hidden_layers,
                         config.num_hidden_layers - moe_layers, moe_layers, config.hidden_size);
  PrintAttention(config, out);
  if (config.index_topk > 0) {
    out << absl::StrFormat("indexer      %d heads of %d; %d keys attended\n", config.index_n_heads,
                           config.index_head_dim, config.index_topk);
  }
  if (moe_layers > 0) {
    out << absl::StrFormat("experts      %d routed, %d a token, %d shared, intermediate size %d\n",
                           config.gate.num_experts, config.gate.top_k, config.n_shared_experts,
                           config.moe_intermediate_size);
  }
  out << absl::StrFormat("context      %d tokens", config.max_position_embeddings);
  for (const model::RopeConfig& rope : {config.rope, config.compress_rope}) {
    if (!rope.yarn) continue;
    out << absl::StrFormat(" (YaRN: %g times %d)", rope.factor,
                           rope.original_max_position_embeddings);
  }
  out << absl::StrFormat(
      "; vocabulary %d; EOS %s\n", config.vocab_size,
      config.eos_token_ids.empty() ? "none" : absl::StrJoin(config.eos_token_ids, ", "));
}

void PrintTensors(const model::Checkpoint& checkpoint, std::ostream& out) {
  struct Total {
    int64_t tensors = 0;
    int64_t bytes = 0;
  };
  std::map<std::string, Total> by_dtype;
  std::set<std::string> files;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    Total& total = by_dtype[tensor.dtype_name];
    ++total.tensors;
    total.bytes += static_cast<int64_t>(tensor.data.size());
    files.insert(tensor.file);
  }
  out << absl::StrFormat("files        %d, %d tensors, %s\n", files.size(),
                         checkpoint.tensors().size(), Bytes(checkpoint.total_bytes()));
  for (const auto& [dtype, total] : by_dtype) {
    out << absl::StrFormat("  %-10s %d tensors, %s\n", dtype, total.tensors, Bytes(total.bytes));
  }
}

void PrintSummary(const model::CheckpointSummary& summary, std::ostream& out) {
  out << absl::StrFormat("weights      %d parameters in %d tensors, %s; complete\n",
                         summary.parameters, summary.used_tensors, Bytes(summary.used_bytes));
  out << absl::StrFormat("skipped      %d tensors (unknown, or layers for drafting)\n",
                         summary.skipped_tensors);
}

void PrintCache(const model::ModelConfig& config, std::ostream& out) {
  const int32_t block_size = model::DefaultBlockSize(config);
  for (const model::KvCacheDtype dtype :
       {model::KvCacheDtype::kFloat32, model::KvCacheDtype::kBfloat16, model::KvCacheDtype::kFp8}) {
    const model::CacheLayout layout(model::MakeCacheSpec(config, dtype, block_size));
    double bytes = 0;                  // a token
    std::vector<std::string> a_layer;  // by group
    for (const model::CacheGroup& group : layout.spec().groups) {
      bytes += double(group.entry_bytes) * group.layers / group.tokens_per_entry;
      a_layer.push_back(group.tokens_per_entry == 1
                            ? absl::StrCat(group.entry_bytes)
                            : absl::StrCat(group.entry_bytes, "/", group.tokens_per_entry));
    }
    out << absl::StrFormat(
        "KV cache     %-8s %.0f bytes a token (%s a layer), %d a block of %d tokens\n",
        std::string(model::KvCacheDtypeName(dtype)), bytes, absl::StrJoin(a_layer, " + "),
        layout.block_bytes(), block_size);
    // What a full block of every group is: entries and what lies between and behind them.
    std::vector<std::string> of_a_block;
    for (const model::GroupBytes& group : layout.BytesOf(0, block_size, /*state_slot=*/false)) {
      of_a_block.push_back(
          absl::StrFormat("%s %d useful + %d padding", group.name, group.useful, group.padding));
    }
    out << "             a block: " << absl::StrJoin(of_a_block, ", ") << "\n";
    if (const int64_t state = layout.spec().state_slot_bytes; state > 0) {
      out << absl::StrFormat("             and %s of state a sequence\n", Bytes(state));
    }
  }
}

}  // namespace

absl::Status InspectCheckpoint(const std::string& model_dir, std::ostream& out) {
  ASSIGN_OR_RETURN(const model::ModelConfig config, model::LoadModelConfig(model_dir));
  PrintShape(config, out);
  PrintCache(config, out);
  ASSIGN_OR_RETURN(const std::unique_ptr<model::Checkpoint> checkpoint,
                   model::Checkpoint::Open(model_dir));
  PrintTensors(*checkpoint, out);
  ASSIGN_OR_RETURN(const model::CheckpointSummary summary,
                   model::CheckCheckpoint(*checkpoint, config));
  PrintSummary(summary, out);
  return absl::OkStatus();
}

void AddInspectCommand(CLI::App& app, absl::Status* result) {
  auto model_dir = std::make_shared<std::string>();
  CLI::App* command =
      app.add_subcommand("inspect", "Show what is in a checkpoint and what its cache costs");
  command->add_option("--model", *model_dir, "Checkpoint directory")->required();
  command->callback([model_dir, result] { *result = InspectCheckpoint(*model_dir, std::cout); });
}

}  // namespace cli
