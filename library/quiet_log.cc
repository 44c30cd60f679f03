#include "library/quiet_log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>

namespace carrel::library {

void QuietLog() {
  static const bool once = [] {
    // spdlog's own default logger has no name, and writes to standard output.
    if (spdlog::default_logger() == nullptr || !spdlog::default_logger()->name().empty())
      return true;
    auto logger = std::make_shared<spdlog::logger>(
        "carrel", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    logger->set_level(spdlog::level::warn);
    spdlog::set_default_logger(std::move(logger));
    return true;
  }();
  (void)once;
}

}  // namespace carrel::library
