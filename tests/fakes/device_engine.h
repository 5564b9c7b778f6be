// DeviceEngine: an engine whose cache lies in a memory of its own, as a GPU's does.  What a worker
// forgets to export or to import is then poison, not the right bytes by luck.
//
// Thread rule as Engine.

#ifndef TESTS_FAKES_DEVICE_ENGINE_H_
#define TESTS_FAKES_DEVICE_ENGINE_H_

#include <memory>

#include "engine/engine.h"

namespace fakes {

// `engine` computes, over memory that only it and Export and Import see.
std::unique_ptr<engine::Engine> WithDeviceMemory(std::unique_ptr<engine::Engine> engine);

}  // namespace fakes

#endif  // TESTS_FAKES_DEVICE_ENGINE_H_
