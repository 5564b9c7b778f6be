#include "service/lock_order.h"

#include "absl/synchronization/mutex.h"

namespace service {

void ForgetLockOrder() { absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore); }

}  // namespace service
