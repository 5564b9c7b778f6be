#include "service/heap.h"

#include <malloc.h>

namespace service {

void LimitHeapArenas() {
  // By default a process has eight a core.  What is free in one arena is of no use to a thread of
  // another, and requests go from thread to thread: each arena grows to the most that its own
  // threads have ever had at once, and the later the rarer such a moment is.  Small blocks come
  // from each thread's own cache, so that threads seldom meet at an arena's lock.
  mallopt(M_ARENA_MAX, kMaxHeapArenas);
}

void TrimHeap() { malloc_trim(0); }

}  // namespace service
