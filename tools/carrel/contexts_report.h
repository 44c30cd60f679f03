// What: a store's contexts as `carrel ls` shows them, with those that cannot be read: none is left
//       out in silence.
#pragma once

#include <string>

namespace carrel::v1 {
class ListResponse;
}

namespace carrel::tools {

std::string ContextsJson(const v1::ListResponse& list);  // one object: contexts, unreadable
std::string ContextsTable(const v1::ListResponse& list);
// A line per context that is damaged or of another format version; for standard error.
std::string UnreadableContexts(const v1::ListResponse& list);

}  // namespace carrel::tools
