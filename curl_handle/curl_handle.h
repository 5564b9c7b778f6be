// libcurl's objects with owners, and its start.

#ifndef CURL_HANDLE_CURL_HANDLE_H_
#define CURL_HANDLE_CURL_HANDLE_H_

#include <curl/curl.h>

#include <memory>

#include "absl/status/status.h"

namespace curl_handle {

struct Deleter {
  void operator()(CURL* curl) const { curl_easy_cleanup(curl); }
  void operator()(curl_slist* list) const { curl_slist_free_all(list); }
};
struct MultiDeleter {  // libcurl's own types may all be void
  void operator()(CURLM* multi) const { curl_multi_cleanup(multi); }
};
using Handle = std::unique_ptr<CURL, Deleter>;
using Multi = std::unique_ptr<CURLM, MultiDeleter>;
using List = std::unique_ptr<curl_slist, Deleter>;

// Before the first handle; starts the library once in a process.  Thread-safe.
// Errors: kInternal with libcurl's words.
absl::Status Start();

}  // namespace curl_handle

#endif  // CURL_HANDLE_CURL_HANDLE_H_
