#include "cli/generation_printer.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "cli/quote.h"
#include "ferry/v1/inference.pb.h"

namespace cli {
namespace {

std::string ShowLogprob(const ferry::v1::TokenLogprob& token) {
  return absl::StrFormat("%s %.4f", Quote(token.token()), token.logprob());
}

}  // namespace

void GenerationPrinter::Add(const ferry::v1::GenerateResponse& response) {
  Branch& branch = branches_[response.index()];
  branch.text += response.text();
  branch.ids.insert(branch.ids.end(), response.token_ids().begin(), response.token_ids().end());
  for (const ferry::v1::PositionLogprobs& position : response.logprobs()) {
    std::string line = ShowLogprob(position.chosen());
    for (const auto& top : position.top()) absl::StrAppend(&line, "\t", ShowLogprob(top));
    branch.logprobs.push_back(std::move(line));
  }
  if (options_.num_branches == 1) out_ << response.text() << std::flush;
}

void GenerationPrinter::Finish() {
  if (options_.num_branches == 1 && !branches_.empty()) out_ << "\n";
  for (const auto& [index, branch] : branches_) {
    const std::string tag = options_.num_branches == 1 ? "" : absl::StrCat("[", index, "]");
    if (options_.num_branches > 1) out_ << "text" << tag << ": " << branch.text << "\n";
    if (options_.print_ids) out_ << "ids" << tag << ": " << absl::StrJoin(branch.ids, " ") << "\n";
    if (!options_.print_logprobs) continue;
    for (const std::string& line : branch.logprobs)
      out_ << "logprob" << tag << ": " << line << "\n";
  }
  out_ << std::flush;
}

std::string DescribeSummary(const ferry::v1::GenerateSummary& s, const std::string& indent,
                            const std::map<std::string, std::string>& names_by_address) {
  const auto name = [&](const std::string& address) {
    const auto it = names_by_address.find(address);
    return it == names_by_address.end() ? address : it->second;
  };
  std::string out =
      absl::StrFormat("%sprompt %u tokens (%u from cache), output %u tokens\n", indent,
                      s.prompt_tokens(), s.cached_tokens(), s.completion_tokens());
  const bool local = s.prefill_worker() == s.decode_worker();
  absl::StrAppendFormat(&out, "%sprefilled at %s, decoded at %s%s\n", indent,
                        name(s.prefill_worker()), name(s.decode_worker()),
                        s.attempts() > 1 ? absl::StrCat(", ", s.attempts(), " attempts") : "");
  if (s.kv_bytes() > 0) {
    absl::StrAppendFormat(&out, "%scache moved: %u bytes in %u blocks over %s in %.2f ms\n", indent,
                          s.kv_bytes(), s.kv_blocks(), s.kv_transport(), s.kv_transfer_ms());
    const auto describe = [](std::string* to, const ferry::v1::CacheGroupBytes& group) {
      absl::StrAppendFormat(to, "%s %u + %u", group.name(), group.useful_bytes(),
                            group.padding_bytes());
    };
    if (s.kv_groups_size() > 0) {
      absl::StrAppendFormat(&out, "%sof them useful + padding: %s\n", indent,
                            absl::StrJoin(s.kv_groups(), ", ", describe));
    }
  } else {
    absl::StrAppendFormat(&out, "%scache moved: nothing%s\n", indent,
                          local ? "" : ", the decode worker had it");
  }
  absl::StrAppendFormat(&out, "%sfirst token after %.1f ms", indent, s.ttft_ms());
  if (s.further_tokens() > 0 && s.decode_ms() > 0) {
    absl::StrAppendFormat(&out, ", then %u in %.1f ms (%.1f tokens/s)", s.further_tokens(),
                          s.decode_ms(), s.further_tokens() * 1000.0 / s.decode_ms());
  }
  absl::StrAppendFormat(&out, ", total %.1f ms, seed %u\n", s.total_ms(), s.seed());
  return out;
}

}  // namespace cli
