// OtherRouter: a router process beside a system's own, over the same workers.
//
// Thread-compatible.

#ifndef TESTS_INTEGRATION_OTHER_ROUTER_H_
#define TESTS_INTEGRATION_OTHER_ROUTER_H_

#include <memory>
#include <string>
#include <vector>

#include "client/ferry_client.h"
#include "tests/integration/ferry_system.h"

namespace integration {

class OtherRouter final {
 public:
  // Returns when it says that the model can be served; dies with its log if that does not happen.
  OtherRouter(FerrySystem& system, const SystemOptions& options);

  const std::string& address() const { return address_; }
  ChildProcess& process() { return *process_; }
  ferry::Client& client() { return *client_; }
  // As a supervisor does: SIGTERM, the process must end with 0, another one at the same address.
  void Roll();

 private:
  void Start();

  std::vector<std::string> argv_;
  std::string dir_;
  std::string address_ = "127.0.0.1:0";
  std::unique_ptr<ChildProcess> process_;
  std::unique_ptr<ferry::Client> client_;
};

}  // namespace integration

#endif  // TESTS_INTEGRATION_OTHER_ROUTER_H_
