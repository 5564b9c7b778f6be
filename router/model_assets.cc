#include "router/model_assets.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "input_file/input_file.h"
#include "input_file/json_file.h"
#include "status/status_macros.h"

namespace router {
namespace {

using nlohmann::json;

constexpr int64_t kMaxModelNumber = int64_t{1} << 30;
constexpr size_t kMaxEosIds = 8;  // workers take 72 stop ids: these and 64 of a request

absl::Status BadMember(const std::filesystem::path& path, const std::string& member,
                       const json& value, const char* expected) {
  return absl::InvalidArgumentError(
      absl::StrCat(path.string(), ": ", member, " is ", value.dump(), ", expected ", expected));
}

// Absent and null are 0.
absl::StatusOr<int32_t> ReadCount(const std::filesystem::path& path, const json& object,
                                  const std::string& member) {
  const auto it = object.find(member);
  if (it == object.end() || it->is_null()) return 0;
  if (!it->is_number_integer() || *it < 1 || *it > kMaxModelNumber) {
    return BadMember(path, member, *it, "a positive integer");
  }
  return it->get<int32_t>();
}

absl::StatusOr<std::optional<float>> ReadNumber(const std::filesystem::path& path,
                                                const json& object, const std::string& member,
                                                float low, float high) {
  const auto it = object.find(member);
  if (it == object.end() || it->is_null()) return std::nullopt;
  if (!it->is_number() || it->get<double>() < low || it->get<double>() > high) {
    return BadMember(path, member, *it, "a number in its range");
  }
  return it->get<float>();
}

// eos_token_id: an id, a list of ids, or null.  False if the member is absent.
absl::StatusOr<bool> ReadEos(const std::filesystem::path& path, const json& object,
                             std::vector<int32_t>* ids) {
  const auto it = object.find("eos_token_id");
  if (it == object.end() || it->is_null()) return false;
  const json list = it->is_array() ? *it : json::array({*it});
  ids->clear();
  for (const json& id : list) {
    if (!id.is_number_integer() || id < 0 || id > kMaxModelNumber) {
      return BadMember(path, "eos_token_id", *it, "token ids");
    }
    ids->push_back(id.get<int32_t>());
  }
  return true;
}

absl::Status ReadGenerationConfig(const std::filesystem::path& path, ModelAssets* assets) {
  if (!input_file::IsThere(path.string())) return absl::OkStatus();
  ASSIGN_OR_RETURN(const json object, input_file::ReadJsonObject(path.string()));
  RETURN_IF_ERROR(ReadEos(path, object, &assets->eos_ids).status());
  SamplingDefaults& defaults = assets->defaults;
  ASSIGN_OR_RETURN(defaults.temperature, ReadNumber(path, object, "temperature", 0, 1e6));
  ASSIGN_OR_RETURN(defaults.top_p, ReadNumber(path, object, "top_p", 1e-9f, 1));
  ASSIGN_OR_RETURN(defaults.repetition_penalty,
                   ReadNumber(path, object, "repetition_penalty", 1e-9f, 1e6));
  ASSIGN_OR_RETURN(const std::optional<float> top_k,
                   ReadNumber(path, object, "top_k", -1, float{1 << 30}));
  if (top_k.has_value()) defaults.top_k = static_cast<int32_t>(*top_k);
  const auto do_sample = object.find("do_sample");
  if (do_sample != object.end() && do_sample->is_boolean() && !do_sample->get<bool>()) {
    defaults.temperature = 0.0f;
  }
  return absl::OkStatus();
}

// The checkpoint's own format.  Errors: of unreadable files; that there is none is no error.
absl::Status FindChatFormat(const std::string& dir, ModelAssets* assets) {
  if (assets->tokenizer == nullptr) {
    assets->chat_format = absl::FailedPreconditionError(
        absl::StrCat("no chat with this checkpoint: ", dir, " has no tokenizer.json"));
    return absl::OkStatus();
  }
  assets->chat_format = chat::FormatOfCheckpoint(dir);
  if (absl::IsInvalidArgument(assets->chat_format.status())) return assets->chat_format.status();
  if (!assets->chat_format.ok()) return absl::OkStatus();
  const absl::Status fits = chat::CheckVocabulary(*assets->chat_format, *assets->tokenizer);
  if (!fits.ok()) assets->chat_format = fits;
  return absl::OkStatus();
}

}  // namespace

absl::Status ModelAssets::UseChatFormat(const std::string& format_name) {
  ASSIGN_OR_RETURN(const chat::Format format, chat::FormatFromName(format_name));
  if (tokenizer == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("model ", name, " has no tokenizer.json, which chat needs"));
  }
  RETURN_IF_ERROR(chat::CheckVocabulary(format, *tokenizer));
  chat_format = format;
  return absl::OkStatus();
}

void ModelAssets::SetWorkerLimits(WorkerLimits limits) {
  const std::lock_guard<std::mutex> lock(mutex_);
  worker_limits_ = std::move(limits);
}

WorkerLimits ModelAssets::worker_limits() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return worker_limits_;
}

bool ModelAssets::is_served() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return worker_limits_.serving_context > 0;
}

int32_t ModelAssets::context_tokens() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int32_t workers = worker_limits_.serving_context > 0 ? worker_limits_.serving_context
                                                             : worker_limits_.known_context;
  if (workers == 0) return max_position_embeddings;
  if (max_position_embeddings > 0) return std::min(workers, max_position_embeddings);
  return workers == std::numeric_limits<int32_t>::max() ? 0 : workers;
}

LengthLimits ModelAssets::lengths() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!worker_limits_.all_known || worker_limits_.known.empty()) {
    return LengthLimits::OfContext(max_position_embeddings);
  }
  return worker_limits_.known.Within(max_position_embeddings);
}

absl::StatusOr<std::unique_ptr<ModelAssets>> ModelAssets::Load(const std::string& spec) {
  auto assets = std::make_unique<ModelAssets>();
  const size_t equals = spec.find('=');
  std::filesystem::path dir = equals == std::string::npos ? spec : spec.substr(equals + 1);
  if (dir.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("model assets \"", spec, "\" name no directory"));
  }
  if (!dir.has_filename()) dir = dir.parent_path();  // a trailing slash
  std::error_code error;
  if (!std::filesystem::is_directory(dir, error)) {
    return absl::NotFoundError(absl::StrCat("model assets ", dir.string(), " is not a directory"));
  }
  assets->name = equals == std::string::npos
                     ? std::filesystem::weakly_canonical(dir, error).filename().string()
                     : spec.substr(0, equals);
  if (assets->name.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("model assets \"", spec, "\" have no name"));
  }
  const std::filesystem::path config_path = dir / "config.json";
  ASSIGN_OR_RETURN(const json config, input_file::ReadJsonObject(config_path.string()));
  ASSIGN_OR_RETURN(assets->vocab_size, ReadCount(config_path, config, "vocab_size"));
  if (assets->vocab_size == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(config_path.string(), ": vocab_size is missing"));
  }
  ASSIGN_OR_RETURN(assets->max_position_embeddings,
                   ReadCount(config_path, config, "max_position_embeddings"));
  RETURN_IF_ERROR(ReadEos(config_path, config, &assets->eos_ids).status());
  RETURN_IF_ERROR(ReadGenerationConfig(dir / "generation_config.json", assets.get()));
  std::vector<int32_t>& eos_ids = assets->eos_ids;
  std::erase_if(eos_ids, [&](int32_t id) { return id >= assets->vocab_size; });  // never sampled
  if (eos_ids.size() > kMaxEosIds) {
    return absl::InvalidArgumentError(absl::StrCat(dir.string(), ": eos_token_id has ",
                                                   eos_ids.size(), " ids, at most ", kMaxEosIds));
  }

  if (input_file::IsThere(dir / "tokenizer.json")) {
    ASSIGN_OR_RETURN(assets->tokenizer, tokenizer::Tokenizer::Load(dir.string()));
    assets->tokenizer_hash = assets->tokenizer->hash();
    for (int32_t id = 0; id < assets->tokenizer->vocab_size(); ++id) {
      assets->longest_token_bytes =
          std::max(assets->longest_token_bytes, assets->tokenizer->TokenBytes(id).size());
    }
  }
  RETURN_IF_ERROR(FindChatFormat(dir.string(), assets.get()));
  return assets;
}

}  // namespace router
