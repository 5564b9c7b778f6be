// OpenAiBackend: asks any server of OpenAI's HTTP API, with streamed answers.
//
// Prompts go to /completions, conversations of messages to /chat/completions.

#ifndef CLI_OPENAI_BACKEND_H_
#define CLI_OPENAI_BACKEND_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cli/load_backend.h"

namespace cli {

struct OpenAiOptions {
  std::string base_url = {};  // http://host:port, with or without /v1
  std::string model = {};     // empty: the one that the server lists
  std::string api_key = {};   // empty: none
  std::string tls_ca_file = {};
  std::string tls_cert_file = {};
  std::string tls_key_file = {};
  double temperature = 0;
  bool ignore_eos =
      true;  // asked for by a field that is not OpenAI's own, but known to servers of models
  absl::Duration request_timeout = kRequestTimeout;
  absl::Duration stall_timeout = absl::Seconds(60);  // between two outputs of a request
  absl::Duration ready_timeout = absl::Seconds(10);  // of the question for its models
};

class OpenAiBackend : public LoadBackend {
 public:
  // Asks the server for its models.
  // Errors: kUnavailable (no answer), kNotFound (no such model, or several and none chosen),
  // kInvalidArgument (URL or TLS files).
  static absl::StatusOr<std::unique_ptr<OpenAiBackend>> Connect(const OpenAiOptions& options);
  virtual const std::string& model() const = 0;
  // Of that model, where the server's list tells it, as Ferry's does.
  virtual std::optional<uint32_t> vocab_size() const = 0;
};

}  // namespace cli

#endif  // CLI_OPENAI_BACKEND_H_
