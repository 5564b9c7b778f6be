// GenerationPrinter: shows the messages of one generation: text as it comes, then what was asked
// for.
//
// Thread-compatible.

#ifndef CLI_GENERATION_PRINTER_H_
#define CLI_GENERATION_PRINTER_H_

#include <cstdint>
#include <map>
#include <ostream>
#include <string>
#include <vector>

namespace ferry::v1 {
class GenerateResponse;
class GenerateSummary;
}  // namespace ferry::v1

namespace cli {

class GenerationPrinter final {
 public:
  struct Options {
    uint32_t num_branches = 1;  // one: text is printed as it arrives; else each whole, at the end
    bool print_ids = false;     // "ids: 1 2 3" (or "ids[branch]: ...") after the text
    bool print_logprobs = false;
  };
  // `out` must outlive the printer.
  GenerationPrinter(const Options& options, std::ostream& out) : options_(options), out_(out) {}

  void Add(const ferry::v1::GenerateResponse& response);
  // After the last message.
  void Finish();

 private:
  struct Branch {
    std::string text;
    std::vector<uint32_t> ids;
    std::vector<std::string> logprobs;  // a line a token
  };
  const Options options_;
  std::ostream& out_;
  std::map<uint32_t, Branch> branches_;
};

// What happened to the request, in a few lines that each begin with `indent`.  Its tokens/s are
// those after the first message of their branch, by the time from the first token to the last, at
// the router.  Addresses found in `names_by_address` are shown by name.
std::string DescribeSummary(const ferry::v1::GenerateSummary& summary, const std::string& indent,
                            const std::map<std::string, std::string>& names_by_address = {});

}  // namespace cli

#endif  // CLI_GENERATION_PRINTER_H_
