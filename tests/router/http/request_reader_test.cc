#include "router/http/request_reader.h"

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace router::http {
namespace {

using Stage = RequestReader::Stage;
using testing::HasSubstr;

constexpr char kPost[] =
    "POST /v1/completions?x=1 HTTP/1.1\r\nHost: a\r\nX-Thing:  two words \r\nContent-Length: 5\r\n"
    "\r\nhello";

// The status and the sentence, or "".
std::string Bad(const std::string& bytes, RequestReader::Limits limits = {}) {
  RequestReader reader(limits);
  reader.Append(bytes);
  const auto bad = reader.Read();
  return bad.has_value() ? absl::StrCat(bad->status, " ", bad->message) : "";
}

TEST(RequestReaderTest, ReadsARequestHoweverItIsCut) {
  const std::string bytes = kPost;
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    RequestReader reader({});
    EXPECT_EQ(reader.stage(), Stage::kIdle);
    reader.Append(bytes.substr(0, cut));
    ASSERT_FALSE(reader.Read().has_value()) << cut;
    EXPECT_EQ(reader.stage() == Stage::kComplete, cut == bytes.size()) << cut;
    reader.Append(bytes.substr(cut));
    ASSERT_FALSE(reader.Read().has_value()) << cut;
    ASSERT_EQ(reader.stage(), Stage::kComplete) << cut;
    const Request request = reader.Take();
    EXPECT_EQ(request.method, "POST");
    EXPECT_EQ(request.path, "/v1/completions");
    EXPECT_EQ(request.Header("x-thing"), "two words");
    EXPECT_EQ(request.Header("authorization"), "");
    EXPECT_EQ(request.body, "hello");
    EXPECT_TRUE(request.keep_alive);
    EXPECT_TRUE(request.takes_chunks);
    EXPECT_EQ(reader.stage(), Stage::kIdle);
  }
}

TEST(RequestReaderTest, ATargetMayBeAWholeUrl) {
  for (const auto& [target, path] :
       {std::pair{"http://ferry.example:8000/v1/models?x=/y", "/v1/models"},
        std::pair{"HTTPS://[::1]:8000/v1/models", "/v1/models"}, std::pair{"http://ferry", "/"},
        std::pair{"http://ferry?x=1", "/"}, std::pair{"/http://a/b?c", "/http://a/b"},
        std::pair{"*", "*"}, std::pair{"ftp://a/b", "ftp://a/b"}}) {
    RequestReader reader({});
    reader.Append(absl::StrCat("GET ", target, " HTTP/1.1\r\nHost: a\r\n\r\n"));
    ASSERT_FALSE(reader.Read().has_value()) << target;
    EXPECT_EQ(reader.Take().path, path) << target;
  }
}

TEST(RequestReaderTest, RequestsSentAheadComeOneAfterTheOther) {
  RequestReader reader({});
  reader.Append(absl::StrCat(kPost, "\r\n", kPost, "GET / HTTP/1.0\r\n\r\n"));
  for (int i = 0; i < 2; ++i) {
    ASSERT_FALSE(reader.Read().has_value());
    ASSERT_EQ(reader.stage(), Stage::kComplete);
    EXPECT_EQ(reader.Take().body, "hello");
  }
  ASSERT_FALSE(reader.Read().has_value());
  const Request last = reader.Take();
  EXPECT_EQ(last.path, "/");
  EXPECT_FALSE(last.keep_alive);
  EXPECT_FALSE(last.takes_chunks);
  ASSERT_FALSE(reader.Read().has_value());
  EXPECT_EQ(reader.stage(), Stage::kIdle);
}

TEST(RequestReaderTest, ReadsAChunkedBody) {
  const std::string bytes =
      "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n"
      "0\r\n\r\n";
  for (size_t cut = 0; cut < bytes.size(); ++cut) {
    RequestReader reader({});
    reader.Append(bytes.substr(0, cut));
    ASSERT_FALSE(reader.Read().has_value()) << cut;
    reader.Append(bytes.substr(cut));
    ASSERT_FALSE(reader.Read().has_value()) << cut;
    ASSERT_EQ(reader.stage(), Stage::kComplete) << cut;
    EXPECT_EQ(reader.Take().body, "abcde") << cut;
  }
}

TEST(RequestReaderTest, TellsOnceThatTheClientWaitsBeforeTheBody) {
  RequestReader reader({});
  reader.Append("POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-Continue\r\ncontent-length: 2\r\n\r\n");
  ASSERT_FALSE(reader.Read().has_value());
  EXPECT_EQ(reader.stage(), Stage::kBody);
  EXPECT_EQ(reader.Header().path, "/");
  EXPECT_TRUE(reader.TakeExpectation());
  EXPECT_FALSE(reader.TakeExpectation());
  reader.Append("ab");
  ASSERT_FALSE(reader.Read().has_value());
  EXPECT_EQ(reader.Take().body, "ab");

  reader.Append(
      "POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\nab");
  ASSERT_FALSE(reader.Read().has_value());
  EXPECT_FALSE(reader.TakeExpectation()) << "the body is there already";
}

TEST(RequestReaderTest, RefusesWhatIsNoRequest) {
  EXPECT_THAT(Bad("hello\r\n\r\n"), HasSubstr("400 not an HTTP request: "));
  EXPECT_THAT(Bad("GET / HTTP/2.0\r\nhost: a\r\n\r\n"), HasSubstr("400 "));
  EXPECT_THAT(Bad("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"), HasSubstr("400 "));
  EXPECT_EQ(Bad("GET / HTTP/1.1\r\n\r\n"), "400 the host header is missing");
  EXPECT_THAT(Bad("GET / HTTP/1.1\r\nhost: a\r\nbad header\r\n\r\n"), HasSubstr("400 "));
  EXPECT_THAT(Bad("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n"), HasSubstr("400 "));
  EXPECT_THAT(Bad("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n"),
              HasSubstr("400 "));
  EXPECT_THAT(
      Bad("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n"
          "\r\n0\r\n\r\n"),
      HasSubstr("400 "))
      << "whose end is in doubt could smuggle another request";
  EXPECT_EQ(Bad("POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n"),
            "501 transfer-encoding \"gzip\" is not chunked");
  EXPECT_EQ(Bad("POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
            "501 transfer-encoding \"gzip, chunked\" is not chunked");
  EXPECT_THAT(Bad("POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n"
                  "transfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
              HasSubstr("501 "));
  EXPECT_EQ(Bad("POST / HTTP/1.1\r\nhost: a\r\ncontent-encoding: gzip\r\n"
                "content-length: 1\r\n\r\na"),
            "415 content-encoding \"gzip\" cannot be read: send the body as it is");
  EXPECT_EQ(Bad("GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n"), "400 there are 2 host headers");
  for (const std::string name : {"authorization", "x-ferry-tenant", "x-request-id"}) {
    EXPECT_EQ(
        Bad("GET / HTTP/1.1\r\nhost: a\r\n" + name + ": a\r\nX: b\r\n" + name + ": b\r\n\r\n"),
        "400 there are 2 " + name + " headers");
  }
  EXPECT_THAT(Bad("POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n"),
              HasSubstr("400 "));
}

TEST(RequestReaderTest, LimitsHeaderAndBody) {
  const RequestReader::Limits limits = {.header_bytes = 200, .body_bytes = 10};
  EXPECT_EQ(Bad(absl::StrCat("GET / HTTP/1.1\r\nhost: a\r\nx: ", std::string(300, 'y')), limits),
            "431 the header has more than 200 bytes");
  EXPECT_EQ(Bad(absl::StrCat("GET /", std::string(300, 'y')), limits),
            "431 the header has more than 200 bytes");
  EXPECT_EQ(Bad("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 11\r\n\r\n", limits),
            "413 the body has more than 10 bytes");
  EXPECT_EQ(
      Bad("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999\r\n\r\n", limits)
          .substr(0, 3),
      "400");
  EXPECT_EQ(Bad("POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n6\r\nabcdef\r\n"
                "6\r\nabcdef\r\n0\r\n\r\n",
                limits),
            "413 the body has more than 10 bytes");
  EXPECT_EQ(Bad(absl::StrCat("POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1;",
                             std::string(300, 'y')),
                limits),
            "400 a line of the chunked body has more than 200 bytes");
  EXPECT_EQ(Bad("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n0123456789", limits), "");
}

}  // namespace
}  // namespace router::http
