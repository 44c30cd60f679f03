// What: marks what libcarrel.so shows; everything else in it is hidden.
// Math: the inline namespace `api` around every declaration is in each symbol's name, by which the
//       linker knows it (library/api/libcarrel.map).
#pragma once

#define CARREL_API __attribute__((visibility("default")))
