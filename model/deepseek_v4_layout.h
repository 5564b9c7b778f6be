// DeepseekV4Layout: where a V4 network keeps what it remembers of a sequence.
//
// Paged groups, one for each kind of entry that some layer has:
//   csa            an entry of csa_ratio tokens, head_dim values, in every CSA layer
//   hca            an entry of hca_ratio tokens, head_dim values, in every HCA layer
//   csa_index_key  an index key for every csa entry, index_head_dim values
//
// A state slot, layer after layer, every piece aligned to 64 bytes:
//   window         a ring of sliding_window entries in the cache's format, the one of position p at
//                  p mod sliding_window
//   compressor     kernels/compress_kv.h, of the layer's entries
//   index          the same, of the index keys (CSA)
// V4-Flash in fp8: 43 * 74,752 bytes of windows, 21 * 15,360 and 20 * 6,144 of compressors: 3.66 MB
// (models.md 10.2 counts the compressors' tokens, 12.2 MB, where these are their sums).
//
// Plain values.  Source: models.md 7.7, 9.3; DESIGN.md 3.

#ifndef MODEL_DEEPSEEK_V4_LAYOUT_H_
#define MODEL_DEEPSEEK_V4_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/tensor.h"
#include "model/cache_spec.h"
#include "model/config.h"

namespace model {

class DeepseekV4Layout final {
 public:
  DeepseekV4Layout(const ModelConfig& config, KvCacheDtype dtype, int32_t block_size);

  const CacheSpec& spec() const { return spec_; }

  // Pages of a layer's entries and index keys.  `layout` is one of spec().
  kernels::KvPages Entries(const CacheLayout& layout, std::byte* cache, int32_t layer) const;
  kernels::KvPages IndexKeys(const CacheLayout& layout, std::byte* cache, int32_t layer) const;

  // The window of a layer: block s is that of slot s.
  kernels::KvPages Window(std::byte* state_slots, int32_t layer) const;
  // Pages of the same entries for a chunk, in memory of WindowBufferBytes.
  kernels::KvPages WindowBuffer(std::byte* memory, int32_t num_entries) const;
  int64_t WindowBufferBytes(int32_t num_entries) const;
  // Of a layer's compressors within a slot.
  int64_t compressor_offset(int32_t layer) const { return states_[layer].compressor; }
  int64_t index_compressor_offset(int32_t layer) const { return states_[layer].index_compressor; }

 private:
  struct LayerState {
    int64_t window = 0;
    int64_t compressor = 0;
    int64_t index_compressor = 0;
  };

  const int32_t window_;
  kernels::KvFormat entry_format_;
  int32_t entry_bytes_ = 0;
  CacheSpec spec_;
  int32_t csa_group_ = -1;
  int32_t hca_group_ = -1;
  int32_t index_group_ = -1;
  std::vector<int32_t> group_;           // of a layer's entries; -1: none
  std::vector<int32_t> layer_in_group_;  // [num_hidden_layers]
  std::vector<LayerState> states_;       // [num_hidden_layers]
};

}  // namespace model

#endif  // MODEL_DEEPSEEK_V4_LAYOUT_H_
