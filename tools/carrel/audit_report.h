// What:   an audit as one JSON object and as tables for people. Numbers that are not finite are
//         null in JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "audit/audit.h"

namespace carrel::tools {

nlohmann::json AuditJson(const audit::AuditReport& report);
std::string AuditTables(const audit::AuditReport& report);

}  // namespace carrel::tools
