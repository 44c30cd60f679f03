// What:   an audit as one self-contained page: key figures, maps per layer and KV head, curves of
//         quality against cost, the worst heads, and how it was measured. No external resource;
//         everything shows without its script, which only makes hover values quicker.
// Edge:   names are escaped; numbers that are not finite show as "-".   Threads: any.
#pragma once

#include <string>

#include "audit/audit.h"

namespace carrel::audit {

std::string HtmlReport(const AuditReport& report);

}  // namespace carrel::audit
