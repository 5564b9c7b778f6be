#include "curl_handle/curl_handle.h"

#include <string>

namespace curl_handle {

absl::Status Start() {
  static const CURLcode started = curl_global_init(CURL_GLOBAL_DEFAULT);
  if (started == CURLE_OK) return absl::OkStatus();
  return absl::InternalError(std::string("libcurl: ") + curl_easy_strerror(started));
}

}  // namespace curl_handle
