#include "tools/carrel/line_editor.h"

#include <clocale>

#include "absl/strings/ascii.h"
#include "common/test_random.h"
#include "common/test_util.h"

namespace carrel::tools {
namespace {

using Event = LineEditor::Event;

// The last event that was something.
Event Type(LineEditor& editor, absl::string_view bytes) {
  Event last = Event::kNone;
  for (const char byte : bytes) {
    const Event event = editor.Feed(byte);
    if (event != Event::kNone) last = event;
  }
  return last;
}

TEST(LineEditorTest, TextIsTyped_AndSent) {
  LineEditor editor("> ");
  EXPECT_EQ(Type(editor, "what is it?"), Event::kChanged);
  EXPECT_EQ(Type(editor, "\r"), Event::kSubmit);
  EXPECT_EQ(editor.Take(), "what is it?");
  EXPECT_EQ(editor.text(), "");
}

TEST(LineEditorTest, KeysMoveAndErase_WholeCharacters) {
  LineEditor editor("> ");
  Type(editor, "caf\xc3\xa9 \xe4\xb8\xad");
  Type(editor, "\x7f");          // the Chinese character
  Type(editor, "\x1b[D\x1b[D");  // before the accent's letter
  EXPECT_EQ(editor.cursor(), 3u);
  Type(editor, "\x1b[3~");
  EXPECT_EQ(editor.text(), "caf ");
  Type(editor, "\x01x\x05y");  // Ctrl-A, Ctrl-E
  EXPECT_EQ(editor.text(), "xcaf y");
  Type(editor, "\x17");  // Ctrl-W
  EXPECT_EQ(editor.text(), "xcaf ");
  Type(editor, "\x1b[H\x1b[C\x0b");  // Home, right, Ctrl-K
  EXPECT_EQ(editor.text(), "x");
  Type(editor, "\x15");  // Ctrl-U
  EXPECT_EQ(editor.text(), "");
  EXPECT_EQ(Type(editor, "\x7f\x1b[D\x1b[3~"), Event::kChanged);  // at the edges nothing breaks
  EXPECT_EQ(editor.text(), "");
}

TEST(LineEditorTest, SeveralLines_ByAltEnter_ABackslash_AndPaste) {
  LineEditor editor("> ");
  Type(editor, "one\x1b\rtwo\\\rthree\nfour");
  EXPECT_EQ(editor.text(), "one\ntwo\nthree\nfour");
  EXPECT_EQ(Type(editor, "\x1b[200~\rfive\r\x1b[31m\x1b[201~"), Event::kChanged);
  EXPECT_EQ(editor.text(), "one\ntwo\nthree\nfour\nfive\n");
  EXPECT_EQ(Type(editor, "\r"), Event::kSubmit);
}

TEST(LineEditorTest, History_GoesBackAndComesBackToWhatWasTyped) {
  LineEditor editor("> ");
  for (const char* said : {"first", "second", "second"}) {
    Type(editor, said);
    Type(editor, "\r");
    editor.Take();
  }
  Type(editor, "thi");
  Type(editor, "\x1b[A");
  EXPECT_EQ(editor.text(), "second");
  Type(editor, "\x1b[A");  // the second is there once
  EXPECT_EQ(editor.text(), "first");
  Type(editor, "\x1b[A");
  EXPECT_EQ(editor.text(), "first");
  Type(editor, "\x1b[B\x1b[B");
  EXPECT_EQ(editor.text(), "thi");
}

TEST(LineEditorTest, CtrlCDrops_AndCtrlDEndsWhereThereIsNothing) {
  LineEditor editor("> ");
  Type(editor, "text");
  EXPECT_EQ(Type(editor, "\x03"), Event::kInterrupt);
  EXPECT_EQ(editor.text(), "");
  Type(editor, "ab\x1b[D");
  EXPECT_EQ(Type(editor, "\x04"), Event::kChanged);  // erases under the cursor
  EXPECT_EQ(editor.text(), "a");
  Type(editor, "\x7f");
  EXPECT_EQ(Type(editor, "\x04"), Event::kEnd);
}

// A terminal of so many columns that knows what the editor sends.
class Screen {
 public:
  explicit Screen(int columns) : columns_(columns) {}
  void Print(absl::string_view bytes) {
    for (size_t i = 0; i < bytes.size(); ++i) {
      const char c = bytes[i];
      if (c == '\x1b') {
        int n = 0;
        for (i += 2; absl::ascii_isdigit(bytes[i]); ++i) n = 10 * n + (bytes[i] - '0');
        if (bytes[i] == 'A') row_ -= n;
        if (bytes[i] == 'B') row_ += n;
        if (bytes[i] == 'C') column_ += n;
        if (bytes[i] == 'J') Clear();
      } else if (c == '\r') {
        column_ = 0;
      } else if (c == '\n') {
        ++row_;
      } else {
        At(row_)[static_cast<size_t>(column_)] = c;
        ++column_;
        ASSERT_LE(column_, columns_);
      }
      ASSERT_GE(row_, 0);
    }
  }
  std::string Text() const {
    std::string text;
    for (const std::string& row : rows_) text += row.substr(0, row.find_last_not_of(' ') + 1) + "|";
    return text;
  }
  int row() const { return row_; }
  int column() const { return column_; }

 private:
  std::string& At(int row) {
    while (static_cast<int>(rows_.size()) <= row)
      rows_.emplace_back(static_cast<size_t>(columns_ + 1), ' ');
    return rows_[static_cast<size_t>(row)];
  }
  void Clear() { rows_.resize(std::min<size_t>(rows_.size(), static_cast<size_t>(row_))); }
  const int columns_;
  int row_ = 0, column_ = 0;
  std::vector<std::string> rows_;
};

TEST(LineEditorTest, WhatIsDrawn_IsTheText_WithTheCursorInIt) {
  LineEditor editor("> ");
  Screen screen(10);
  Type(editor, "abc\x1b\rdefghijklm");
  screen.Print(editor.Draw(10));
  EXPECT_EQ(screen.Text(), "> abc|  defghijk|lm|");
  EXPECT_EQ(std::pair(screen.row(), screen.column()), std::pair(2, 2));
  Type(editor, "\x1b[H");  // the beginning of the second line
  screen.Print(editor.Draw(10));
  EXPECT_EQ(screen.Text(), "> abc|  defghijk|lm|");
  EXPECT_EQ(std::pair(screen.row(), screen.column()), std::pair(1, 2));
  Type(editor, "\x0b");
  screen.Print(editor.Draw(10));
  EXPECT_EQ(screen.Text(), "> abc||");
  screen.Print(editor.Leave());
  EXPECT_EQ(std::pair(screen.row(), screen.column()), std::pair(2, 0));
}

TEST(LineEditorTest, WhateverIsTyped_NothingComesApart) {
  std::setlocale(LC_CTYPE, "C.UTF-8");
  std::mt19937_64 rng(TestSeed());
  const std::string keys[] = {"a",      "\xc3\xa9", "\xe4\xb8\xad", "\x1b[A",   "\x1b[B", "\x1b[C",
                              "\x1b[D", "\x7f",     "\x1b[3~",      "\x17",     "\x15",   "\x0b",
                              "\x1b\r", "\r",       "\x1b",         " ",        "\\",     "\x01",
                              "\x05",   "\x03",     "\x1b[200~",    "\x1b[201~"};
  LineEditor editor("> ");
  for (int i = 0; i < 20000; ++i) {
    if (Type(editor, keys[rng() % std::size(keys)]) == Event::kSubmit) editor.Take();
    ASSERT_LE(editor.cursor(), editor.text().size());
    const std::string& text = editor.text();
    if (editor.cursor() < text.size()) {
      ASSERT_NE(static_cast<unsigned char>(text[editor.cursor()]) & 0xc0, 0x80) << text;
    }
    editor.Draw(static_cast<int>(rng() % 40));
  }
}

}  // namespace
}  // namespace carrel::tools
