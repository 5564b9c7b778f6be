// GenerateLocally: one request on an engine in this process.  The distributed system's oracle:
// checks, defaults and text are the router's, the tokens come from one engine that computes the
// prompt and decodes it, one sequence at a time, with nothing transferred, shared or batched.

#ifndef CLI_LOCAL_GENERATION_H_
#define CLI_LOCAL_GENERATION_H_

#include <functional>

#include "absl/status/status.h"
#include "engine/engine.h"

namespace ferry::v1 {
class GenerateRequest;
class GenerateResponse;
}  // namespace ferry::v1

namespace cli {

// Loads options.model_dir and generates.  Calls `on_message` as ferry::Client::Generate does: false
// ends the generation.  request.model must be empty or the directory's name. Errors: the router's
// for the request, the engine's for the checkpoint.
absl::Status GenerateLocally(
    const engine::EngineOptions& options, const ferry::v1::GenerateRequest& request,
    const std::function<bool(const ferry::v1::GenerateResponse&)>& on_message);

}  // namespace cli

#endif  // CLI_LOCAL_GENERATION_H_
