// tokenizer.json as a whole: what loads must encode and decode.

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "status/check.h"
#include "tokenizer/tokenizer.h"

namespace {

constexpr char kText[] =
    "Hello  world, 12345 don't \xE4\xBD\xA0\xE5\xA5\xBD\n\n<|end|> \xF0\x9F\x9A\xA2";

class Folder {
 public:
  Folder()
      : path_(std::filesystem::temp_directory_path() / ("ferry_fuzz_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Folder folder;
  std::ofstream(folder.path() / "tokenizer.json", std::ios::binary)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  const auto tokenizer = tokenizer::Tokenizer::Load(folder.path().string());
  if (!tokenizer.ok()) {
    FERRY_CHECK(!tokenizer.status().message().empty());
    return 0;
  }
  const auto ids = (*tokenizer)->Encode(kText, /*add_special_tokens=*/true);
  if (!ids.ok()) return 0;  // a token that the vocabulary lacks
  const auto text = (*tokenizer)->Decode(*ids, /*skip_special_tokens=*/false);
  FERRY_CHECK(text.ok()) << text.status();
  return 0;
}
