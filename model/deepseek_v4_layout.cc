#include "model/deepseek_v4_layout.h"

#include <utility>

#include "kernels/compress_kv.h"
#include "kernels/store_kv.h"

namespace model {
namespace {

using kernels::KvFormat;

constexpr int64_t kStateAlignment = 64;

int64_t AlignUp(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

}  // namespace

DeepseekV4Layout::DeepseekV4Layout(const ModelConfig& config, KvCacheDtype dtype,
                                   int32_t block_size)
    : window_(config.sliding_window), entry_format_(FormatOf(dtype, KvFormat::kFp8SharedKv)) {
  const int32_t nope = config.qk_nope_head_dim;
  const int32_t rope = config.qk_rope_head_dim;
  const LayerType csa = LayerType::kCompressedSparseAttention;
  const LayerType hca = LayerType::kHeavilyCompressedAttention;
  entry_bytes_ = kernels::KvEntryBytes(entry_format_, nope, rope);
  spec_.block_size = block_size;
  // Returns the group's index; -1 if no layer has it.
  const auto add = [&](CacheGroup group, int32_t tokens_per_entry) {
    if (group.layers == 0) return -1;
    group.tokens_per_entry = tokens_per_entry;
    spec_.groups.push_back(std::move(group));
    return static_cast<int32_t>(spec_.groups.size()) - 1;
  };
  csa_group_ = add(MakeCacheGroup("csa", config.CountLayers(csa), entry_format_, nope, rope),
                   config.csa_ratio);
  hca_group_ = add(MakeCacheGroup("hca", config.CountLayers(hca), entry_format_, nope, rope),
                   config.hca_ratio);
  index_group_ = add(MakeCacheGroup("csa_index_key", config.CountLayers(csa),
                                    FormatOf(dtype, KvFormat::kFp8IndexKey), config.index_head_dim,
                                    /*rope_dim=*/0),
                     config.csa_ratio);

  int32_t num_csa = 0;
  int32_t num_hca = 0;
  int64_t size = 0;
  const auto take = [&](int64_t bytes) {
    const int64_t offset = size;
    size += AlignUp(bytes, kStateAlignment);
    return offset;
  };
  for (const LayerType type : config.layer_types) {
    LayerState& state = states_.emplace_back();
    state.window = take(int64_t{window_} * entry_bytes_);
    if (type != LayerType::kSlidingAttention) {
      state.compressor = take(kernels::CompressStateBytes(nope + rope, /*overlap=*/type == csa));
    }
    if (type == csa) {
      state.index_compressor =
          take(kernels::CompressStateBytes(config.index_head_dim, /*overlap=*/true));
    }
    group_.push_back(type == csa ? csa_group_ : type == hca ? hca_group_ : -1);
    layer_in_group_.push_back(type == csa ? num_csa++ : type == hca ? num_hca++ : -1);
  }
  spec_.state_slot_bytes = AlignUp(size, kCacheAlignment);
}

kernels::KvPages DeepseekV4Layout::Entries(const CacheLayout& layout, std::byte* cache,
                                           int32_t layer) const {
  return layout.Pages(cache, group_[layer], layer_in_group_[layer]);
}

kernels::KvPages DeepseekV4Layout::IndexKeys(const CacheLayout& layout, std::byte* cache,
                                             int32_t layer) const {
  return layout.Pages(cache, index_group_, layer_in_group_[layer]);
}

kernels::KvPages DeepseekV4Layout::Window(std::byte* state_slots, int32_t layer) const {
  return {.base = state_slots + states_[layer].window,
          .block_stride = spec_.state_slot_bytes,
          .block_size = window_,
          .entry_bytes = entry_bytes_,
          .format = entry_format_};
}

kernels::KvPages DeepseekV4Layout::WindowBuffer(std::byte* memory, int32_t num_entries) const {
  return {.base = memory,
          .block_stride = WindowBufferBytes(num_entries),
          .block_size = num_entries,
          .entry_bytes = entry_bytes_,
          .format = entry_format_};
}

int64_t DeepseekV4Layout::WindowBufferBytes(int32_t num_entries) const {
  return AlignUp(int64_t{num_entries} * entry_bytes_, kCacheAlignment);
}

}  // namespace model
