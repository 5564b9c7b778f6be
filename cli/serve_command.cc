#include "cli/serve_command.h"

#include <iostream>
#include <memory>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "service/command_line.h"
#include "service/port_file.h"
#include "service/process.h"
#include "status/status_macros.h"

namespace cli {
namespace {

constexpr int32_t kHttpPort = 8000;  // where users of other servers look for it

absl::Status Run(LocalSystemOptions options) {
  service::BlockTerminationSignals();
  if (!options.http_port.has_value()) options.http_port = options.port == 0 ? 0 : kHttpPort;
  ASSIGN_OR_RETURN(const auto system, LocalSystem::Start(options));
  const std::string& address = system->address();
  int32_t port = 0;
  if (!absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port)) {
    return absl::InternalError(absl::StrCat("the router listens on ", address));
  }
  std::cout << "serving " << system->model_name() << " at " << address << std::endl;
  std::cout << "OpenAI API at " << (options.tls.enabled() ? "https" : "http")
            << "://127.0.0.1:" << system->http_port() << "/v1" << std::endl;
  RETURN_IF_ERROR(service::WritePorts(options.port_file,
                                      {{"grpc_port", port}, {"http_port", system->http_port()}}));
  const absl::Status ended = system->WaitForEnd();
  const absl::Status stopped = system->Stop();
  return ended.ok() ? stopped : ended;
}

}  // namespace

void AddLocalSystemFlags(CLI::App& command, LocalSystemOptions* options) {
  options->bin_dir = OwnDirectory();
  const auto add = [&command](const char* flag, auto& field, const char* help) {
    return command.add_option(flag, field, help)->capture_default_str();
  };
  const auto pass = [&command, options](const char* flag, const char* help) {
    const std::string name(flag);
    command.add_option_function<std::string>(
        name,
        [options, name](const std::string& value) {
          options->worker_flags.push_back(absl::StrCat(name, "=", value));
        },
        help);
  };
  add("--model", options->model_dir, "Checkpoint directory")->required();
  add("--prefill", options->num_prefill, "Prefill workers")->check(CLI::Range(0, 64));
  add("--decode", options->num_decode, "Decode workers")->check(CLI::Range(1, 64));
  command.add_flag("--role_both", options->role_both,
                   "Decode workers may prefill prompts of any length");
  add("--port", options->port, "The router's port on 127.0.0.1; 0: any")
      ->check(CLI::Range(0, 65535));
  command.add_flag_callback(
      "--random_weights", [options] { options->worker_flags.push_back("--random_weights"); },
      "Random weights of the config.json's shapes, for measuring");
  pass("--device", "cpu or cuda");
  pass("--dtype", "Activations: auto, float32 or bfloat16");
  pass("--kv_cache_dtype", "Cache: auto, float32, bfloat16 or fp8");
  pass("--num_threads", "CPU threads of each worker; 0: all cores");
  pass("--cache_bytes", "Memory for cache blocks of each worker");
  pass("--max_model_len", "Tokens; 0: the checkpoint's");
  pass("--links", "Data links, best first: shm, tcp");
  command.add_option("--tls_cert", options->tls.cert_file,
                     "PEM certificate of every process, made for 127.0.0.1");
  command.add_option("--tls_key", options->tls.key_file, "PEM key");
  command.add_option("--tls_ca", options->tls.ca_file,
                     "PEM authority; clients must then have its certificates");
  command.add_option("--worker_flag", options->worker_flags,
                     "A flag for every worker, as --worker_flag=--name=value; repeatable");
  command.add_option("--prefill_flag", options->prefill_flags,
                     "A flag for prefill workers; repeatable");
  command.add_option("--decode_flag", options->decode_flags,
                     "A flag for decode workers; repeatable");
  command.add_option("--router_flag", options->router_flags, "A flag for the router; repeatable");
  add("--bin_dir", options->bin_dir, "Holds ferry-router, ferry-prefill and ferry-decode");
  service::AddSecondsFlag(command, "--ready_timeout_s", &options->ready_timeout,
                          "Until the system must be ready")
      ->check(CLI::PositiveNumber);
  service::AddSecondsFlag(command, "--stop_limit_s", &options->stop_limit,
                          "What each process has for its end; then it is killed");
}

void AddServeCommand(CLI::App& app, absl::Status* result) {
  auto options = std::make_shared<LocalSystemOptions>();
  CLI::App* command = app.add_subcommand(
      "serve", "Run a router and workers on this machine until SIGTERM or Ctrl-C");
  AddLocalSystemFlags(*command, options.get());
  command
      ->add_option(
          "--http_port", options->http_port,
          "Port of OpenAI's API over HTTP on 127.0.0.1; 0: any; default: 8000, or any with "
          "--port 0")
      ->check(CLI::Range(0, 65535));
  command->add_option_function<std::string>(
      "--chat_format",
      [options](const std::string& format) {
        options->router_flags.push_back(absl::StrCat("--chat_format=", format));
      },
      "Of chat completions, in place of the checkpoint's own: v2, v3, r1, v3-0324, r1-0528, v3.1, "
      "v3.2 or v4");
  command->add_option_function<std::string>(
      "--api_keys_file",
      [options](const std::string& file) {
        options->router_flags.push_back(absl::StrCat("--api_keys_file=", file));
      },
      "File with the bearer tokens that HTTP clients must show one of, one a line, of 16 "
      "characters or more");
  command->add_option("--port_file", options->port_file,
                      "File that receives grpc_port=N and http_port=N once ready");
  command->add_option("--log_file", options->log_path,
                      "File for the processes' log lines; default: stderr");
  command->callback([options, result] { *result = Run(*options); });
}

}  // namespace cli
