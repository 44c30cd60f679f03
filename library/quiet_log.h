// What:    what the library would log, in a program that has not said where logs go: warnings and errors,
//          on standard error. A program that sets spdlog's default logger before gets all of it there.
// Threads: any. Cost: once.
#pragma once

namespace carrel::library {

void QuietLog();

}  // namespace carrel::library
