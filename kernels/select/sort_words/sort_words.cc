#include "kernels/select/sort_words/sort_words.h"

#include "hwy/contrib/sort/vqsort.h"

namespace carrel::kernels {

void SortWords(uint64_t* words, int64_t count) {
  thread_local const hwy::Sorter sorter;  // has memory of its own
  sorter(words, static_cast<size_t>(count), hwy::SortAscending());
}

}  // namespace carrel::kernels
