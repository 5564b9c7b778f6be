// How every Ferry program says that its command line is wrong: one line, because supervisors show
// the last one.   app.failure_message(service::UsageError);

#ifndef SERVICE_USAGE_ERROR_H_
#define SERVICE_USAGE_ERROR_H_

#include <string>

#include "CLI/CLI.hpp"

namespace service {

inline std::string UsageError(const CLI::App* app, const CLI::Error& error) {
  return app->get_name() + ": " + error.what() + "; --help lists the flags\n";
}

}  // namespace service

#endif  // SERVICE_USAGE_ERROR_H_
