// What a Ferry process asks of the C library's heap.

#ifndef SERVICE_HEAP_H_
#define SERVICE_HEAP_H_

namespace service {

// Arenas of the heap, whatever number of cores there is.
inline constexpr int kMaxHeapArenas = 2;
// The largest block that a thread keeps for itself when it has freed it.
inline constexpr int kMaxThreadCachedBytes = 256;
// In the environment of a program that begins anew, until LimitHeap has seen it.
inline constexpr char kBegunAnew[] = "FERRY_BEGUN_ANEW";

// Keeps the heap to these two limits.  The C library takes the second one from GLIBC_TUNABLES
// alone, before main: so the program begins anew, in this process and with `argv` of main, if the
// variable says nothing of the heap.  What it does say of the heap stays as it is.  Where a program
// cannot begin anew its heap has the C library's limits.
// REQUIRES: called in main, before anything that the next beginning must not find done.
void LimitHeap(char** argv);

// Gives pages that are free, wherever they lie, back to the system: without it a process keeps the
// most that it has ever held at once, and that grows as long as rarer moments come.  Takes some
// microseconds, or a millisecond for each 2 MiB that it gives back.  Thread-safe.
void TrimHeap();

}  // namespace service

#endif  // SERVICE_HEAP_H_
