#include "tests/tokenizer/tiny_tokenizer.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "gtest/gtest.h"
#include "status/check.h"
#include "tokenizer/byte_alphabet.h"

namespace tokenizer {

using nlohmann::json;

TempDir::TempDir() {
  std::string pattern = (std::filesystem::temp_directory_path() / "tokenizer_test_XXXXXX").string();
  FERRY_CHECK(mkdtemp(pattern.data()) != nullptr) << pattern;
  path_ = pattern;
}

TempDir::~TempDir() { std::filesystem::remove_all(path_); }

void TempDir::Write(const std::string& name, const std::string& bytes) const {
  std::ofstream(path_ + "/" + name, std::ios::binary) << bytes;
}

json TinyTokenizer() {
  json vocab = json::object();
  for (int byte = 0; byte < 256; ++byte)
    vocab[SpellBytes(std::string(1, static_cast<char>(byte)))] = byte;
  return {{"version", "1.0"},
          {"added_tokens", json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer",
           {{"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", json::array()}}}};
}

void AddMerge(json& tokenizer, const std::string& left, const std::string& right) {
  json& model = tokenizer["model"];
  if (!model["vocab"].contains(left + right)) model["vocab"][left + right] = model["vocab"].size();
  model["merges"].push_back(left + " " + right);
}

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadFrom(const std::string& tokenizer_json,
                                                    const std::optional<std::string>& config_json) {
  TempDir dir;
  dir.Write("tokenizer.json", tokenizer_json);
  if (config_json.has_value()) dir.Write("tokenizer_config.json", *config_json);
  return Tokenizer::Load(dir.path());
}

std::unique_ptr<Tokenizer> Make(const json& tokenizer,
                                const std::optional<std::string>& config_json) {
  auto loaded = LoadFrom(tokenizer.dump(), config_json);
  FERRY_CHECK(loaded.ok()) << loaded.status();
  return *std::move(loaded);
}

const Tokenizer& DeepSeekV3() {
  static const Tokenizer* const tokenizer = [] {
    auto loaded = Tokenizer::Load(GoldenDir() + "/tokenizer/deepseek_v3");
    FERRY_CHECK(loaded.ok()) << loaded.status();
    return loaded->release();
  }();
  return *tokenizer;
}

std::string GoldenDir() {
  const char* dir = std::getenv("FERRY_GOLDEN_DIR");
  FERRY_CHECK(dir != nullptr) << "FERRY_GOLDEN_DIR is not set: run by ctest";
  return dir;
}

std::string ReadText(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  FERRY_CHECK(in.good()) << path;
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

}  // namespace tokenizer
