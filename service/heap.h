// What a Ferry process asks of the C library's heap.

#ifndef SERVICE_HEAP_H_
#define SERVICE_HEAP_H_

namespace service {

// Arenas of the heap, whatever number of cores there is.
inline constexpr int kMaxHeapArenas = 2;

// Keeps the heap to kMaxHeapArenas.  REQUIRES: called in main, before any thread exists.
void LimitHeapArenas();

// Gives pages that are free, wherever they lie, back to the system: without it a process keeps the
// most that it has ever held at once, and that grows as long as rarer moments come.  Takes some
// microseconds, or a millisecond for each 2 MiB that it gives back.  Thread-safe.
void TrimHeap();

}  // namespace service

#endif  // SERVICE_HEAP_H_
