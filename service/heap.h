// What a Ferry process asks of the C library's heap.

#ifndef SERVICE_HEAP_H_
#define SERVICE_HEAP_H_

namespace service {

// Arenas of the heap, whatever number of cores there is.
inline constexpr int kMaxHeapArenas = 2;

// Keeps the heap to kMaxHeapArenas.  REQUIRES: called in main, before any thread exists.
void LimitHeapArenas();

}  // namespace service

#endif  // SERVICE_HEAP_H_
