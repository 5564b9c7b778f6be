// ferry::Client: the C++ SDK.  Talks to a router (or anything that serves ferry.v1.Inference).
//
// A client keeps one connection, which all its calls share; it is made by the first call and again
// after it broke.  A call that ends UNAVAILABLE, or CANCELLED though nobody cancelled it (its
// router ended), before anything has come back is made again, after a pause and within its timeout;
// what has given a message never is, nor what failed in another way. Errors are the router's own,
// code and message; where it gave a reason ("QUEUE_FULL", ...), that is the status's payload
// "ferry/reason", and RetryAfter tells when to come back.
//
// Thread-safe; one Client may run many calls at a time.

#ifndef CLIENT_FERRY_CLIENT_H_
#define CLIENT_FERRY_CLIENT_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ferry/v1/inference.pb.h"

namespace ferry {

// When the router asks to come back after `error`; zero where it does not say.
absl::Duration RetryAfter(const absl::Status& error);

struct ClientOptions {
  std::string address = {};        // host:port
  std::string tls_ca_file = {};    // all three empty: plaintext
  std::string tls_cert_file = {};  // for mutual TLS
  std::string tls_key_file = {};
  absl::Duration timeout = absl::Seconds(600);  // of a whole call, all its attempts
  int max_attempts = 3;                         // 1..5; 1: nothing is tried again
  absl::Duration first_backoff =
      absl::Milliseconds(200);  // doubles from attempt to attempt, <= 10 s
};

struct CallOptions {
  std::optional<absl::Duration> timeout = {};  // absent: the client's
};

// A generation under way on the client's own threads; Client::Start gives it.  Thread-safe.
class RunningGeneration {
 public:
  // Cancels what still runs and waits for its end.  REQUIRES: not called by its own callbacks.
  virtual ~RunningGeneration() = default;
  // Returns at once; the end follows as kCancelled, unless it came first.
  virtual void Cancel() = 0;
  // Waits until the generation has ended and `on_done` has returned; gives what `on_done` got.
  // REQUIRES: not called by its own callbacks.
  virtual absl::Status Wait() = 0;
};

class Client {
 public:
  // Does not connect yet.  Errors: kInvalidArgument for unreadable TLS files or an option out of
  // its range.
  static absl::StatusOr<std::unique_ptr<Client>> Create(const ClientOptions& options);
  virtual ~Client() = default;

  // Takes a message of the stream; false cancels the generation.
  using OnMessage = std::function<bool(const ferry::v1::GenerateResponse&)>;
  using OnDone = std::function<void(const absl::Status&)>;

  // Calls `on_message` for every message of the stream, on this thread.  Returns when the stream
  // has ended: OK, or the error the router gave.
  virtual absl::Status Generate(const ferry::v1::GenerateRequest& request,
                                const OnMessage& on_message, const CallOptions& options = {}) = 0;

  // The same without a thread of the caller's: returns at once, and calls `on_message` and then,
  // once, `on_done` on threads of gRPC, one at a time.  They must not block: other calls wait
  // meanwhile. The result may outlive the client.
  virtual std::unique_ptr<RunningGeneration> Start(const ferry::v1::GenerateRequest& request,
                                                   OnMessage on_message, OnDone on_done,
                                                   const CallOptions& options = {}) = 0;

  // The whole text of branch 0 at once, and the summary.
  struct Completion {
    std::string text;
    std::vector<uint32_t> token_ids;
    ferry::v1::FinishReason finish_reason = ferry::v1::FINISH_REASON_UNSPECIFIED;
    ferry::v1::GenerateSummary summary;
  };
  virtual absl::StatusOr<Completion> Complete(const ferry::v1::GenerateRequest& request,
                                              const CallOptions& options = {}) = 0;

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
