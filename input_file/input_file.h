// Files that a user has named: checkpoints, tokenizers, certificates.
//
// Only a regular file is opened.  A pipe, a socket or a device in its place could keep the program
// waiting for ever, and files are read again later, which a pipe does not allow.
//
// Stateless functions.

#ifndef INPUT_FILE_INPUT_FILE_H_
#define INPUT_FILE_INPUT_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace input_file {

// Whether `path` leads to a regular file.
// Errors: kNotFound "no such file: PATH"; kInvalidArgument "PATH: not a regular file", "PATH: a
// link that leads to no file", as in a download that was cut off, or why nobody can tell.
absl::Status Check(const std::string& path);

// Whether there is anything at `path`, if only what Check objects to: then an optional file is
// wrong, not left out.
bool IsThere(const std::string& path);

// The whole file.  Errors: as of Check; kInvalidArgument if it has more than `max_bytes` or cannot
// be read.
absl::StatusOr<std::string> Read(const std::string& path, int64_t max_bytes);

}  // namespace input_file

#endif  // INPUT_FILE_INPUT_FILE_H_
