// What:   exact search: scores every row of the zone. The oracle of the other kinds.
#pragma once

#include "kvstore/index/index.h"

namespace carrel::kvstore {

std::unique_ptr<Index> MakeFlatIndex(Rows keys);

}  // namespace carrel::kvstore
