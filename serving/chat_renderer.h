// What:   a model's Jinja template, rendered by Python's jinja2 (render_chat.py) in child processes: the template is
//         not trusted. A child renders one chat at a time; while all are busy another one is started, up to
//         kMostChildren, so that a template that loops delays no other chat.
// Bounds: kPatience per chat by a steady clock, the wait for a child included; kStartPatience for a child to
//         start on a busy machine; max_bytes of text.
// Errors: InvalidArgument a template that jinja2 refuses, and chats that the template refuses (its own words) or
//         makes longer than max_bytes (param messages, code context_length_exceeded); FailedPrecondition no Python
//         with jinja2; DeadlineExceeded.
// Threads: any.   Cost: a process of some 20 MB each; 0.2 ms and more per chat.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "nlohmann/json_fwd.hpp"

namespace carrel::serving {

// The system's, whose packages are the system's.
inline constexpr char kRendererPython[] = "/usr/bin/python3";

struct ChatRendererConfig {
  std::string jinja;
  std::string bos, eos;                   // the texts of these tokens; empty: none
  int64_t max_bytes = int64_t{16} << 20;  // of a rendered chat
  std::string python = kRendererPython;
};

class ChatRenderer {
 public:
  static constexpr absl::Duration kPatience = absl::Seconds(5);
  static constexpr absl::Duration kStartPatience = absl::Seconds(60);
  static constexpr int kMostChildren = 8;

  explicit ChatRenderer(ChatRendererConfig config);
  ~ChatRenderer();

  absl::Status Compile();  // whether jinja2 takes the template
  // request: the template's variables.
  absl::StatusOr<std::string> Render(const nlohmann::ordered_json& request);

 private:
  class Child;
  struct Answer;
  using Clock = std::chrono::steady_clock;

  static Clock::time_point In(absl::Duration patience);
  absl::StatusOr<std::unique_ptr<Child>> Take();
  void GiveBack(std::unique_ptr<Child> child);  // null: it is gone

  const ChatRendererConfig config_;
  std::mutex mu_;
  std::condition_variable freed_;
  std::vector<std::unique_ptr<Child>> idle_;  // under mu_
  int children_ = 0;                          // under mu_; those that are busy, too
};

}  // namespace carrel::serving
