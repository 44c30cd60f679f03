// What: the version of the program.
#pragma once

namespace carrel {
inline constexpr char kVersion[] = "0.2.0";
}
