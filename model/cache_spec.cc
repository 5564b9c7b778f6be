#include "model/cache_spec.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "xxhash.h"

namespace model {
namespace {

int64_t AlignUp(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

}  // namespace

absl::Status CacheSpec::Validate() const {
  if (block_size <= 0 || block_size % 64 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("block_size must be a positive multiple of 64, is ", block_size));
  }
  if (groups.empty()) return absl::InvalidArgumentError("a cache needs at least one group");
  for (const CacheGroup& group : groups) {
    if (group.layers <= 0 || group.entry_bytes <= 0 || group.tokens_per_entry <= 0 ||
        block_size % group.tokens_per_entry != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "cache group ", group.name, " cannot be laid out: layers ", group.layers, ", entry bytes ",
          group.entry_bytes, ", tokens per entry ", group.tokens_per_entry, ", block size ", block_size));
    }
  }
  return absl::OkStatus();
}

CacheLayout::CacheLayout(CacheSpec spec) : spec_(std::move(spec)) {
  for (const CacheGroup& group : spec_.groups) {
    const int64_t entries = spec_.block_size / group.tokens_per_entry;
    group_offset_.push_back(block_bytes_);
    layer_stride_.push_back(AlignUp(entries * group.entry_bytes, kCacheAlignment));
    block_bytes_ += layer_stride_.back() * group.layers;
  }
}

kernels::KvPages CacheLayout::Pages(std::byte* cache_base, int32_t group, int32_t layer) const {
  return {.base = cache_base + offset(group, layer),
          .block_stride = block_bytes_,
          .block_size = spec_.block_size,
          .entry_bytes = spec_.groups[group].entry_bytes,
          .format = spec_.groups[group].format};
}

std::string LayoutFingerprint(const CacheLayout& layout, const std::string& model_name,
                              const std::string& weights) {
  const CacheSpec& spec = layout.spec();
  std::string record = absl::StrCat("ferry-layout/1\n", model_name.size(), ":", model_name, "\n", weights,
                                    "\n", spec.block_size, " ", layout.block_bytes(), " ",
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
      return "fp8";
    case kernels::KvFormat::kFp8IndexKey:
      return "fp8_index_key";
    case kernels::KvFormat::kFp8SharedKv:
      return "fp8_shared_kv";
  }
  return "unknown";
}

}  // namespace model
