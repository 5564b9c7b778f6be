// The body of a request for a chat completion in every format (by the first byte), and of one for a
// completion: a request comes out that can be checked, or a sentence.

#include <memory>
#include <vector>

#include "ferry/v1/inference.pb.h"
#include "router/http/api_error.h"
#include "router/http/api_request.h"
#include "status/check.h"
#include "tests/tokenizer/tiny_tokenizer.h"
#include "tokenizer/utf8.h"

namespace {

using router::ModelAssets;
using router::ServedModels;

constexpr int kNumFormats = 8;

const ServedModels& ModelsOf(int format) {
  static const auto* const all = [] {
    auto* const made = new std::vector<std::unique_ptr<ServedModels>>();
    for (int i = 0; i < kNumFormats; ++i) {
      std::vector<std::unique_ptr<ModelAssets>> assets;
      assets.push_back(std::make_unique<ModelAssets>());
      assets[0]->name = "m";
      assets[0]->vocab_size = 256;
      assets[0]->tokenizer = tokenizer::Make(tokenizer::TinyTokenizer());
      assets[0]->chat_format = static_cast<chat::Format>(i);
      made->push_back(std::make_unique<ServedModels>(std::move(assets)));
    }
    return made;
  }();
  return *(*all)[format];
}

void CheckOutcome(const absl::StatusOr<router::http::ApiRequest>& request,
                  const ServedModels& models) {
  if (!request.ok()) {
    const router::http::Response response = router::http::ErrorResponse(request.status());
    FERRY_CHECK(response.status >= 400 && response.status < 500) << request.status();
    FERRY_CHECK(tokenizer::FirstInvalidUtf8(response.body) == response.body.size());
    return;
  }
  FERRY_CHECK(!request->prompts.empty());
  for (const auto& prompt : request->prompts) {
    const absl::Status checked = router::CheckRequest(*prompt, models);
    FERRY_CHECK(checked.ok() || !checked.message().empty());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view body(reinterpret_cast<const char*>(data) + 1, size - 1);
  const ServedModels& models = ModelsOf(data[0] % kNumFormats);
  CheckOutcome(router::http::ParseChatRequest(body, models), models);
  CheckOutcome(router::http::ParseCompletionRequest(body), models);
  return 0;
}
