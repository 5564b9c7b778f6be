// TearMessage: a shared-memory peer that is stopped or killed between taking a place in the
// receiver's queue and filling it (kv_transfer/inbox_probe.h).
//
// UCX asks for a message's bytes when its place is taken, so there the process signals itself.

#ifndef TESTS_KV_TRANSFER_TORN_MESSAGE_H_
#define TESTS_KV_TRANSFER_TORN_MESSAGE_H_

#include <ucp/api/ucp.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <string>

#include "kv_transfer/sealed_address.h"
#include "kv_transfer/transport.h"

namespace kv_transfer {

namespace torn_message {

inline int signal_to_raise = 0;

inline size_t RaiseAndPack(void*, size_t, void* destination, size_t length) {
  raise(signal_to_raise);
  std::memset(destination, 0, length);
  return length;
}

}  // namespace torn_message

// True: the message went out after all, as after SIGSTOP and SIGCONT.
inline bool TearMessage(const LinkAddress& receiver, int signal) {
  constexpr size_t kBytes = 2000;  // neither a short message nor a rendezvous
  torn_message::signal_to_raise = signal;
  const auto address = OpenAddress(receiver.worker_address);
  ucp_config_t* config = nullptr;
  if (!address.ok() || ucp_config_read(nullptr, nullptr, &config) != UCS_OK) return false;
  ucp_config_modify(config, "TLS", "shm");
  ucp_config_modify(config, "MM_ERROR_HANDLING", "y");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM;
  ucp_context_h context = nullptr;
  const ucs_status_t initialized = ucp_init(&params, config, &context);
  ucp_config_release(config);
  if (initialized != UCS_OK) return false;
  ucp_worker_params_t worker_params{};
  ucp_worker_h worker = nullptr;
  if (ucp_worker_create(context, &worker_params, &worker) != UCS_OK) return false;
  ucp_ep_params_t to{};
  to.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  to.address = reinterpret_cast<const ucp_address_t*>(address->data());
  to.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  ucp_ep_h endpoint = nullptr;
  if (ucp_ep_create(worker, &to, &endpoint) != UCS_OK) return false;

  ucp_generic_dt_ops_t pieces{};
  pieces.start_pack = [](void*, const void*, size_t) -> void* { return nullptr; };
  pieces.packed_size = [](void*) { return kBytes; };
  pieces.pack = &torn_message::RaiseAndPack;
  pieces.finish = [](void*) {};
  ucp_datatype_t datatype{};
  if (ucp_dt_create_generic(&pieces, nullptr, &datatype) != UCS_OK) return false;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_DATATYPE;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.datatype = datatype;
  constexpr unsigned kNobodysAm = 30;
  const ucs_status_ptr_t sent =
      ucp_am_send_nbx(endpoint, kNobodysAm, nullptr, 0, &params, 1, &param);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (UCS_PTR_IS_PTR(sent) && ucp_request_check_status(sent) == UCS_INPROGRESS &&
         std::chrono::steady_clock::now() < deadline) {
    ucp_worker_progress(worker);
  }
  return UCS_PTR_IS_PTR(sent) ? ucp_request_check_status(sent) == UCS_OK
                              : UCS_PTR_STATUS(sent) == UCS_OK;
}

}  // namespace kv_transfer

#endif  // TESTS_KV_TRANSFER_TORN_MESSAGE_H_
