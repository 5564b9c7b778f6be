// Channels that nobody uses any more and that are about to be connected.
//
// gRPC 1.51 forgets a connection that comes to be after its channel has gone: its socket and
// buffers stay until the peer closes it, which a worker does after an hour.  A peer that is
// stopped, or slow to answer, makes that likely.  So a channel that is let go of in the middle of
// an attempt to connect is kept until the attempt has ended: seconds, by the limit that MakeChannel
// sets.
//
// Thread-safe.

#ifndef SERVICE_ABANDONED_CHANNELS_H_
#define SERVICE_ABANDONED_CHANNELS_H_

#include <memory>

namespace grpc {
class Channel;
}

namespace service {

// `channel` for any number of users; when the last of them lets go of it, it ends as said above.
std::shared_ptr<grpc::Channel> EndedWhenConnected(std::shared_ptr<grpc::Channel> channel);

}  // namespace service

#endif  // SERVICE_ABANDONED_CHANNELS_H_
