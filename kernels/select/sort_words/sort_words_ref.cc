#include <algorithm>

#include "kernels/select/sort_words/sort_words.h"

namespace carrel::kernels {

void RefSortWords(uint64_t* words, int64_t count) { std::sort(words, words + count); }

}  // namespace carrel::kernels
