// ModelAssets: what the router knows of a served model: its name, its tokenizer and the few numbers
// of config.json and generation_config.json that a request is checked against and completed with.
//
// Thread-safe: const after Load, except `limits`, which are atomics.

#ifndef ROUTER_MODEL_ASSETS_H_
#define ROUTER_MODEL_ASSETS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "chat/format.h"
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

  // Written by the loop's thread when a worker introduces itself, read by RPC threads.
  // Longest prompt + output that some worker takes; 0: no worker is known yet.
  std::atomic<int32_t> workers_max_model_len{0};

  // Tokens that prompt and output may have together, as far as is known now; 0: unlimited.
  int32_t context_tokens() const;

  // In place of the checkpoint's own.  Errors: kInvalidArgument for an unknown name,
  // kFailedPrecondition naming the token that the tokenizer lacks.
  absl::Status UseChatFormat(const std::string& format_name);

  // `spec` is "[NAME=]DIR"; the default name is the directory's.
  // Errors: kNotFound / kInvalidArgument naming the file and the member.
  static absl::StatusOr<std::unique_ptr<ModelAssets>> Load(const std::string& spec);
};

}  // namespace router

#endif  // ROUTER_MODEL_ASSETS_H_
