// What: the demo model as a GGUF file, with matrices as they are or in blocks of 8 bits.
#pragma once

#include "kernels/layer/dequantize/dequantize.h"
#include "model/gguf_writer.h"

namespace carrel {

model::GgufWriter DemoMetadata();                        // and no tensors
model::GgufWriter DemoGguf(kernels::GgufType matrices);  // BF16 or Q8_0

}  // namespace carrel
