// The config of deepseek_v4, in both spellings: layer_types or compress_ratios, mlp_layer_types or
// num_hash_layers, rope_parameters {main, compress} or rope_scaling (models.md 1.2).

#ifndef MODEL_DEEPSEEK_V4_CONFIG_H_
#define MODEL_DEEPSEEK_V4_CONFIG_H_

#include "absl/status/status.h"
#include "model/config.h"
#include "model/config_reader.h"

namespace model {

// `reader` reads the whole file.
// Errors: kInvalidArgument naming the file, the key and what was found.
absl::Status ReadDeepseekV4Config(ConfigReader& reader, ModelConfig& config);

}  // namespace model

#endif  // MODEL_DEEPSEEK_V4_CONFIG_H_
