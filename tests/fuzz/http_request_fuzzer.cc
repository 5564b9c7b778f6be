// The bytes of an HTTP connection: however they are cut into pieces, the same requests come out,
// and nothing is kept beyond the limits.  The first byte says how they are cut.  What is no request
// yet may be refused before its end has come, or not.

#include <string>
#include <vector>

#include "router/http/request_reader.h"
#include "status/check.h"

namespace {

using router::http::RequestReader;

constexpr RequestReader::Limits kLimits = {.header_bytes = 2000, .body_bytes = 2000};

// What was read, as one text; pieces of `step` bytes.
std::string ReadAll(const std::string& bytes, size_t step) {
  RequestReader reader(kLimits);
  std::string all;
  for (size_t at = 0; at < bytes.size(); at += step) {
    reader.Append(std::string_view(bytes).substr(at, step));
    while (true) {
      if (const auto bad = reader.Read()) {
        FERRY_CHECK(!bad->message.empty() && bad->status >= 400);
        return all;
      }
      if (reader.stage() != RequestReader::Stage::kComplete) break;
      const router::http::Request request = reader.Take();
      FERRY_CHECK(request.body.size() <= kLimits.body_bytes);
      all += request.method + " " + request.path + "\n" + request.body + "\n";
      for (const auto& [name, value] : request.headers) all += name + ":" + value + "\n";
    }
    FERRY_CHECK(reader.unread_bytes() <= kLimits.header_bytes + step);
  }
  return all;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t step = 1 + data[0];
  const std::string whole = ReadAll(bytes, bytes.size() + 1);
  const std::string pieces = ReadAll(bytes, step);
  // A header about as long as its limit passes or not.
  if (bytes.size() <= kLimits.header_bytes) {
    FERRY_CHECK(whole == pieces) << "in pieces of " << step << "\n--- whole\n"
                                 << whole << "\n--- pieces\n"
                                 << pieces;
  }
  return 0;
}
