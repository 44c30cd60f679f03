// What: a context's manifest as `carrel inspect` shows it, and how commands write times.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace carrel::v1 {
class Manifest;
}

namespace carrel::tools {

std::string FormatTime(int64_t unix_s);  // of this place

nlohmann::json ManifestJson(const v1::Manifest& manifest);
void PrintManifest(const v1::Manifest& manifest);  // to standard output

}  // namespace carrel::tools
