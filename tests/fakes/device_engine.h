// DeviceEngine: an engine whose cache lies in a memory of its own, as a GPU's does.  A worker that
// looks for it in the memory that it gave the engine finds poison, not the right bytes by luck.
//
// Thread rule as Engine.

#ifndef TESTS_FAKES_DEVICE_ENGINE_H_
#define TESTS_FAKES_DEVICE_ENGINE_H_

#include <memory>

#include "engine/engine.h"

namespace fakes {

// `engine` computes, over memory that others reach by copies.
std::unique_ptr<engine::Engine> WithDeviceMemory(std::unique_ptr<engine::Engine> engine);

}  // namespace fakes

#endif  // TESTS_FAKES_DEVICE_ENGINE_H_
