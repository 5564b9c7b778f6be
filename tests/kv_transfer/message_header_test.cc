#include "kv_transfer/message_header.h"

#include <random>

#include "gtest/gtest.h"

namespace kv_transfer {
namespace {

MessageHeader Sample() {
  MessageHeader header;
  for (size_t i = 0; i < 16; ++i) {
    header.transfer_id[i] = static_cast<uint8_t>(0x10 + i);
    header.receiver_epoch.bytes[i] = static_cast<uint8_t>(0xa0 + i);
  }
  header.attempt = 0x01020304;
  header.kind = MessageKind::kStateSlot;
  header.index = 0x11121314;
  header.part = 0x21222324;
  header.length = 0x515253;
  header.slot = 0x6162;
  return header;
}

TEST(MessageHeaderTest, IsTheseBytesOnTheWire) {
  const WireHeader raw = EncodeMessageHeader(Sample());
  const uint8_t expected[64] = {
      'F',  'K',  'V',  'B',  1,    0,    0x62, 0x61,  // magic, version, slot
      0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17,  // transfer id
      0x18, 0x19, 0x1a, 0x1b, 0x1c, 0x1d, 0x1e, 0x1f,  //
      0x04, 0x03, 0x02, 0x01, 2,    0,    0,    0,     // attempt, kind
      0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7,  // receiver epoch
      0xa8, 0xa9, 0xaa, 0xab, 0xac, 0xad, 0xae, 0xaf,  //
      0x14, 0x13, 0x12, 0x11, 0x24, 0x23, 0x22, 0x21,  // index, part
      0x53, 0x52, 0x51, 0,    0,    0,    0,    0,     // length
  };
  for (size_t i = 0; i < 64; ++i) EXPECT_EQ(static_cast<uint8_t>(raw[i]), expected[i]) << i;
}

TEST(MessageHeaderTest, ComesBackEqual) {
  const MessageHeader header = Sample();
  const auto back = DecodeMessageHeader(EncodeMessageHeader(header));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->transfer_id, header.transfer_id);
  EXPECT_EQ(back->attempt, header.attempt);
  EXPECT_EQ(back->kind, header.kind);
  EXPECT_EQ(back->receiver_epoch, header.receiver_epoch);
  EXPECT_EQ(back->index, header.index);
  EXPECT_EQ(back->part, header.part);
  EXPECT_EQ(back->length, header.length);
  EXPECT_EQ(back->slot, header.slot);
}

TEST(MessageHeaderTest, RefusesWhatItDoesNotKnow) {
  const auto refused = [](size_t offset, uint8_t value) {
    WireHeader raw = EncodeMessageHeader(Sample());
    raw[offset] = static_cast<std::byte>(value);
    return DecodeMessageHeader(raw).status().code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused(0, 'X'));   // magic
  EXPECT_TRUE(refused(4, 2));     // version
  EXPECT_TRUE(refused(28, 0));    // kind
  EXPECT_TRUE(refused(28, 7));    // kind
  EXPECT_TRUE(refused(62, 1));    // length of 2^48
  EXPECT_FALSE(refused(48, 99));  // any index is well formed
  const WireHeader raw = EncodeMessageHeader(Sample());
  for (size_t size = 0; size < raw.size(); ++size) {
    EXPECT_FALSE(DecodeMessageHeader(absl::MakeConstSpan(raw).subspan(0, size)).ok()) << size;
  }
}

TEST(MessageHeaderTest, RandomBytesNeverBecomeAnOversizedMessage) {
  std::mt19937_64 random(7);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    WireHeader raw = EncodeMessageHeader(Sample());
    for (int changes = 0; changes < 3; ++changes) {
      raw[random() % raw.size()] = static_cast<std::byte>(random());
    }
    const auto header = DecodeMessageHeader(raw);
    if (!header.ok()) continue;
    ++accepted;
    EXPECT_LE(header->length, static_cast<uint64_t>(kMaxMessageBytes));
    EXPECT_EQ(EncodeMessageHeader(*header).size(), kMessageHeaderBytes);
  }
  EXPECT_GT(accepted, 0);
  EXPECT_LT(accepted, 20000);
}

TEST(EpochTest, GoesThroughBytesAndHex) {
  const Epoch a = Epoch::Random();
  EXPECT_NE(a, Epoch::Random());
  EXPECT_EQ(*Epoch::FromBytes(a.ToBytes()), a);
  EXPECT_EQ(a.ToHex().size(), 32u);
  EXPECT_FALSE(Epoch::FromBytes("short").ok());
}

TEST(MessageHeaderTest, SaysWhatAMessageCarries) {
  MessageHeader header;
  header.kind = MessageKind::kBlock;
  header.index = 3;
  EXPECT_EQ(Cargo(header), "block 3");
  header.part = 2;
  EXPECT_EQ(Cargo(header), "block 3 part 2");
  header.kind = MessageKind::kStateSlot;
  EXPECT_EQ(Cargo(header), "state slot 3 part 2");
  header.index = header.part = 0;
  EXPECT_EQ(Cargo(header), "state slot");
  header.kind = MessageKind::kHeartbeat;
  EXPECT_EQ(Cargo(header), "heartbeat");
}

}  // namespace
}  // namespace kv_transfer
