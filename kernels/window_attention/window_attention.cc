#include "kernels/window_attention/window_attention.h"
namespace carrel::kernels {

void WindowAttention(const WindowAttentionParams& params, float*) { RefWindowAttention(params); }

}  // namespace carrel::kernels
