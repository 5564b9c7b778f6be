// Format: the way in which a family of checkpoints writes conversations.
//
// Stateless functions.

#ifndef CHAT_FORMAT_H_
#define CHAT_FORMAT_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tokenizer/tokenizer.h"

namespace chat {

enum class Format {
  kV2,       // V2, V2-Lite-Chat, Coder-V2: "User: ", "Assistant: "
  kV3,       // V2.5, V3: <｜User｜>, <｜Assistant｜>
  kR1,       // R1: as V3; earlier reasoning is cut; the reply begins after "<think>\n"
  kV3_0324,  // V3-0324: tool calls keep the text before them
  kR1_0528,  // R1-0528: as V3-0324; earlier reasoning is cut
  kV31,      // V3.1, V3.1-Terminus, V3.2-Exp: <think> or </think> after <｜Assistant｜>
  kV32,      // V3.2: DSML tool calls
  kV4,       // V4: DSML tool calls, results inside user turns
};

// "v2", "v3", "r1", "v3-0324", "r1-0528", "v3.1", "v3.2", "v4".
std::string_view FormatName(Format format);
// Errors: kInvalidArgument listing the names.
absl::StatusOr<Format> FormatFromName(std::string_view name);

// The format of a published chat_template, told by the texts that it writes.
// Errors: kInvalidArgument: it is none of those above.
absl::StatusOr<Format> FormatOfTemplate(std::string_view chat_template);

// The format of the checkpoint in `model_dir`: of its chat_template (chat_template.jinja, else
// tokenizer_config.json), else of config.json's model_type where the family has no template.
// Errors: kFailedPrecondition: completions can be served, chat cannot, in a sentence that says why
// and names --chat_format; kInvalidArgument for files that cannot be read.
absl::StatusOr<Format> FormatOfCheckpoint(const std::string& model_dir);

// Whether the format's role markers are tokens of their own in this vocabulary.
// Errors: kFailedPrecondition naming the one that is not.
absl::Status CheckVocabulary(Format format, const tokenizer::Tokenizer& tokenizer);

}  // namespace chat

#endif  // CHAT_FORMAT_H_
