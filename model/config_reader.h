// ConfigReader: typed access to the keys of one JSON object of a config.json, for the files that
// know what the keys mean (config.cc, deepseek_v4_config.cc), and the parts that families share.
// Remembers the first error; a key whose value is null counts as absent.
//
// Thread-compatible.

#ifndef MODEL_CONFIG_READER_H_
#define MODEL_CONFIG_READER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "model/config.h"
#include "nlohmann/json_fwd.hpp"

namespace model {

// Far above any published model, and low enough that a product of two fits int32 and the size of
// every tensor fits int64.
inline constexpr int64_t kMaxWidth = int64_t{1} << 20;  // hidden and intermediate sizes, ranks
inline constexpr int64_t kMaxHeadDim = int64_t{1} << 13;
inline constexpr int64_t kMaxHeads = int64_t{1} << 12;
inline constexpr int64_t kMaxLayers = int64_t{1} << 12;
inline constexpr int64_t kMaxExperts = int64_t{1} << 10;  // what the gates of every backend take
inline constexpr int64_t kMaxSharedExperts = int64_t{1} << 6;
inline constexpr int64_t kMaxVocabulary = int64_t{1} << 24;
inline constexpr int64_t kMaxPositions = int64_t{1} << 24;

class ConfigReader {
 public:
  // `object` must outlive the reader.  `prefix`: where the object lies, e.g. "rope_scaling.".
  ConfigReader(const nlohmann::json& object, std::string origin, std::string prefix = "");

  // Null if the key is absent.
  const nlohmann::json* Find(const char* key) const;
  bool IsNull(const char* key) const;

  // Without a default the key is required.
  int32_t Int(const char* key, std::optional<int64_t> otherwise, int64_t low, int64_t high);
  double Double(const char* key, std::optional<double> otherwise, double low, double high);
  bool Bool(const char* key, bool otherwise);
  std::string String(const char* key, std::string otherwise);
  // An id, a list of ids, or nothing.
  std::vector<int32_t> Ids(const char* key, std::vector<int32_t> otherwise);

  // The first failure stays.
  void Fail(const char* key, const std::string& problem);
  void Missing(const char* key) { Fail(key, "is missing"); }
  // The failure of a reader of an inner object.
  void Adopt(const absl::Status& inner) { status_.Update(inner); }

  const std::string& origin() const { return origin_; }
  const absl::Status& status() const { return status_; }

 private:
  const nlohmann::json& object_;
  const std::string origin_;
  const std::string prefix_;
  absl::Status status_;
};

// rope_theta and YaRN from one object ("rope_scaling.", ...); what it lacks stays as it is in
// `rope`. original_max_position_embeddings defaults to the model's max_position_embeddings.
absl::Status ReadRopeScaling(int32_t max_position_embeddings, ConfigReader& scaling,
                             RopeConfig& rope);

// quantization_config, if there is one.
absl::Status ReadQuantization(ConfigReader& reader, ModelConfig& config);

// Biases and activations that nobody has.
void RefuseUnsupported(ConfigReader& reader);

}  // namespace model

#endif  // MODEL_CONFIG_READER_H_
