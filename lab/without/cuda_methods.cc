// In place of the GPU's half of lab/methods: what is refused before it is asked for (MethodType::ValidateCuda).
#include "decoder/select/cuda_methods.h"

#include "common/lab.h"

namespace carrel::decoder {

#define CARREL_METHOD(Name)
#define CARREL_GPU_METHOD(Name)                                                    \
  CudaRowSelectorOr LayCuda##Name(const SelectorConfig&, const CudaSelectorInput&, \
                                  cuda::DeviceArena&) {                            \
    return CheckLab(#Name);                                                        \
  }
#include "lab/methods/methods.def"
#undef CARREL_METHOD
#undef CARREL_GPU_METHOD

}  // namespace carrel::decoder
