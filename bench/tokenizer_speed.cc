// How fast text becomes token ids, on one core.
//   tokenizer_speed DIR [TEXT_FILE...]     DIR holds tokenizer.json; default text: Debian's
//   licences

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace {

constexpr char kDefaultTexts[] = "/usr/share/common-licenses";
constexpr size_t kTextBytes = 8 << 20;
constexpr int kRepeats = 7;

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s DIR [TEXT_FILE...]\n", argv[0]);
    return 2;
  }
  const auto load_start = std::chrono::steady_clock::now();
  const auto tokenizer = tokenizer::Tokenizer::Load(argv[1]);
  const std::chrono::duration<double> load_time = std::chrono::steady_clock::now() - load_start;
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "tokenizer_speed: %s\n",
                 std::string(tokenizer.status().message()).c_str());
    return 1;
  }
  std::string unit;
  for (int i = 2; i < argc; ++i) unit += ReadFile(argv[i]);
  std::error_code error;
  if (argc == 2) {
    std::vector<std::filesystem::path> paths;
    for (const auto& entry : std::filesystem::directory_iterator(kDefaultTexts, error)) {
      if (entry.is_regular_file()) paths.push_back(entry.path());
    }
    std::sort(paths.begin(), paths.end());
    for (const auto& path : paths) unit += ReadFile(path);
  }
  if (unit.empty()) {
    std::fprintf(stderr, "tokenizer_speed: no text; name a file\n");
    return 1;
  }
  std::string text;
  while (text.size() < kTextBytes) text += unit;

  std::vector<double> rates;
  size_t num_ids = 0;
  for (int i = 0; i < kRepeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const auto ids = (*tokenizer)->Encode(text, /*add_special_tokens=*/false);
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    if (!ids.ok()) {
      std::fprintf(stderr, "tokenizer_speed: %s\n", std::string(ids.status().message()).c_str());
      return 1;
    }
    num_ids = ids->size();
    rates.push_back(static_cast<double>(text.size()) / 1e6 / time.count());
  }
  std::sort(rates.begin(), rates.end());
  std::printf(
      "load %.2f s; %zu bytes, %zu ids (%.2f bytes each); encode MB/s: best %.1f, median %.1f, "
      "worst %.1f\n",
      load_time.count(), text.size(), num_ids,
      static_cast<double>(text.size()) / static_cast<double>(num_ids), rates.back(),
      rates[rates.size() / 2], rates.front());
  return 0;
}
