// The chaos suite's main: everything runs in a network of its own.

#include <cstdio>
#include <string>

#include "gtest/gtest.h"
#include "tests/chaos/network.h"
#include "tests/chaos/stage.h"

namespace chaos {
namespace {
Network* own_network = nullptr;
}  // namespace

Network& OwnNetwork() { return *own_network; }

}  // namespace chaos

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  std::string why_not;
  const auto network = chaos::Network::Create(&why_not);
  if (network == nullptr) {
    std::fprintf(stderr, "%s\n", why_not.c_str());
    return 1;
  }
  chaos::own_network = network.get();
  return RUN_ALL_TESTS();
}
