#include "tools/carrel/log_format.h"

#include <google/protobuf/stubs/logging.h>
#include <spdlog/details/os.h>
#include <spdlog/formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/json.h"

namespace carrel::tools {
namespace {

std::string JsonLine(const spdlog::details::log_msg& message) {
  nlohmann::ordered_json json;
  json["time"] = absl::FormatTime("%Y-%m-%d%ET%H:%M:%E3SZ", absl::FromChrono(message.time),
                                  absl::UTCTimeZone());
  json["level"] = std::string(spdlog::level::to_string_view(message.level).data());
  json["thread"] = message.thread_id;
  json["message"] = std::string(message.payload.data(), message.payload.size());
  return DumpJson(json, JsonLetters::kAscii);
}

// As spdlog's own pattern, in one line: control characters come as \xNN.
std::string TextLine(const spdlog::details::log_msg& message) {
  std::string text =
      absl::StrCat("[",
                   absl::FormatTime("%Y-%m-%d %H:%M:%E3S", absl::FromChrono(message.time),
                                    absl::LocalTimeZone()),
                   "] [", spdlog::level::to_string_view(message.level).data(), "] ");
  for (const char c : absl::string_view(message.payload.data(), message.payload.size())) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7f) {
      text.push_back(c);
    } else {
      absl::StrAppend(&text, "\\x", absl::Hex(byte, absl::kZeroPad2));
    }
  }
  return text;
}

class LineFormatter : public spdlog::formatter {
 public:
  using Line = std::string (*)(const spdlog::details::log_msg&);
  explicit LineFormatter(Line line) : line_(line) {}
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& line) override {
    const std::string text = line_(message) + "\n";
    line.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<LineFormatter>(line_);
  }

 private:
  const Line line_;
};

}  // namespace

absl::Status SetUpLog(const LogFlags& flags) {
  if (flags.format != "text" && flags.format != "json") {
    return absl::InvalidArgumentError(
        absl::StrCat("log-format=", flags.format, " is neither text nor json"));
  }
  constexpr std::pair<const char*, spdlog::level::level_enum> kLevels[] = {
      {"trace", spdlog::level::trace}, {"debug", spdlog::level::debug},
      {"info", spdlog::level::info},   {"warning", spdlog::level::warn},
      {"error", spdlog::level::err},   {"off", spdlog::level::off}};
  for (const auto& [name, level] : kLevels) {
    if (flags.level != name) continue;
    // Messages of the start and of tests find the logger that was there before.
    spdlog::default_logger()->set_formatter(
        std::make_unique<LineFormatter>(flags.format == "json" ? &JsonLine : &TextLine));
    spdlog::set_level(level);
    // It writes a line about every string of a request that is no UTF-8: a client could fill the log.
    google::protobuf::SetLogHandler(
        [](google::protobuf::LogLevel, const char*, int, const std::string& text) {
          spdlog::debug("protobuf: {}", text);
        });
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "log-level=", flags.level, " is none of trace, debug, info, warning, error, off"));
}

}  // namespace carrel::tools
