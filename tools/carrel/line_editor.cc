#include "tools/carrel/line_editor.h"

#include <wchar.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace carrel::tools {
namespace {

constexpr char kEscape = '\x1b';
constexpr absl::string_view kPasteBegin = "\x1b[200~", kPasteEnd = "\x1b[201~";

bool Continues(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }

// Columns of the character at the beginning of a text, and its bytes.
std::pair<int, size_t> Character(absl::string_view text) {
  wchar_t wide = 0;
  mbstate_t state = {};
  const size_t bytes = mbrtowc(&wide, text.data(), text.size(), &state);
  if (bytes == 0 || bytes > text.size()) return {1, 1};  // no character: a column of its own
  return {std::max(0, wcwidth(wide)), bytes};
}

}  // namespace

size_t LineEditor::Before(size_t at) const {
  while (at > 0 && Continues(text_[--at])) {
  }
  return at;
}

size_t LineEditor::After(size_t at) const {
  if (at < text_.size()) ++at;
  while (at < text_.size() && Continues(text_[at])) ++at;
  return at;
}

size_t LineEditor::LineBegin() const {
  const size_t at = cursor_ == 0 ? std::string::npos : text_.rfind('\n', cursor_ - 1);
  return at == std::string::npos ? 0 : at + 1;
}

size_t LineEditor::LineEnd() const { return std::min(text_.find('\n', cursor_), text_.size()); }

size_t LineEditor::WordBegin() const {
  size_t at = cursor_;
  while (at > 0 && text_[at - 1] == ' ') --at;
  while (at > 0 && text_[at - 1] != ' ' && text_[at - 1] != '\n') --at;
  return at;
}

LineEditor::Event LineEditor::Feed(char byte) {
  if (!escape_.empty()) return FeedEscape(byte);
  if (byte == kEscape) {
    escape_ = byte;
    return Event::kNone;
  }
  if (pasting_) return Insert(byte == '\r' ? "\n" : absl::string_view(&byte, 1));
  const auto value = static_cast<unsigned char>(byte);
  return value < 0x20 || value == 0x7f ? Control(byte) : Insert({&byte, 1});
}

// ESC [ parameters letter, ESC O letter, or ESC and a key.
LineEditor::Event LineEditor::FeedEscape(char byte) {
  if (byte == kEscape) {  // the one before was a key of its own
    escape_ = byte;
    return Event::kNone;
  }
  if (escape_.size() == 1 && (static_cast<unsigned char>(byte) & 0x80) != 0) {
    escape_.clear();  // so it was here, and a character follows
    return Feed(byte);
  }
  escape_ += byte;
  if (escape_.size() == 2 && (byte == '[' || byte == 'O')) return Event::kNone;
  const bool parameter = escape_.size() > 2 && (byte == ';' || (byte >= '0' && byte <= '9'));
  if (parameter && escape_.size() < 16) return Event::kNone;
  return Key(std::exchange(escape_, ""));
}

LineEditor::Event LineEditor::Key(absl::string_view sequence) {
  if (sequence == kPasteBegin || sequence == kPasteEnd) {
    pasting_ = sequence == kPasteBegin;
    return Event::kNone;
  }
  if (pasting_) return Event::kNone;  // what steers terminals is not typed
  if (sequence == "\x1b\r" || sequence == "\x1b\n") return Insert("\n");
  if (sequence.size() < 3) return Event::kNone;
  const absl::string_view key = sequence.substr(2);
  if (key == "D") return MoveTo(Before(cursor_));
  if (key == "C") return MoveTo(After(cursor_));
  if (key == "H" || key == "1~" || key == "7~") return MoveTo(LineBegin());
  if (key == "F" || key == "4~" || key == "8~") return MoveTo(LineEnd());
  if (key == "3~") return Erase(cursor_, After(cursor_));
  if (key == "A") return Control('P' & 0x1f);
  if (key == "B") return Control('N' & 0x1f);
  return Event::kNone;
}

LineEditor::Event LineEditor::Control(char byte) {
  switch (byte) {
    case '\r':
      return Enter();
    case '\n':
      return Insert("\n");
    case '\t':
      return Insert(" ");
    case '\x7f':
    case '\b':
      return Erase(Before(cursor_), cursor_);
    case 'A' & 0x1f:
      return MoveTo(LineBegin());
    case 'E' & 0x1f:
      return MoveTo(LineEnd());
    case 'B' & 0x1f:
      return MoveTo(Before(cursor_));
    case 'F' & 0x1f:
      return MoveTo(After(cursor_));
    case 'U' & 0x1f:
      return Erase(LineBegin(), cursor_);
    case 'K' & 0x1f:
      return Erase(cursor_, LineEnd());
    case 'W' & 0x1f:
      return Erase(WordBegin(), cursor_);
    case 'P' & 0x1f:
      return entry_ == 0 ? Event::kNone : Recall(entry_ - 1);
    case 'N' & 0x1f:
      return entry_ >= history_.size() ? Event::kNone : Recall(entry_ + 1);
    case 'C' & 0x1f:
      text_.clear();
      cursor_ = 0;
      entry_ = history_.size();
      return Event::kInterrupt;
    case 'D' & 0x1f:
      return text_.empty() ? Event::kEnd : Erase(cursor_, After(cursor_));
    default:
      return Event::kNone;
  }
}

LineEditor::Event LineEditor::Enter() {
  if (cursor_ > 0 && cursor_ == text_.size() && text_.back() == '\\') {
    text_.back() = '\n';
    return Event::kChanged;
  }
  cursor_ = text_.size();
  return Event::kSubmit;
}

LineEditor::Event LineEditor::Insert(absl::string_view bytes) {
  text_.insert(cursor_, bytes.data(), bytes.size());
  cursor_ += bytes.size();
  return Event::kChanged;
}

LineEditor::Event LineEditor::Erase(size_t from, size_t until) {
  text_.erase(from, until - from);
  cursor_ = from;
  return Event::kChanged;
}

LineEditor::Event LineEditor::MoveTo(size_t cursor) {
  cursor_ = cursor;
  return Event::kChanged;
}

LineEditor::Event LineEditor::Recall(size_t entry) {
  if (entry_ == history_.size()) kept_ = text_;
  entry_ = entry;
  text_ = entry_ == history_.size() ? kept_ : history_[entry_];
  cursor_ = text_.size();
  return Event::kChanged;
}

std::string LineEditor::Take() {
  if (!text_.empty() && (history_.empty() || history_.back() != text_)) history_.push_back(text_);
  entry_ = history_.size();
  cursor_ = 0;
  return std::exchange(text_, "");
}

std::string LineEditor::Draw(int columns) {
  columns = std::max(columns, 8);
  std::string out;
  if (shown_.row > 0) absl::StrAppend(&out, "\x1b[", shown_.row, "A");
  absl::StrAppend(&out, "\r\x1b[J");
  Place at, cursor;
  const auto line = [&] {
    out += "\r\n";
    at = {at.row + 1, 0};
  };
  const auto put = [&](absl::string_view bytes, int width) {
    if (at.column + width > columns) line();
    absl::StrAppend(&out, bytes);
    at.column += width;
    if (at.column >= columns) line();  // terminals differ in where the cursor is then
  };
  for (const char c : prompt_) put({&c, 1}, 1);
  for (size_t i = 0; i <= text_.size();) {
    if (i == cursor_) cursor = at;
    if (i == text_.size()) break;
    if (text_[i] == '\n') {
      line();
      for (size_t j = 0; j < prompt_.size(); ++j) put(" ", 1);
      ++i;
      continue;
    }
    const auto [width, bytes] = Character(absl::string_view(text_).substr(i));
    const bool control = static_cast<unsigned char>(text_[i]) < 0x20;
    put(control ? "?" : absl::string_view(text_).substr(i, bytes), control ? 1 : width);
    i += bytes;
  }
  if (at.row > cursor.row) absl::StrAppend(&out, "\x1b[", at.row - cursor.row, "A");
  absl::StrAppend(&out, "\r");
  if (cursor.column > 0) absl::StrAppend(&out, "\x1b[", cursor.column, "C");
  shown_ = cursor;
  last_row_ = at.row;
  return out;
}

std::string LineEditor::Leave() {
  std::string out;
  if (last_row_ > shown_.row) absl::StrAppend(&out, "\x1b[", last_row_ - shown_.row, "B");
  out += "\r\n";
  shown_ = {};
  last_row_ = 0;
  return out;
}

}  // namespace carrel::tools
