// What:   whether products may be taken on AMX's tiles: the CPU has them with bf16, AVX-512's
//         conversions to it and 8-bit integers, and the kernel of the operating system lets this process use them
//         (Linux on x86-64; elsewhere never).
// Edge:   CARREL_AMX=off in the environment switches them off; so can a test.
// Threads: any. The first call asks the operating system, once for the whole process.
#pragma once

namespace carrel::kernels {

bool AmxAvailable();

// AmxAvailable, unless a test switched it off: what kernels ask.
bool AmxUsed();
void SetAmxUsedForTest(bool used);

}  // namespace carrel::kernels
