#include "router/wire_parse.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/unknown_field_set.h>

#include "absl/strings/str_cat.h"
#include "tokenizer/utf8.h"

namespace router {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::UnknownField;
using google::protobuf::UnknownFieldSet;

// The first string of `fields`, read as `type`, that is not UTF-8, as "name: byte n"; "" if all
// are.
std::string FindInvalidString(const UnknownFieldSet& fields, const Descriptor& type) {
  for (int i = 0; i < fields.field_count(); ++i) {
    const UnknownField& field = fields.field(i);
    const FieldDescriptor* const known = type.FindFieldByNumber(field.number());
    if (known == nullptr || field.type() != UnknownField::TYPE_LENGTH_DELIMITED) continue;
    const std::string& bytes = field.length_delimited();
    if (known->type() == FieldDescriptor::TYPE_STRING) {
      const size_t offset = tokenizer::FirstInvalidUtf8(bytes);
      if (offset < bytes.size()) {
        return absl::StrCat(known->name(), " is not valid UTF-8 at byte ", offset);
      }
    } else if (known->type() == FieldDescriptor::TYPE_MESSAGE) {
      UnknownFieldSet nested;
      if (!nested.ParseFromString(bytes)) continue;
      const std::string found = FindInvalidString(nested, *known->message_type());
      if (!found.empty()) return absl::StrCat(known->name(), ".", found);
    }
  }
  return "";
}

}  // namespace

absl::Status ParseRequest(const std::string& bytes, google::protobuf::Message* message) {
  if (message->ParseFromString(bytes)) return absl::OkStatus();
  const Descriptor& type = *message->GetDescriptor();
  UnknownFieldSet fields;
  if (fields.ParseFromString(bytes)) {
    const std::string found = FindInvalidString(fields, type);
    if (!found.empty()) return absl::InvalidArgumentError(found);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the message of ", bytes.size(), " bytes is not a ", type.full_name()));
}

}  // namespace router
