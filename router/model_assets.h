// ModelAssets: what the router knows of a served model: its name, its tokenizer and the few numbers
// of config.json and generation_config.json that a request is checked against and completed with.
//
// Thread-safe: const after Load, except the workers' limits, which have a lock.

#ifndef ROUTER_MODEL_ASSETS_H_
#define ROUTER_MODEL_ASSETS_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "chat/format.h"
#include "router/length_limits.h"
#include "tokenizer/tokenizer.h"

namespace router {

// Sampling that generation_config.json states; absent: the API's default.
struct SamplingDefaults {
  std::optional<float> temperature;
  std::optional<int32_t> top_k;
  std::optional<float> top_p;
  std::optional<float> repetition_penalty;
};

struct ModelAssets {
  std::string name;
  std::unique_ptr<tokenizer::Tokenizer>
      tokenizer;               // may be null: no tokenizer.json, prompts are ids
  std::string tokenizer_hash;  // "" without a tokenizer
  int32_t vocab_size = 0;
  int32_t max_position_embeddings = 0;  // 0: config.json does not say
  std::vector<int32_t> eos_ids;
  SamplingDefaults defaults;
  size_t longest_token_bytes = 0;  // 0: unknown; no text of n tokens is longer than n times this

  // How conversations are written; or why there is no chat, in a sentence.
  absl::StatusOr<chat::Format> chat_format =
      absl::FailedPreconditionError("no chat format is known");

  // Of the loop's thread, when the workers change; read by RPC threads.
  void SetWorkerLimits(WorkerLimits limits);
  WorkerLimits worker_limits() const;
  // Whether any prompt within context_tokens() would find its workers now.
  bool is_served() const;
  // Tokens that prompt and output may have together, whoever serves them of the workers that are
  // there, or, if nobody does, of those that are known; 0: any number.
  int32_t context_tokens() const;
  // What may be asked for: no worker takes more, even if those that are away come back.
  LengthLimits lengths() const;

  // In place of the checkpoint's own.  Errors: kInvalidArgument for an unknown name,
  // kFailedPrecondition naming the token that the tokenizer lacks.
  absl::Status UseChatFormat(const std::string& format_name);

  // `spec` is "[NAME=]DIR"; the default name is the directory's.
  // Errors: kNotFound / kInvalidArgument naming the file and the member.
  static absl::StatusOr<std::unique_ptr<ModelAssets>> Load(const std::string& spec);

 private:
  mutable std::mutex mutex_;  // guards worker_limits_
  WorkerLimits worker_limits_;
};

}  // namespace router

#endif  // ROUTER_MODEL_ASSETS_H_
