// What: a store's contexts as `carrel ls` shows them, a context's manifest as `carrel inspect` does, and how commands
//       write times.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace carrel::v1 {
class ListResponse;
class Manifest;
}  // namespace carrel::v1

namespace carrel::tools {

std::string FormatTime(int64_t unix_s);  // of this place

nlohmann::json ManifestJson(const v1::Manifest& manifest);
void PrintManifest(const v1::Manifest& manifest);  // to standard output

// Of a store, with what cannot be read or is not finished: none is left out in silence.
// One object: contexts, unfinished, unreadable.
nlohmann::json ContextsJson(const v1::ListResponse& list);
std::string ContextsTable(const v1::ListResponse& list);
// A line per prefill that did not end.
std::string UnfinishedPrefills(const v1::ListResponse& list);
// A line per context that is damaged or of another format version; for standard error.
std::string UnreadableContexts(const v1::ListResponse& list);

}  // namespace carrel::tools
