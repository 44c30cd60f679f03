// What:   an audit as one JSON object and as tables for people. Numbers that are not finite are
//         null in JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "audit/audit.h"

namespace carrel::audit {

nlohmann::json AuditJson(const AuditReport& report);
std::string AuditTables(const AuditReport& report);

}  // namespace carrel::audit
