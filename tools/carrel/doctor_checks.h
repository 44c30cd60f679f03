// What:   what an installation needs, looked at: each finding says what there is, and where that is not enough what helps.
// Cost:   milliseconds; one starts python3.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace carrel::tools {

enum class Health : uint8_t { kGood = 0, kAdvice = 1, kBad = 2 };

struct Finding {
  std::string what;  // of what: "memory"
  Health health = Health::kGood;
  std::string seen;    // "23.5 GiB, 21.3 GiB of it free"
  std::string advice;  // one line; empty: none is needed
};

// folder: where contexts are kept, whose disk is looked at. cuda: whether a GPU is asked for.
std::vector<Finding> CheckInstallation(const std::string& folder, bool cuda);

// What the file of /sys/kernel/mm/transparent_hugepage says.
Finding HugePagesFinding(const std::string& enabled);

}  // namespace carrel::tools
