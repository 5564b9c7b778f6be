#include "cli/sampling_flags.h"

#include <cstdint>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "ferry/v1/inference.pb.h"
#include "service/command_line.h"

namespace cli {

using ferry::v1::SamplingParams;

void AddSamplingFlags(CLI::App& command, SamplingParams* sampling) {
  const auto add = [&]<typename T>(const char* flag, void (SamplingParams::*set)(T),
                                   const char* help) {
    return command
        .add_option_function<T>(
            flag, [=](const T& value) { (sampling->*set)(value); }, help)
        ->group("Sampling");
  };
  add("--temperature", &SamplingParams::set_temperature, "0: greedy");
  add("--top_k", &SamplingParams::set_top_k, "Keep the k best tokens; 0: all");
  add("--top_p", &SamplingParams::set_top_p, "Keep the best tokens up to this mass");
  add("--min_p", &SamplingParams::set_min_p,
      "Keep tokens of at least this share of the best one's");
  add("--repetition_penalty", &SamplingParams::set_repetition_penalty,
      "Over prompt and output; 1: none");
  add("--presence_penalty", &SamplingParams::set_presence_penalty, "Over output, in [-2, 2]");
  add("--frequency_penalty", &SamplingParams::set_frequency_penalty, "Over output, in [-2, 2]");
  add("--seed", &SamplingParams::set_seed, "Same seed, same text; default: drawn")
      ->check(service::Unsigned64());
  add("--max_tokens", &SamplingParams::set_max_tokens, "Default: what fits the context");
  add("--min_tokens", &SamplingParams::set_min_tokens, "No end before so many tokens");
  add("--n", &SamplingParams::set_n, "Branches, 1 to 16");
  add("--logprobs", &SamplingParams::set_logprobs,
      "Print log-probabilities and so many alternatives");
  command
      .add_option_function<std::vector<std::string>>(
          "--stop",
          [sampling](const std::vector<std::string>& stops) {
            for (const std::string& stop : stops) sampling->add_stop(stop);
          },
          "The text ends before this; repeatable")
      ->allow_extra_args(false)
      ->group("Sampling");
  command
      .add_option_function<std::vector<uint32_t>>(
          "--stop_token_ids",
          [sampling](const std::vector<uint32_t>& ids) {
            for (const uint32_t id : ids) sampling->add_stop_token_ids(id);
          },
          "Ids that end the text, with commas")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->group("Sampling");
  command
      .add_flag_callback(
          "--ignore_eos", [sampling] { sampling->set_ignore_eos(true); }, "Go on to --max_tokens")
      ->group("Sampling");
  command
      .add_flag_callback(
          "--include_stop", [sampling] { sampling->set_include_stop(true); },
          "Keep the matched stop string in the text")
      ->group("Sampling");
}

}  // namespace cli
