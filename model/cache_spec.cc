#include "model/cache_spec.h"

#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/store_kv.h"
#include "model/deepseek_v4_layout.h"
#include "xxhash.h"

namespace model {
namespace {

int64_t AlignUp(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

}  // namespace

std::string_view KvCacheDtypeName(KvCacheDtype dtype) {
  switch (dtype) {
    case KvCacheDtype::kFloat32:
      return "float32";
    case KvCacheDtype::kBfloat16:
      return "bfloat16";
    case KvCacheDtype::kFp8:
      return "fp8";
  }
  return "unknown";
}

kernels::KvFormat FormatOf(KvCacheDtype dtype, kernels::KvFormat fp8) {
  switch (dtype) {
    case KvCacheDtype::kFloat32:
      return kernels::KvFormat::kFloat32;
    case KvCacheDtype::kBfloat16:
      return kernels::KvFormat::kBfloat16;
    case KvCacheDtype::kFp8:
      return fp8;
  }
  return fp8;
}

CacheGroup MakeCacheGroup(std::string name, int32_t layers, kernels::KvFormat format, int32_t dim,
                          int32_t rope_dim) {
  return {.name = std::move(name),
          .layers = layers,
          .entry_bytes = kernels::KvEntryBytes(format, dim, rope_dim),
          .format = format,
          .block_multiple = kernels::KvBlockMultiple(format, dim, rope_dim)};
}

int32_t DefaultBlockSize(const ModelConfig& config) {
  if (config.family != ModelFamily::kDeepseekV4) return 64;
  const int32_t unit = std::lcm(std::lcm(64, config.csa_ratio), config.hca_ratio);
  return (256 + unit - 1) / unit * unit;
}

CacheSpec MakeCacheSpec(const ModelConfig& config, KvCacheDtype dtype, int32_t block_size) {
  if (config.family == ModelFamily::kDeepseekV4) {
    return DeepseekV4Layout(config, dtype, block_size).spec();
  }
  CacheSpec spec;
  spec.block_size = block_size;
  spec.groups.push_back(MakeCacheGroup("latent", config.num_hidden_layers,
                                       FormatOf(dtype, kernels::KvFormat::kFp8Latent),
                                       config.kv_lora_rank, config.qk_rope_head_dim));
  if (config.family == ModelFamily::kDeepseekV32) {
    spec.groups.push_back(MakeCacheGroup("index_key", config.num_hidden_layers,
                                         FormatOf(dtype, kernels::KvFormat::kFp8IndexKey),
                                         config.index_head_dim, /*rope_dim=*/0));
  }
  return spec;
}

absl::Status CacheSpec::Validate() const {
  if (block_size <= 0 || block_size % 64 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("block_size must be a positive multiple of 64, is ", block_size));
  }
  if (groups.empty()) return absl::InvalidArgumentError("a cache needs at least one group");
  for (const CacheGroup& group : groups) {
    if (group.layers <= 0 || group.entry_bytes <= 0 || group.tokens_per_entry <= 0 ||
        group.block_multiple <= 0 || block_size % group.tokens_per_entry != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("cache group ", group.name, " cannot be laid out: layers ", group.layers,
                       ", entry bytes ", group.entry_bytes, ", tokens per entry ",
                       group.tokens_per_entry, ", block size ", block_size));
    }
  }
  return absl::OkStatus();
}

CacheLayout::CacheLayout(CacheSpec spec) : spec_(std::move(spec)) {
  for (size_t i = 0; i < spec_.groups.size(); ++i) {
    const CacheGroup& group = spec_.groups[i];
    group_offset_.push_back(block_bytes_);
    const int64_t padded = AlignUp(used_bytes(static_cast<int32_t>(i)), group.block_multiple);
    layer_stride_.push_back(AlignUp(padded, kCacheAlignment));
    block_bytes_ += layer_stride_.back() * group.layers;
  }
}

std::vector<GroupBytes> CacheLayout::BytesOf(int64_t begin, int64_t end, bool state_slot) const {
  const int64_t blocks = AlignUp(end, spec_.block_size) / spec_.block_size - begin / spec_.block_size;
  std::vector<GroupBytes> all;
  for (size_t i = 0; i < spec_.groups.size(); ++i) {
    const CacheGroup& group = spec_.groups[i];
    const int64_t entries = end / group.tokens_per_entry - begin / group.tokens_per_entry;
    const int64_t useful = entries * group.entry_bytes * group.layers;
    all.push_back({.name = group.name,
                   .useful = static_cast<uint64_t>(useful),
                   .padding = static_cast<uint64_t>(blocks * layer_stride_[i] * group.layers - useful)});
  }
  if (state_slot) {
    all.push_back({.name = kStateName,
                   .useful = static_cast<uint64_t>(spec_.state_slot_bytes),
                   .padding = 0});
  }
  return all;
}

kernels::KvPages CacheLayout::Pages(std::byte* cache_base, int32_t group, int32_t layer) const {
  return {.base = cache_base + offset(group, layer),
          .block_stride = block_bytes_,
          .block_size = spec_.block_size / spec_.groups[group].tokens_per_entry,
          .entry_bytes = spec_.groups[group].entry_bytes,
          .format = spec_.groups[group].format};
}

std::string LayoutFingerprint(const CacheLayout& layout, const std::string& model_name,
                              const std::string& weights) {
  const CacheSpec& spec = layout.spec();
  std::string record = absl::StrCat("ferry-layout/1\n", model_name.size(), ":", model_name, "\n",
                                    weights, "\n", spec.block_size, " ", layout.block_bytes(), " ",
                                    spec.state_slot_bytes, " little\n");
  for (size_t i = 0; i < spec.groups.size(); ++i) {
    const CacheGroup& group = spec.groups[i];
    absl::StrAppend(&record, group.name, " ", group.layers, " ", group.entry_bytes, " ",
                    group.tokens_per_entry, " ", std::string(KvFormatName(group.format)), " ",
                    layout.layer_stride_bytes(static_cast<int32_t>(i)), "\n");
  }
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(record.data(), record.size()));
  return std::string(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest));
}

std::string_view KvFormatName(kernels::KvFormat format) {
  switch (format) {
    case kernels::KvFormat::kFloat32:
      return "float32";
    case kernels::KvFormat::kBfloat16:
      return "bfloat16";
    case kernels::KvFormat::kFp8Latent:
      return "fp8_latent";
    case kernels::KvFormat::kFp8IndexKey:
      return "fp8_index_key";
    case kernels::KvFormat::kFp8SharedKv:
      return "fp8_shared_kv";
  }
  return "unknown";
}

}  // namespace model
