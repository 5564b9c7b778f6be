#include "worker/speed_benchmark.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "engine/cache_memory.h"
#include "engine/engine.h"
#include "tests/fakes/rolling_network.h"

namespace worker {
namespace {

absl::StatusOr<SpeedEstimate> Measure(int32_t max_model_len, int32_t num_blocks) {
  engine::EngineOptions options;
  options.model_dir = std::string(std::getenv("FERRY_GOLDEN_DIR")) + "/models/v3_odd";
  options.num_threads = 1;
  options.max_model_len = max_model_len;
  const auto engine = engine::Engine::Create(options);
  if (!engine.ok()) return engine.status();
  auto memory = engine::CacheMemory::Map(num_blocks * (*engine)->cache_layout().block_bytes());
  if (!memory.ok()) return memory.status();
  (*engine)->SetCache(memory->span(), {});
  engine::BlockPool pool(num_blocks);
  auto speed = MeasureSpeed(**engine, pool);
  EXPECT_EQ(pool.num_held(), 0);
  return speed;
}

TEST(SpeedBenchmarkTest, FitsAnyContextAndCache) {
  for (const int32_t max_model_len : {2, 8, 9, 63, 64, 65, 127, 128, 129, 192, 300}) {
    const auto speed = Measure(max_model_len, 20);
    EXPECT_TRUE(speed.ok()) << max_model_len << ": " << speed.status();
  }
  for (int32_t num_blocks = 2; num_blocks < 12; ++num_blocks) {
    const auto speed = Measure(0, num_blocks);
    EXPECT_TRUE(speed.ok()) << num_blocks << ": " << speed.status();
  }
}

TEST(SpeedBenchmarkTest, FitsAnyNumberOfStateSlotsAndGivesThemBack) {
  for (const int32_t slots : {1, 2, 3, 4, 20}) {
    fakes::RollingOptions options;
    const auto engine = fakes::CreateRollingEngine(options);
    auto blocks = engine::CacheMemory::Map(20 * engine->cache_layout().block_bytes());
    auto states = engine::CacheMemory::Map((slots + 1) * options.state_slot_bytes);
    ASSERT_TRUE(blocks.ok() && states.ok());
    engine->SetCache(blocks->span(), states->span());
    engine::BlockPool pool(20, slots + 1);
    const auto speed = MeasureSpeed(*engine, pool);
    EXPECT_TRUE(speed.ok()) << slots << ": " << speed.status();
    EXPECT_EQ(pool.num_held(), 0);
    EXPECT_EQ(pool.state_slots()->num_held(), 0);
  }
}

}  // namespace
}  // namespace worker
