// ferry::Client: the C++ SDK.  Talks to a router (or anything that serves ferry.v1.Inference).
//
// Thread-safe; one Client may run many generations at a time, each on its caller's thread.

#ifndef CLIENT_FERRY_CLIENT_H_
#define CLIENT_FERRY_CLIENT_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ferry/v1/inference.pb.h"

namespace ferry {

struct ClientOptions {
  std::string address = {};        // host:port
  std::string tls_ca_file = {};    // all three empty: plaintext
  std::string tls_cert_file = {};  // for mutual TLS
  std::string tls_key_file = {};
  absl::Duration timeout = absl::Seconds(600);  // of a whole generation
};

class Client {
 public:
  // Does not connect yet.  Errors: kInvalidArgument for unreadable TLS files.
  static absl::StatusOr<std::unique_ptr<Client>> Create(const ClientOptions& options);
  virtual ~Client() = default;

  // Calls `on_message` for every message of the stream, on this thread; it returns false to cancel.
  // Returns when the stream has ended: OK, or the error the router gave (code, message).
  virtual absl::Status Generate(
      const ferry::v1::GenerateRequest& request,
      const std::function<bool(const ferry::v1::GenerateResponse&)>& on_message) = 0;

  // The whole text of branch 0 at once, and the summary.
  struct Completion {
    std::string text;
    std::vector<uint32_t> token_ids;
    ferry::v1::FinishReason finish_reason = ferry::v1::FINISH_REASON_UNSPECIFIED;
    ferry::v1::GenerateSummary summary;
  };
  virtual absl::StatusOr<Completion> Complete(const ferry::v1::GenerateRequest& request) = 0;

  virtual absl::StatusOr<std::vector<uint32_t>> Tokenize(const std::string& model,
                                                         const std::string& text,
                                                         bool add_special_tokens) = 0;
  virtual absl::StatusOr<std::string> Detokenize(const std::string& model,
                                                 const std::vector<uint32_t>& ids) = 0;
  virtual absl::StatusOr<std::vector<ferry::v1::ModelCard>> ListModels() = 0;
  // Asks once whether `model` (empty: any) can be served: OK, or what is missing in words.
  // Errors: kUnavailable (ask again); kFailedPrecondition (workers do not fit each other or the
  // router: none will come unless a process is started anew); kDeadlineExceeded: no answer within
  // `timeout`.
  virtual absl::Status CheckReady(const std::string& model, absl::Duration timeout) = 0;
  // Asks until it is, at most `timeout`.  Errors: kDeadlineExceeded with the last answer.
  virtual absl::Status WaitUntilReady(const std::string& model, absl::Duration timeout) = 0;
};

}  // namespace ferry

#endif  // CLIENT_FERRY_CLIENT_H_
