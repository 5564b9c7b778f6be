// The faults that the suite injects while clients keep the system busy.

#ifndef TESTS_CHAOS_FAULTS_H_
#define TESTS_CHAOS_FAULTS_H_

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tests/chaos/stage.h"

namespace chaos {

struct Fault {
  std::string name;
  // Breaks something of one worker (or of the router), lets the clients go on for a while, and
  // repairs it.  A second worker of each kind stays whole.
  std::function<void(Stage&, std::mt19937_64&)> inject;
};
const std::vector<Fault>& AllFaults();
// Those after which the router and the first worker of each kind are still the same processes.
const std::vector<Fault>& LastingFaults();

// Requests of all sizes for the demo model, some with a common beginning, a few of more branches.
std::vector<Question> MixedQuestions(integration::SingleEngine& oracle);

}  // namespace chaos

#endif  // TESTS_CHAOS_FAULTS_H_
