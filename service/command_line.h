// What every Ferry program's command line has alike.  Included where flags are declared only: main
// files, worker/worker_flags.cc and the `ferry` command; CLI11 is costly to compile.

#ifndef SERVICE_COMMAND_LINE_H_
#define SERVICE_COMMAND_LINE_H_

#include <cmath>
#include <cstdint>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace service {

// How a program says that its command line is wrong: one line, because supervisors show the last
// one.   app.failure_message(service::UsageError);
inline std::string UsageError(const CLI::App* app, const CLI::Error& error) {
  return app->get_name() + ": " + error.what() + "; --help lists the flags\n";
}

// A flag in seconds (fractions allowed), with the present value as its default.  `duration` must
// outlive the parse.
inline CLI::Option* AddSecondsFlag(CLI::App& app, const std::string& flag, absl::Duration* duration,
                                   const std::string& help) {
  return app
      .add_option_function<double>(
          flag,
          [duration, flag](const double& seconds) {
            if (std::isnan(seconds)) {
              throw CLI::ValidationError(flag, "nan is not a number of seconds");
            }
            *duration = absl::Seconds(seconds);
          },
          help)
      ->default_str(absl::StrCat(absl::ToDoubleSeconds(*duration)));
}

// For flags of 64 bits, where CLI11 takes -1 and whatever is too large for the largest number.
inline CLI::Validator Unsigned64() {
  return CLI::Validator(
      [](std::string& text) {
        uint64_t value;
        return absl::SimpleAtoi(text, &value)
                   ? std::string()
                   : absl::StrCat(text, " is not a whole number of 0 to ", UINT64_MAX);
      },
      "");
}

// For flags of type double: CLI::Range lets nan pass.
inline CLI::Validator NumberIn(double low, double high) {
  return CLI::Validator(
      [low, high](std::string& text) {
        double value;
        return absl::SimpleAtod(text, &value) && low <= value && value <= high
                   ? std::string()
                   : absl::StrCat(text, " is not a number of ", low, " to ", high);
      },
      "");
}

}  // namespace service

#endif  // SERVICE_COMMAND_LINE_H_
