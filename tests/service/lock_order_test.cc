#include "service/lock_order.h"

#include <gtest/gtest.h>

#include "absl/synchronization/mutex.h"

namespace service {
namespace {

// Where absl records it, the second order would end the process.
TEST(LockOrderTest, NoOrderIsHeldAgainstTheProcess) {
  ForgetLockOrder();
  absl::Mutex first, second;
  int num_taken = 0;
  {
    absl::MutexLock outer(&first);
    absl::MutexLock inner(&second);
    ++num_taken;
  }
  {
    absl::MutexLock outer(&second);
    absl::MutexLock inner(&first);
    ++num_taken;
  }
  EXPECT_EQ(num_taken, 2);
}

}  // namespace
}  // namespace service
