// What:   pages of consecutive rows whose keys may score highest, by bounds of each channel.
// Math:   of a page the least m_c and the largest M_c of every channel c of its keys; a query's score of it is
//         sum_c max(q_c m_c, q_c M_c), which no key of the page exceeds. Q heads of a group join by group
//         score (kernels/score/group_score) of these.
// Source: Quest (docs/methods.md): section 3.4, algorithm 1; pages of 16 as in section 3.5. Differs: one choice per KV head,
//         where the paper has no grouped queries; mask=q-head has one per q head. Pages are counted from the first row of
//         the zone.
// Edge:   a zone of at most `budget` rows: all of them. A budget below a page: the first rows of the best one.
// Cost:   2 head_dim bf16 per page, made when the zone is opened and read for every choice.
#pragma once

#include <cstdint>

namespace carrel::decoder {

// pages:rows=,mask=kv-head|q-head
struct PageConfig {
  int64_t rows = 16;  // of a page (paper): 1 .. 1024
};

}  // namespace carrel::decoder
