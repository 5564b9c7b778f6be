// CacheSpec: what a model wants to keep per token, as paged groups, and the one layout of its
// bytes.
//
// Token blocks are block-major: [block][group][layer][entries], every (group, layer) at an offset
// aligned to 256 bytes, so that a block is one contiguous piece to send.  Allocation, sharing,
// eviction and transfer know nothing of groups.  Block 0 is reserved and never written.
// State slots (V4) are a second pool of fixed-size slots, one per sequence; slot 0 is reserved and
// always zero.
//
// Plain values.

#ifndef MODEL_CACHE_SPEC_H_
#define MODEL_CACHE_SPEC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/tensor.h"
#include "model/config.h"

namespace model {

inline constexpr int64_t kCacheAlignment = 256;  // bytes

struct CacheGroup {
  std::string name;  // "latent", "index_key", "csa", "hca", "csa_index_key"
  int32_t layers = 0;
  int32_t entry_bytes = 0;
  int32_t tokens_per_entry = 1;
  kernels::KvFormat format = kernels::KvFormat::kFloat32;
  int32_t block_multiple = 1;  // a layer's bytes in a block are padded to a multiple of it
};

// How entries are stored: --kv_cache_dtype.
enum class KvCacheDtype : uint8_t { kFloat32, kBfloat16, kFp8 };
// "float32", "bfloat16", "fp8".
std::string_view KvCacheDtypeName(KvCacheDtype dtype);

struct CacheSpec {
  int32_t block_size = 64;  // tokens; a multiple of 64 and of every tokens_per_entry
  std::vector<CacheGroup> groups;
  int64_t state_slot_bytes = 0;  // 0: the model keeps no state per sequence

  // Errors: kInvalidArgument naming the field that cannot be.
  absl::Status Validate() const;
};

// The format of a group whose fp8 form is `fp8`.
kernels::KvFormat FormatOf(KvCacheDtype dtype, kernels::KvFormat fp8);

// A group of entries of `dim` values and `rope_dim` rotary ones, one a token.
CacheGroup MakeCacheGroup(std::string name, int32_t layers, kernels::KvFormat format, int32_t dim,
                          int32_t rope_dim);

// Tokens of a block where nobody asks for another size: 64, with V4's entries of several tokens 256
// or the next multiple that every entry divides.
int32_t DefaultBlockSize(const ModelConfig& config);

// What `config`'s network keeps.
CacheSpec MakeCacheSpec(const ModelConfig& config, KvCacheDtype dtype, int32_t block_size);

// What bytes of a cache are.
struct GroupBytes {
  std::string name;      // of the group; kStateName: of the state slot
  uint64_t useful = 0;   // entries of tokens
  uint64_t padding = 0;  // between and behind them
};
inline constexpr char kStateName[] = "state";

// Offsets within a block, from a valid spec.
class CacheLayout final {
 public:
  explicit CacheLayout(CacheSpec spec);

  const CacheSpec& spec() const { return spec_; }
  int64_t block_bytes() const { return block_bytes_; }
  int64_t layer_stride_bytes(int32_t group) const { return layer_stride_[group]; }
  int64_t offset(int32_t group, int32_t layer) const {
    return group_offset_[group] + layer * layer_stride_[group];
  }
  // Of a (layer, block) of a group: what its entries take, without padding.
  int64_t used_bytes(int32_t group) const {
    const CacheGroup& g = spec_.groups[group];
    return int64_t{spec_.block_size / g.tokens_per_entry} * g.entry_bytes;
  }
  int64_t bytes_per_token() const { return block_bytes_ / spec_.block_size; }
  // What the whole blocks are that hold tokens [begin, end) of a sequence, group by group: entries
  // whose tokens are all there, and the rest.  With `state_slot` also what a state slot is.
  // REQUIRES: begin is a multiple of block_size.
  std::vector<GroupBytes> BytesOf(int64_t begin, int64_t end, bool state_slot) const;

  // Pages of one (group, layer) of a cache that starts at `cache_base` (block 0).
  kernels::KvPages Pages(std::byte* cache_base, int32_t group, int32_t layer) const;

 private:
  CacheSpec spec_;
  std::vector<int64_t> group_offset_;
  std::vector<int64_t> layer_stride_;
  int64_t block_bytes_ = 0;
};

// 16 bytes over a canonical record of model, weights digest and layout (serving.md 5.3): equal
// means that cache bytes are interchangeable.  `weights` is Network::weights_digest().
std::string LayoutFingerprint(const CacheLayout& layout, const std::string& model_name,
                              const std::string& weights);

// "float32", "bfloat16", "fp8_latent", ...: in layout records.
std::string_view KvFormatName(kernels::KvFormat format);

}  // namespace model

#endif  // MODEL_CACHE_SPEC_H_
