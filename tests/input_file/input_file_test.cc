#include "input_file/input_file.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "gtest/gtest.h"

namespace input_file {
namespace {

class InputFileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "ferry_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    dir_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }
  std::string Write(const std::string& name, const std::string& text) {
    std::ofstream(dir_ + "/" + name, std::ios::binary) << text;
    return dir_ + "/" + name;
  }

  std::string dir_;
};

TEST_F(InputFileTest, WholeFileIsRead) {
  const std::string text("a\0\xff\n", 4);
  EXPECT_EQ(*Read(Write("file", text), 4), text);
  EXPECT_EQ(*Read(Write("empty", ""), 0), "");
  std::filesystem::create_symlink(dir_ + "/file", dir_ + "/link");
  EXPECT_EQ(*Read(dir_ + "/link", 4), text);
}

TEST_F(InputFileTest, WhatCouldWaitForEverIsNotOpened) {
  const std::string pipe = dir_ + "/pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {pipe, dir_, std::string("/dev/zero")}) {
    EXPECT_EQ(Read(path, 1 << 20).status(),
              absl::InvalidArgumentError(path + ": not a regular file"));
  }
}

TEST_F(InputFileTest, MissingAndLongFilesAreNamed) {
  EXPECT_EQ(Read(dir_ + "/none", 4).status(),
            absl::NotFoundError("no such file: " + dir_ + "/none"));
  EXPECT_EQ(Read("", 4).status(), absl::NotFoundError("no such file: "));
  std::filesystem::create_symlink("none", dir_ + "/broken");
  std::filesystem::create_symlink("circle", dir_ + "/circle");
  for (const std::string& path : {dir_ + "/broken", dir_ + "/circle"}) {
    EXPECT_EQ(Read(path, 4).status(),
              absl::InvalidArgumentError(path + ": a link that leads to no file"));
  }
  const std::string long_name = dir_ + "/" + std::string(1000, 'n');
  EXPECT_EQ(Read(long_name, 4).status(),
            absl::InvalidArgumentError(long_name + ": File name too long"));
  const std::string path = Write("file", "12345");
  EXPECT_EQ(Read(path, 4).status(),
            absl::InvalidArgumentError(path + ": expected at most 4 bytes, found 5"));
}

TEST_F(InputFileTest, OnlyWhatIsMissingIsNotThere) {
  EXPECT_FALSE(IsThere(dir_ + "/none"));
  EXPECT_FALSE(IsThere(Write("file", "x") + "/below_a_file"));
  std::filesystem::create_symlink("none", dir_ + "/broken");
  std::filesystem::create_symlink("circle", dir_ + "/circle");
  for (const std::string& path : {dir_ + "/file", dir_, dir_ + "/broken", dir_ + "/circle",
                                  dir_ + "/" + std::string(1000, 'n')}) {
    EXPECT_TRUE(IsThere(path)) << path;
  }
}

}  // namespace
}  // namespace input_file
