#include "kv_transfer/inbox_probe.h"

namespace kv_transfer {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(250);
constexpr auto kLimit = std::chrono::seconds(1);

}  // namespace

ucs_status_t InboxProbe::Open(ucp_worker_h worker, const ucp_address_t* own_address,
                              unsigned am_id) {
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = am_id;
  handler.cb = &InboxProbe::OnProbe;
  handler.arg = this;
  const ucs_status_t status = ucp_worker_set_am_recv_handler(worker, &handler);
  if (status != UCS_OK) return status;
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.address = own_address;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;  // only such an endpoint can be closed by force
  am_id_ = am_id;
  return ucp_ep_create(worker, &params, &to_self_);
}

void InboxProbe::Close() {
  if (to_self_ == nullptr) return;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t request = ucp_ep_close_nbx(to_self_, &param);
  if (UCS_PTR_IS_PTR(request)) ucp_request_free(request);  // when it has completed
  to_self_ = nullptr;
  in_flight_ = false;
  blocked_ = false;
}

bool InboxProbe::Blocked(Clock::time_point now, bool idle) {
  if (to_self_ == nullptr || blocked_) return blocked_;
  if (in_flight_) {
    // While there is something to do the probe may be behind it.
    blocked_ = idle && now - sent_ > kLimit;
  } else if (now - sent_ > kInterval) {
    sent_ = now;
    in_flight_ = true;
    Send();
  }
  return blocked_;
}

void InboxProbe::Send() {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  const ucs_status_ptr_t request =
      ucp_am_send_nbx(to_self_, am_id_, nullptr, 0, nullptr, 0, &param);
  if (UCS_PTR_IS_PTR(request)) ucp_request_free(request);  // when it has completed
  // An error means that no probe comes back, and is found out like that.
}

ucs_status_t InboxProbe::OnProbe(void* arg, const void*, size_t, void*, size_t,
                                 const ucp_am_recv_param_t*) {
  static_cast<InboxProbe*>(arg)->in_flight_ = false;
  return UCS_OK;
}

}  // namespace kv_transfer
