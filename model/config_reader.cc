#include "model/config_reader.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "model/json.h"
#include "nlohmann/json.hpp"

namespace model {

using nlohmann::json;

ConfigReader::ConfigReader(const json& object, std::string origin, std::string prefix)
    : object_(object), origin_(std::move(origin)), prefix_(std::move(prefix)) {}

const json* ConfigReader::Find(const char* key) const {
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool ConfigReader::IsNull(const char* key) const {
  return object_.contains(key) && object_[key].is_null();
}

int32_t ConfigReader::Int(const char* key, std::optional<int64_t> otherwise, int64_t low,
                          int64_t high) {
  const json* value = Find(key);
  if (value == nullptr) {
    if (!otherwise.has_value()) Missing(key);
    return static_cast<int32_t>(otherwise.value_or(low));
  }
  // 1e4 and 4096.0 are integers too; 2^53 and above never are a size.
  const double number = value->is_number() ? value->get<double>() : std::nan("");
  if (!(number >= static_cast<double>(low) && number <= static_cast<double>(high)) ||
      number != std::floor(number)) {
    Fail(key, absl::StrCat("must be an integer in [", low, ", ", high, "], is ", Quoted(*value)));
    return static_cast<int32_t>(low);
  }
  return static_cast<int32_t>(number);
}

double ConfigReader::Double(const char* key, std::optional<double> otherwise, double low,
                            double high) {
  const json* value = Find(key);
  if (value == nullptr) {
    if (!otherwise.has_value()) Missing(key);
    return otherwise.value_or(low);
  }
  const double number = value->is_number() ? value->get<double>() : std::nan("");
  if (!(number >= low && number <= high)) {
    Fail(key, absl::StrCat("must be a number in [", low, ", ", high, "], is ", Quoted(*value)));
    return low;
  }
  return number;
}

bool ConfigReader::Bool(const char* key, bool otherwise) {
  const json* value = Find(key);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) {
    Fail(key, absl::StrCat("must be true or false, is ", Quoted(*value)));
    return otherwise;
  }
  return value->get<bool>();
}

std::string ConfigReader::String(const char* key, std::string otherwise) {
  const json* value = Find(key);
  if (value == nullptr) return otherwise;
  if (!value->is_string()) {
    Fail(key, absl::StrCat("must be a string, is ", Quoted(*value)));
    return otherwise;
  }
  return value->get<std::string>();
}

std::vector<int32_t> ConfigReader::Ids(const char* key, std::vector<int32_t> otherwise) {
  const json* value = Find(key);
  if (value == nullptr) return otherwise;
  std::vector<int32_t> ids;
  const json list = value->is_array() ? *value : json::array({*value});
  for (const json& id : list) {
    if (!id.is_number_integer() || id < 0 || id >= kMaxVocabulary) {
      Fail(key, absl::StrCat("must hold token ids, holds ", Quoted(id)));
      return otherwise;
    }
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

void ConfigReader::Fail(const char* key, const std::string& problem) {
  if (!status_.ok()) return;
  status_ = absl::InvalidArgumentError(absl::StrCat(origin_, ": ", prefix_, key, " ", problem));
}

absl::Status ReadRopeScaling(int32_t max_position_embeddings, ConfigReader& scaling,
                             RopeConfig& rope) {
  rope.rope_theta = scaling.Double("rope_theta", rope.rope_theta, 1.001, 1e12);
  const char* type_key = scaling.Find("rope_type") != nullptr ? "rope_type" : "type";
  const std::string type = scaling.String(type_key, "default");
  if (type != "default" && type != "yarn") {
    scaling.Fail(type_key,
                 absl::StrCat("\"", type, "\" is not supported: expected yarn or default"));
  }
  rope.yarn = type == "yarn";
  if (rope.yarn) {
    rope.original_max_position_embeddings =
        scaling.Int("original_max_position_embeddings", max_position_embeddings, 1, kMaxPositions);
    rope.factor = scaling.Double("factor", std::nullopt, 1e-3, 1e6);
    rope.beta_fast = scaling.Double("beta_fast", 32, 1e-6, 1e6);
    rope.beta_slow = scaling.Double("beta_slow", 1, 1e-6, 1e6);
    rope.mscale = scaling.Double("mscale", 0, 0, 1e3);
    rope.mscale_all_dim = scaling.Double("mscale_all_dim", 0, 0, 1e3);
    rope.attention_factor = scaling.Double("attention_factor", 0, 0, 1e3);
    rope.truncate = scaling.Bool("truncate", true);
  }
  return scaling.status();
}

absl::Status ReadQuantization(ConfigReader& reader, ModelConfig& config) {
  const json* object = reader.Find("quantization_config");
  if (object == nullptr) return absl::OkStatus();
  if (!object->is_object()) {
    reader.Fail("quantization_config", absl::StrCat("must be an object, is ", Quoted(*object)));
    return reader.status();
  }
  ConfigReader quantization(*object, reader.origin(), "quantization_config.");
  const std::string method = quantization.String("quant_method", "");
  if (method != "fp8") {
    quantization.Fail("quant_method",
                      absl::StrCat("\"", method, "\" is not supported: expected fp8"));
  }
  const std::string format = quantization.String("fmt", "e4m3");
  if (format != "e4m3") {
    quantization.Fail("fmt", absl::StrCat("\"", format, "\" is not supported: expected e4m3"));
  }
  config.fp8_weights = true;
  if (const json* block = quantization.Find("weight_block_size"); block != nullptr) {
    const auto size = [&](size_t i) -> int32_t {
      const bool good = block->is_array() && block->size() == 2 &&
                        (*block)[i].is_number_integer() && (*block)[i] >= 1 &&
                        (*block)[i] <= kMaxWidth;
      if (!good) quantization.Fail("weight_block_size", "must be two positive integers");
      return good ? (*block)[i].get<int32_t>() : 1;
    };
    config.weight_block_rows = size(0);
    config.weight_block_cols = size(1);
  }
  return quantization.status();
}

void RefuseUnsupported(ConfigReader& reader) {
  for (const char* bias : {"attention_bias", "mlp_bias"}) {
    if (reader.Bool(bias, false)) reader.Fail(bias, "true is not supported");
  }
  if (const std::string act = reader.String("hidden_act", "silu"); act != "silu") {
    reader.Fail("hidden_act", absl::StrCat("\"", act, "\" is not supported: expected silu"));
  }
}

}  // namespace model
