// config.json, and the cache layout that a worker derives from it.

#include "model/cache_spec.h"
#include "model/config.h"
#include "status/check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view json(reinterpret_cast<const char*>(data), size);
  const auto config = model::ParseModelConfig(json, "fuzzed");
  if (!config.ok()) {
    FERRY_CHECK(!config.status().message().empty());
    return 0;
  }
  for (const auto dtype :
       {model::KvCacheDtype::kFloat32, model::KvCacheDtype::kBfloat16, model::KvCacheDtype::kFp8}) {
    const model::CacheLayout layout(
        model::MakeCacheSpec(*config, dtype, model::DefaultBlockSize(*config)));
    FERRY_CHECK(layout.block_bytes() > 0) << layout.block_bytes();
  }
  return 0;
}
