#include "status/public_message.h"

namespace status {

absl::Status WithPublicMessage(absl::Status status, const std::string& sentence) {
  status.SetPayload(kPublicMessageUrl, absl::Cord(sentence));
  return status;
}

std::string PublicMessage(const absl::Status& status) {
  const auto payload = status.GetPayload(kPublicMessageUrl);
  return payload.has_value() ? std::string(*payload) : std::string(status.message());
}

}  // namespace status
