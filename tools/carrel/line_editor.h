// What:   a text that somebody types at a terminal in raw mode: arrows, history, several lines, pasted text.
//         Enter sends; Alt-Enter, Ctrl-J, or a backslash before Enter begin a new line.
//         Ctrl-C drops the text, Ctrl-D ends where there is none; A E B F P N U K W as in shells.
// Units:  bytes of UTF-8; a character never comes apart.
// Threads: one.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace carrel::tools {

class LineEditor {
 public:
  enum class Event { kNone, kChanged, kSubmit, kInterrupt, kEnd };

  explicit LineEditor(std::string prompt) : prompt_(std::move(prompt)) {}

  // What one byte from the terminal does. After kSubmit: Take.
  Event Feed(char byte);
  const std::string& text() const { return text_; }
  size_t cursor() const { return cursor_; }
  // The text, which joins the history if it is not empty, and begins anew.
  std::string Take();

  // What shows the text on a terminal of so many columns, instead of what the last call showed.
  std::string Draw(int columns);
  // Leaves the text where it is: what is printed next begins a line of its own.
  std::string Leave();

 private:
  struct Place {
    int row = 0, column = 0;
  };
  Event FeedEscape(char byte);
  Event Key(absl::string_view sequence);
  Event Control(char byte);
  Event Insert(absl::string_view bytes);
  Event Enter();
  Event Erase(size_t from, size_t until);
  Event MoveTo(size_t cursor);
  Event Recall(size_t entry);
  size_t Before(size_t at) const;  // the character there begins
  size_t After(size_t at) const;
  size_t LineBegin() const;
  size_t LineEnd() const;
  size_t WordBegin() const;

  const std::string prompt_;
  std::string text_, escape_, kept_;  // kept_: what was typed before the history was looked at
  size_t cursor_ = 0;
  bool pasting_ = false;
  std::vector<std::string> history_;
  size_t entry_ = 0;  // of the history; its size: what is typed
  Place shown_;       // where the cursor stands, below the first row
  int last_row_ = 0;
};

}  // namespace carrel::tools
