// What: a store's contexts as `carrel ls` shows them, with those that cannot be read and those that
//       are not finished: none is left out in silence.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace carrel::v1 {
class ListResponse;
}

namespace carrel::tools {

// One object: contexts, unfinished, unreadable.
nlohmann::json ContextsJson(const v1::ListResponse& list);
std::string ContextsTable(const v1::ListResponse& list);
// A line per prefill that did not end.
std::string UnfinishedPrefills(const v1::ListResponse& list);
// A line per context that is damaged or of another format version; for standard error.
std::string UnreadableContexts(const v1::ListResponse& list);

}  // namespace carrel::tools
