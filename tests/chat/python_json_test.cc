#include "chat/python_json.h"

#include "gtest/gtest.h"

namespace chat {
namespace {

std::string Rewritten(const char* text) { return PythonJson(nlohmann::ordered_json::parse(text)); }

TEST(PythonJsonTest, KeepsOrderAndSpacesAsPythonDoes) {
  EXPECT_EQ(Rewritten(R"({"b":[1,2,{}],"a":[],"c":{"d":null,"e":true}})"),
            R"({"b": [1, 2, {}], "a": [], "c": {"d": null, "e": true}})");
}

TEST(PythonJsonTest, EscapesOnlyWhatPythonEscapes) {
  EXPECT_EQ(Rewritten(R"(["\u00e9\ud83d\udea2", "\"\\\/\b\f\n\r\t\u001f\u007f"])"),
            "[\"é🚢\", \"\\\"\\\\/\\b\\f\\n\\r\\t\\u001f\x7f\"]");
}

TEST(PythonJsonTest, FloatsAreReprs) {
  EXPECT_EQ(Rewritten("[1.0, -0.0, 0.1, 1e15, 1e16, 1.5e300, 0.0001, 0.00001, 1e-7, 2.5e-10]"),
            "[1.0, -0.0, 0.1, 1000000000000000.0, 1e+16, 1.5e+300, 0.0001, 1e-05, 1e-07, 2.5e-10]");
  EXPECT_EQ(Rewritten("[18446744073709551615, -9223372036854775808]"),
            "[18446744073709551615, -9223372036854775808]");
}

}  // namespace
}  // namespace chat
