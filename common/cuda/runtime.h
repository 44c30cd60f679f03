// What: the one door to the CUDA runtime's types for headers outside .cu files: streams, events,
//       error codes.
#pragma once

#include <cuda_runtime_api.h>
