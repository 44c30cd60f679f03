// What:   the page for people: page.html, which is part of the program.
// Math:   its policy names its script and its style by their SHA-256: a browser runs nothing else, and
//         loads nothing from elsewhere.
// Threads: any.
#pragma once

#include <string>

namespace carrel::http_api {

const std::string& Page();
const std::string& PagePolicy();  // Content-Security-Policy

}  // namespace carrel::http_api
