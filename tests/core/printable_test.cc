// What text from outside may look like where it is shown.
#include "core/printable.h"

#include <gtest/gtest.h>

#include "core/last_error.h"
#include "core/utf8.h"

namespace fk {
namespace {

TEST(Printable, TextStaysAsItIs) {
  for (const std::string text : {"", "a b ~", "\xC3\xA4\xE2\x82\xAC\xF0\x9F\x98\x80", "back\\slash",
                                 "\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA7"}) {
    EXPECT_EQ(printable(text), text);
  }
}

TEST(Printable, WhatATerminalObeysIsEscaped) {
  EXPECT_EQ(printable("\x1B[31m\n\t\x7F"), "\\x1B[31m\\x0A\\x09\\x7F");
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\xC2\x9B\x32J"), "\\xC2\\x9B2J");  // C1's CSI
  EXPECT_EQ(printable("\xC2\x80\xC2\xA0"), "\\xC2\\x80\xC2\xA0");
  EXPECT_EQ(printable("\x9B\xFF\xE2\x82"), "\\x9B\\xFF\\xE2\\x82");  // no UTF-8
  EXPECT_EQ(printable("\xE2\x80\xAE"), "\\xE2\\x80\\xAE");           // right to left
  EXPECT_EQ(printable("a\n\tb\r", "\n\t"), "a\n\tb\\x0D");
}

TEST(Printable, EveryResultIsTextAndStaysSo) {
  uint32_t state = 1;
  for (int i = 0; i < 20000; ++i) {
    std::string bytes;
    for (uint32_t n = 0; n < 6; ++n) {
      state = state * 1664525 + 1013904223;
      bytes += static_cast<char>(state >> 24 & ((state >> 8 & 1) != 0 ? 0xFF : 0x1F));
    }
    const std::string shown = printable(bytes);
    EXPECT_TRUE(is_utf8(shown));
    for (const char c : shown) EXPECT_TRUE((c & 0xE0) != 0 && c != 0x7F);
    EXPECT_EQ(printable(shown), shown);
  }
}

TEST(Printable, MessagesOfTheCAbi) {
  set_last_error(FK_INVALID_ARGUMENT, std::string("tensor \x1B]0;\xFF\0: is missing", 25));
  EXPECT_STREQ(fk_last_error(), "tensor \\x1B]0;\\xFF\\x00: is missing");
}

}  // namespace
}  // namespace fk
