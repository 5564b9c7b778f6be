#include "router/pair_table.h"

#include "gtest/gtest.h"

namespace router {
namespace {

PairTable::Worker Worker(const std::string& epoch, bool is_prefill, const std::string& link,
                         const std::string& model = "m") {
  return {.epoch = epoch,
          .is_prefill = is_prefill,
          .model = model,
          .profile = {.name = epoch, .layout = {}, .links = {{.kind = link, .host_id = "h"}}}};
}

TEST(PairTableTest, ComparesEveryPairOfOneModelInWhateverOrderTheyCome) {
  PairTable table;
  EXPECT_TRUE(table.Update(0, Worker("p", true, "shm")));
  EXPECT_TRUE(table.Update(1, Worker("d", false, "tcp")));
  EXPECT_TRUE(table.Update(2, Worker("e", false, "shm")));
  EXPECT_TRUE(table.Update(3, Worker("f", false, "tcp", "another model")));
  EXPECT_EQ(table.why(0, 1), "no data link in common: --links is shm at p and tcp at d");
  EXPECT_TRUE(table.fits(0, 2));
  EXPECT_TRUE(table.fits(0, 3)) << "no pair at all";
  PairTable other_way;
  other_way.Update(1, Worker("d", false, "tcp"));
  other_way.Update(0, Worker("p", true, "shm"));
  EXPECT_EQ(other_way.why(0, 1), table.why(0, 1));
}

TEST(PairTableTest, ANewProcessIsComparedAnewTheSameOneIsNot) {
  PairTable table;
  table.Update(0, Worker("p", true, "tcp"));
  table.Update(1, Worker("d", false, "tcp"));
  EXPECT_TRUE(table.Mark(0, "p", 1, "d", "tried"));
  EXPECT_EQ(table.why(0, 1), "tried");
  EXPECT_FALSE(table.Update(0, Worker("p", true, "tcp")));
  EXPECT_EQ(table.why(0, 1), "tried");
  EXPECT_TRUE(table.Update(0, Worker("p2", true, "tcp")));
  EXPECT_TRUE(table.fits(0, 1));
  EXPECT_FALSE(table.Mark(0, "p", 1, "d", "of the old one")) << "it has gone";
  EXPECT_TRUE(table.fits(0, 1));
  EXPECT_TRUE(table.Mark(0, "p2", 1, "d", ""));
  EXPECT_FALSE(table.fits(0, 1)) << "also without words";
  EXPECT_TRUE(table.Update(1, Worker("d2", false, "tcp")));
  EXPECT_TRUE(table.fits(0, 1));
}

TEST(PairTableTest, NobodyAtASlotFitsEverybody) {
  PairTable table;
  table.Update(0, Worker("p", true, "shm"));
  table.Update(5, Worker("d", false, "tcp"));
  ASSERT_FALSE(table.fits(0, 5));
  EXPECT_TRUE(table.Update(5, PairTable::Worker()));
  EXPECT_TRUE(table.fits(0, 5));
  EXPECT_TRUE(table.fits(3, 4)) << "slots that nobody has had";
  EXPECT_TRUE(table.Update(5, Worker("d", false, "tcp")));
  EXPECT_FALSE(table.fits(0, 5));
}

}  // namespace
}  // namespace router
