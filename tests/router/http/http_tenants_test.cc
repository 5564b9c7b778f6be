// OpenAI's API against fake workers: whose requests they are.

#include "gmock/gmock.h"
#include "tests/router/http/http_fixture.h"
#include "tests/tokenizer/tiny_tokenizer.h"

namespace router::http {
namespace {

using fakes::FakeWorker;
using testing::StartsWith;

TEST_F(HttpFixture, ATenantIsThatOfTheKeyOrOfAHeaderThatIsBelieved) {
  const tokenizer::TempDir dir;
  dir.Write("keys", "sk-0123456789abcdef acme\nsk-fedcba9876543210\n");
  http_options_.api_keys_file = dir.path() + "/keys";
  http_options_.trust_tenant_header = true;
  FakeWorker* const decode = Decode();
  StartHttp();
  const auto namespace_of = [&](const std::string& headers) {
    const Reply reply = Post(kCompletions, kHi, headers);
    EXPECT_EQ(reply.status, 200) << reply.body;
    return decode->decodes().back().spec().cache_namespace();
  };
  const auto expected = [&](const std::string& tenant) {
    ferry::v1::GenerateRequest request = Text("say hi");
    request.set_tenant(tenant);
    EXPECT_TRUE(Generate(request).status.ok());
    return decode->decodes().back().spec().cache_namespace();
  };
  const std::string of_acme = "Authorization: Bearer sk-0123456789abcdef\r\n";
  const std::string of_nobody = "Authorization: Bearer sk-fedcba9876543210\r\n";
  const std::string says_bolt = "X-Ferry-Tenant: bolt\r\n";
  ASSERT_NE(expected("acme"), expected(""));
  EXPECT_EQ(namespace_of(of_acme), expected("acme"));
  EXPECT_EQ(namespace_of(of_acme + says_bolt), expected("acme")) << "the key knows better";
  EXPECT_EQ(namespace_of(of_nobody), expected(""));
  EXPECT_EQ(namespace_of(of_nobody + says_bolt), expected("bolt"));
  const Reply odd = Post(kCompletions, kHi, of_nobody + "X-Ferry-Tenant: two words\r\n");
  EXPECT_EQ(odd.status, 400);
  EXPECT_THAT(ErrorOf(odd), StartsWith("x-ferry-tenant \"two words\""));
  // A front door that adds its header to the client's own.
  const Reply two = Post(kCompletions, kHi, of_nobody + says_bolt + "X-Ferry-Tenant: acme\r\n");
  EXPECT_EQ(two.status, 400);
  EXPECT_EQ(ErrorOf(two), "there are 2 x-ferry-tenant headers");
}

TEST_F(HttpFixture, ATenantThatNobodyVouchesForIsRefused) {
  FakeWorker* const decode = Decode();
  StartHttp();
  const Reply reply = Post(kCompletions, kHi, "X-Ferry-Tenant: acme\r\n");
  EXPECT_EQ(reply.status, 403);
  EXPECT_EQ(ErrorOf(reply), "x-ferry-tenant is \"acme\": this router does not believe that header");
  EXPECT_TRUE(decode->decodes().empty());
}

TEST_F(HttpFixture, ACallOfMorePromptsThanARateEverSavesPassesOnceAndWhole) {
  options_.tenant_limits = {"acme=0:0:0.001"};
  http_options_.trust_tenant_header = true;
  FakeWorker* const decode = Decode();
  decode->on_decode = [](std::shared_ptr<fakes::DecodeCall> call) {
    call->Accept();
    call->Answer("x");
  };
  StartHttp();
  const std::string three = R"({"prompt": ["a", "b", "c"]})";
  EXPECT_EQ(Post(kCompletions, three, "X-Ferry-Tenant: acme\r\n").status, 200);
  const Reply again = Post(kCompletions, three, "X-Ferry-Tenant: acme\r\n");
  EXPECT_EQ(again.status, 429);
  EXPECT_EQ(ErrorOf(again), "tenant acme: more than 0.001 requests a second");
  EXPECT_GT(std::stoi(again.headers.at("retry-after")), 1900);
  EXPECT_EQ(decode->decodes().size(), 3u);
}

TEST_F(HttpFixture, WithKeysOnlyThoseWhoHaveOneAreServed) {
  const tokenizer::TempDir dir;
  dir.Write("keys", "sk-0123456789abcdef\n");
  http_options_.api_keys_file = dir.path() + "/keys";
  Add(ferry::v1::WORKER_ROLE_BOTH);
  StartHttp();
  const std::string good = "Authorization: Bearer sk-0123456789abcdef\r\n";
  const std::string bad = "Authorization: Bearer sk-0123456789abcdeg\r\n";
  EXPECT_EQ(Post(kCompletions, kHi, good).status, 200);
  for (const std::string& headers : {std::string(), bad}) {
    const Reply reply = Post(kCompletions, kHi, headers);
    EXPECT_EQ(reply.status, 401);
    EXPECT_EQ(reply.Json()["error"]["code"], "invalid_api_key");
    EXPECT_EQ(reply.headers.at("www-authenticate"), "Bearer");
    EXPECT_EQ(Get("/v1/models", headers).status, 401);
    EXPECT_EQ(Get("/metrics", headers).status, 401);
    EXPECT_EQ(Get("/health", headers).status, 200);
    EXPECT_EQ(Get("/ready", headers).status, 200);
  }
  EXPECT_EQ(Get("/v1/models", good).status, 200);
  // Nobody has to send a long body to be told so.
  HttpClient client(port());
  client.Send("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n{");
  EXPECT_EQ(client.Read().status, 401);
}

}  // namespace
}  // namespace router::http
