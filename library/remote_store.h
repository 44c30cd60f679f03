// What:   a store at an address, or at several that hold the same contexts (server_choice.h). A server that says by
//         which address it is reached itself (ContextService.Locate, where a router chooses among several) is asked
//         there by decoders, and through the first address where that one cannot be reached.
// Errors: as store_access.h.
#pragma once

#include <memory>

#include "library/store_access.h"

namespace carrel::library {

std::unique_ptr<StoreAccess> OpenRemoteStore(const StoreAddress& address);

// gRPC ends the process where it finds no descriptors for itself, as it begins: ResourceExhausted then.
absl::Status CheckDescriptorsOfGrpc();

}  // namespace carrel::library
