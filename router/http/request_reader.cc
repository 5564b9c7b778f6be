#include "router/http/request_reader.h"

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/rfc7230.hpp>
#include <boost/beast/http/string_body.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace router::http {
namespace {

namespace beast_http = boost::beast::http;

absl::string_view View(boost::beast::string_view text) { return {text.data(), text.size()}; }

// Of a target in origin form, "/path?query", or in absolute form, "http://host/path?query", which
// is what a proxy gets, and every server must take.
absl::string_view PathOf(absl::string_view target) {
  for (const absl::string_view scheme : {"http://", "https://"}) {
    if (!absl::StartsWithIgnoreCase(target, scheme)) continue;
    target.remove_prefix(scheme.size());
    target.remove_prefix(std::min(target.find_first_of("/?"), target.size()));
    if (!absl::StartsWith(target, "/")) return "/";
  }
  return target.substr(0, target.find('?'));
}

}  // namespace

class RequestReader::Parser final : public beast_http::request_parser<beast_http::string_body> {};

RequestReader::RequestReader(const Limits& limits) : limits_(limits) {}
RequestReader::~RequestReader() = default;

std::optional<BadRequest> RequestReader::Read() {
  if (stage_ == Stage::kIdle) {
    // Some clients end a body with a line break that nobody counted.
    unread_.erase(0, std::min(unread_.find_first_not_of("\r\n"), unread_.size()));
    if (unread_.empty()) return std::nullopt;
    parser_ = std::make_unique<Parser>();
    parser_->header_limit(static_cast<uint32_t>(limits_.header_bytes));
    parser_->body_limit(limits_.body_bytes);
    stage_ = Stage::kHeader;
  }
  while (!unread_.empty() && stage_ != Stage::kComplete) {
    boost::beast::error_code error;
    const size_t used = parser_->put(boost::asio::buffer(unread_), error);
    unread_.erase(0, used);
    if (error == beast_http::error::header_limit) {
      return BadRequest{431,
                        absl::StrCat("the header has more than ", limits_.header_bytes, " bytes")};
    }
    if (error == beast_http::error::body_limit) {
      return BadRequest{413, absl::StrCat("the body has more than ", limits_.body_bytes, " bytes")};
    }
    if (error && error != beast_http::error::need_more) {
      return BadRequest{400, absl::StrCat("not an HTTP request: ", error.message())};
    }
    if (stage_ == Stage::kHeader && parser_->is_header_done()) {
      if (auto bad = CheckHeader()) return bad;
      stage_ = Stage::kBody;
    }
    if (parser_->is_done()) stage_ = Stage::kComplete;
    if (error || used == 0) break;
  }
  // Of a body only the line before a chunk and the trailer wait for their end.
  if (stage_ == Stage::kBody && unread_.size() > limits_.header_bytes) {
    return BadRequest{400, absl::StrCat("a line of the chunked body has more than ",
                                        limits_.header_bytes, " bytes")};
  }
  return std::nullopt;
}

std::optional<BadRequest> RequestReader::CheckHeader() {
  const auto& header = parser_->get();
  const size_t transfers = header.count(beast_http::field::transfer_encoding);
  const absl::string_view transfer = View(header[beast_http::field::transfer_encoding]);
  if (transfers > 1 ||
      (transfers == 1 && (!parser_->chunked() || !absl::EqualsIgnoreCase(transfer, "chunked")))) {
    return BadRequest{501,
                      absl::StrCat("transfer-encoding \"", absl::CHexEscape(transfer),
                                   transfers > 1 ? "\" is not the only one" : "\" is not chunked")};
  }
  const absl::string_view coding = View(header[beast_http::field::content_encoding]);
  if (!coding.empty() && !absl::EqualsIgnoreCase(coding, "identity")) {
    return BadRequest{415, absl::StrCat("content-encoding \"", absl::CHexEscape(coding),
                                        "\" cannot be read: send the body as it is")};
  }
  if (header.version() == 11 && header.count(beast_http::field::host) == 0) {
    return BadRequest{400, "the host header is missing"};
  }
  // Which one counts is not ours to choose: of two tenants one may be the client's own word.
  for (const char* const name : {"host", "authorization", "x-ferry-tenant", "x-request-id"}) {
    const size_t count = header.count(name);
    if (count > 1) {
      return BadRequest{400, absl::StrCat("there are ", count, " ", name, " headers")};
    }
  }
  expects_continue_ =
      header.version() == 11 && !parser_->is_done() &&
      absl::EqualsIgnoreCase(View(header[beast_http::field::expect]), "100-continue");
  return std::nullopt;
}

bool RequestReader::TakeExpectation() {
  return std::exchange(expects_continue_, false) && stage_ == Stage::kBody;
}

bool RequestReader::is_head() const {
  return parser_ != nullptr && parser_->get().method() == beast_http::verb::head;
}

std::string_view RequestReader::HeaderSoFar(std::string_view lower_case_name) const {
  if (parser_ == nullptr) return {};
  const auto& header = parser_->get();
  const boost::beast::string_view name(lower_case_name.data(), lower_case_name.size());
  if (header.count(name) != 1) return {};
  const auto value = header[name];
  return {value.data(), value.size()};
}

Request RequestReader::Header() const {
  const auto& message = parser_->get();
  Request request = {.method = std::string(View(message.method_string())),
                     .path = std::string(PathOf(View(message.target()))),
                     .headers = {},
                     .body = {},
                     .keep_alive = message.keep_alive(),
                     .takes_chunks = message.version() == 11};
  for (const auto& field : message) {
    request.headers.emplace_back(absl::AsciiStrToLower(View(field.name_string())),
                                 std::string(View(field.value())));
  }
  return request;
}

Request RequestReader::Take() {
  Request request = Header();
  request.body = std::move(parser_->get().body());
  parser_.reset();
  if (unread_.empty()) unread_ = std::string();  // room of a large request is not kept
  stage_ = Stage::kIdle;
  return request;
}

}  // namespace router::http
