// What:   what a call says of its context to whoever stands between and chooses a server by it, as Envoy does
//         by a header's value: gRPC metadata and HTTP header kContextHeader, the context's name with all but
//         A-Z a-z 0-9 - . _ ~ as %XX (RFC 3986). Names that a store takes are what they are.
// Source: docs/decisions/100-clients-of-many.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace carrel {

inline constexpr char kContextHeader[] = "carrel-context";
// Trailing metadata of a call that a server ended itself because its contexts' source said so: it is not the
// connection that failed, and asking another server, or again at once, would not help. The same as a payload of
// the client's status.
inline constexpr char kAnsweredMetadata[] = "carrel-answered";
inline constexpr char kAnsweredUrl[] = "carrel/answered";
bool Answered(const absl::Status& status);
// Whether that of a call which nobody here cancelled is what gRPC says itself, beside Unavailable, of a server that
// stops, or that died, or whose stream a proxy reset.
bool SaysServerIsGone(const absl::Status& status);
std::string ContextHeaderValue(absl::string_view context);

// Places in the order in which a context prefers them: highest-random-weight (rendezvous) hashing, so that of N
// places one that goes moves 1/N of the contexts, and every client says the same. The place's name and the
// context's decide, not the order in which places are given.
std::vector<size_t> PlacesFor(absl::string_view context, const std::vector<std::string>& places);

}  // namespace carrel
