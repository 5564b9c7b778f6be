// consumer HOST:PORT PROMPT: prints the answer, generated once by Generate and once by Start.
#include <iostream>
#include <string>

#include "ferry/ferry_client.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const auto client = ferry::Client::Create({.address = argv[1]});
  if (!client.ok()) {
    std::cerr << client.status() << "\n";
    return 1;
  }
  ferry::v1::GenerateRequest request;
  request.set_text(argv[2]);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_max_tokens(24);
  std::string once, again;
  const absl::Status status = (*client)->Generate(request, [&](const auto& response) {
    once += response.text();
    return true;
  });
  const auto running = (*client)->Start(
      request,
      [&](const auto& response) {
        again += response.text();
        return true;
      },
      [](const absl::Status&) {});
  if (!running->Wait().ok() || !status.ok()) {
    std::cerr << status << "\n" << running->Wait() << "\n";
    return 1;
  }
  if (once != again) {
    std::cerr << "Generate: " << once << "\nStart: " << again << "\n";
    return 1;
  }
  std::cout << once;
}
