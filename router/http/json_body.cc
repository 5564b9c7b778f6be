#include "router/http/json_body.h"

#include <cmath>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "chat/python_json.h"

namespace router::http {
namespace {

constexpr size_t kMaxMembers = 512;
constexpr size_t kShownBytes = 80;

// absl::StrCat of Debian does not take std::string_view.
absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

// Reads a body without keeping anything, as far as it is within the limits.  A pass of its own: the
// library's callback for its tree looks at all elements of an array after each object in it.
class Limits final : public nlohmann::json_sax<Json> {
 public:
  absl::Status status() const { return status_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return Enter(); }
  bool start_array(size_t) override { return Enter(); }
  bool end_object() override { return Leave(); }
  bool end_array() override { return Leave(); }
  bool key(string_t&) override {
    if (++members_.back() <= kMaxMembers) return true;
    status_ = absl::InvalidArgumentError(
        absl::StrCat("an object of the body has more than ", kMaxMembers, " members"));
    return false;
  }
  // Told by the pass that makes the tree.
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override {
    return false;
  }

 private:
  bool Enter() {
    members_.push_back(0);
    if (members_.size() <= static_cast<size_t>(chat::kMaxLevels)) return true;
    status_ = absl::InvalidArgumentError(
        absl::StrCat("the body is nested more than ", chat::kMaxLevels, " levels deep"));
    return false;
  }
  bool Leave() {
    members_.pop_back();
    return true;
  }

  std::vector<size_t> members_;  // of the objects and arrays around what is being read
  absl::Status status_;
};

}  // namespace

absl::StatusOr<Json> ParseJsonObject(std::string_view body) {
  // The library takes it for the end.
  if (const size_t at = body.find('\0'); at != body.npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("the body is not JSON: byte ", at, " is a NUL character"));
  }
  Limits limits;
  Json value;
  try {
    Json::sax_parse(body, &limits);
    if (!limits.status().ok()) return limits.status();
    value = Json::parse(body);
  } catch (const Json::exception& error) {
    std::string what = error.what();
    what.erase(0, what.find("] ") + 2);  // the library's name of the error
    if (what.size() > 200) what = what.substr(0, 200) + "...";
    return absl::InvalidArgumentError(absl::StrCat("the body is not JSON: ", what));
  }
  if (!value.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the body is ", Shown(value), ": must be an object"));
  }
  return value;
}

std::string Dump(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

bool IsTokenId(const Json& value) {
  return value.is_number_unsigned() && value <= std::numeric_limits<int32_t>::max();
}

std::string Shown(const Json& value) {
  if (value.is_structured()) {
    const std::string text = value.size() <= 8 ? Dump(value) : "";
    if (!text.empty() && text.size() <= kShownBytes) return text;
    return absl::StrCat(value.is_object() ? "an object of " : "an array of ", value.size());
  }
  if (value.is_string() && value.get_ref<const std::string&>().size() > kShownBytes) {
    return absl::StrCat("a string of ", value.get_ref<const std::string&>().size(), " bytes");
  }
  return Dump(value);
}

std::string ShownName(const std::string& name) {
  return name.size() <= kShownBytes ? name : absl::StrCat("(a name of ", name.size(), " bytes)");
}

absl::Status BadMember(std::string_view name, const Json& value, std::string_view rule) {
  return absl::InvalidArgumentError(
      absl::StrCat(View(name), " is ", Shown(value), ": must be ", View(rule)));
}

const Json* Members::Find(const char* name) {
  known_.insert(name);
  const auto it = object_.find(name);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

void Members::Fail(const absl::Status& error) {
  if (status_.ok()) status_ = error;
}

std::optional<bool> Members::Bool(const char* name) {
  const Json* const value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_boolean()) return value->get<bool>();
  Fail(BadMember(name, *value, "true or false"));
  return std::nullopt;
}

std::optional<std::string> Members::String(const char* name) {
  const Json* const value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_string()) return value->get<std::string>();
  Fail(BadMember(name, *value, "a string"));
  return std::nullopt;
}

std::optional<float> Members::Number(const char* name) {
  const Json* const value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_number() && std::fabs(value->get<double>()) <= std::numeric_limits<float>::max()) {
    return static_cast<float>(value->get<double>());
  }
  Fail(BadMember(name, *value, "a number"));
  return std::nullopt;
}

std::optional<int64_t> Members::Integer(const char* name, int64_t min, int64_t max) {
  const Json* const value = Find(name);
  if (value == nullptr) return std::nullopt;
  // Unsigned is what does not fit 63 bits, too.
  const bool fits = value->is_number_integer() &&
                    (!value->is_number_unsigned() ||
                     value->get<uint64_t>() <= uint64_t{std::numeric_limits<int64_t>::max()}) &&
                    value->get<int64_t>() >= min && value->get<int64_t>() <= max;
  if (fits) return value->get<int64_t>();
  Fail(BadMember(name, *value, absl::StrCat("an integer of ", min, " to ", max)));
  return std::nullopt;
}

void Members::Expect(const char* name, const Json& only) {
  const Json* const value = Find(name);
  if (value != nullptr && *value != only) {
    Fail(BadMember(name, *value, absl::StrCat(Dump(only), ", nothing else can be served")));
  }
}

absl::Status Members::Finish() const {
  if (!status_.ok()) return status_;
  for (const auto& [name, value] : object_.items()) {
    if (!known_.contains(name) && !value.is_null()) {
      return absl::InvalidArgumentError(absl::StrCat(ShownName(name), " is ", Shown(value),
                                                     ": there is no such member of a request"));
    }
  }
  return absl::OkStatus();
}

}  // namespace router::http
