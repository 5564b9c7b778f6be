// The sampling flags of commands that generate text; a flag that is not given leaves its field
// absent.

#ifndef CLI_SAMPLING_FLAGS_H_
#define CLI_SAMPLING_FLAGS_H_

namespace CLI {
class App;
}
namespace ferry::v1 {
class SamplingParams;
}

namespace cli {

// `sampling` must outlive the parsing of `command`.
void AddSamplingFlags(CLI::App& command, ferry::v1::SamplingParams* sampling);

}  // namespace cli

#endif  // CLI_SAMPLING_FLAGS_H_
