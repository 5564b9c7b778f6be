// What absl makes of the order in which locks are taken.

#ifndef SERVICE_LOCK_ORDER_H_
#define SERVICE_LOCK_ORDER_H_

namespace service {

// absl records it unless it was compiled with NDEBUG, which Debian's is not: every lock that gRPC
// takes is looked up in a graph of all others, the graph grows for hours, and what looks like a
// deadlock to come ends the process.  From here on it does not.
// REQUIRES: called in main, before gRPC has threads.
void ForgetLockOrder();

}  // namespace service

#endif  // SERVICE_LOCK_ORDER_H_
