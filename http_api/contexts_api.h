// What:   /v1/contexts: the documents of a service as HTTP.
//           POST   /v1/contexts              {"name", "text"}, or the text itself with ?name=
//           GET    /v1/contexts              all of them
//           GET    /v1/contexts/NAME         one
//           GET    /v1/contexts/NAME/events  how it comes to be, as server-sent events
//           GET    /v1/contexts/NAME/text    its document, as sources count its bytes
//           POST   /v1/contexts/NAME/warm    has it brought to where it is read, if it is elsewhere; waits for ?wait=
//                                            seconds, else says how far it is (202)
//           DELETE /v1/contexts/NAME         cancels it, or deletes it
// Errors: as documents.h; InvalidArgument a text that is too long (names the bound), or no text; PermissionDenied
//         what the key may not do; ResourceExhausted what its tenant has used up. A text holds no control tokens.
// Chats:  where the model knows chats, a text becomes a document inside a first user's turn
//         (ChatTemplate::TurnHead); "chat": false, or ?chat=false, leaves it as it is.
// Access: list, import, open (a text), delete of kvstore/access; what a key does not see is not there.
// Threads: any; a call blocks for as long as the store, or the tokenizer, takes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "http_api/brings.h"
#include "http_api/http_message.h"
#include "http_api/http_server.h"
#include "kvstore/access/admission.h"
#include "serving/engine.h"
#include "serving/still_allowed.h"
#include "serving/turn_pool.h"

namespace carrel::http_api {

struct ContextsApi {
  static constexpr char kTarget[] = "/v1/contexts";

  serving::Engine* engine;
  int64_t max_text_bytes;
  serving::RunLater later;
  serving::StillAllowed* still_allowed;
  Brings* brings;  // null: there is no store

  // Of a visit that may make this call; name: what the route's {} stands for.
  absl::Status Handle(const HttpRequest& request, const HttpRoute& route, const std::string& name,
                      const std::shared_ptr<kvstore::Visit>& visit,
                      const std::shared_ptr<HttpReply>& reply) const;

 private:
  absl::Status Create(const HttpRequest& request, const std::shared_ptr<kvstore::Visit>& visit,
                      HttpReply& reply) const;
  absl::Status SendAll(const kvstore::Principal& who, HttpReply& reply) const;
  absl::StatusOr<std::string> TextOf(const serving::Document& document) const;
  absl::Status SendText(const serving::Document& document, const kvstore::Visit& visit,
                        HttpReply& reply) const;
  absl::Status Warm(const std::string& query, const std::shared_ptr<kvstore::Visit>& visit,
                    const std::shared_ptr<HttpReply>& reply) const;
  // On a thread that may block; hold: kept until then.
  void SendTextLater(const serving::Document& document,
                     const std::shared_ptr<kvstore::Visit>& visit,
                     const std::shared_ptr<HttpReply>& reply, std::shared_ptr<void> hold) const;
  // Once its context is here.
  void BringAndSendText(const serving::Document& document,
                        const std::shared_ptr<kvstore::Visit>& visit,
                        const std::shared_ptr<HttpReply>& reply) const;
  absl::Status AnswerText(const serving::Document& document, const std::string& query,
                          const std::shared_ptr<kvstore::Visit>& visit,
                          const std::shared_ptr<HttpReply>& reply) const;
};

// Whether the caller may add a context of this name, which he is to see afterwards, and its place in his tenant's
// quota (Documents::Add); null: there is none.
absl::StatusOr<std::shared_ptr<void>> TakePlace(serving::Engine& engine, const std::string& name,
                                                int64_t tokens, kvstore::Principal* who);

// Whether the caller sees a context; who: null: all.
serving::Documents::Sees SeenBy(kvstore::Principal* who);

// The caller, as who brings a document: for as long as the visit is allowed, and he may add a context of the name.
serving::Documents::Bringer BroughtBy(const std::shared_ptr<kvstore::Visit>& visit,
                                      std::shared_ptr<void> place);
// Whether a context of the name may still be made for him.
absl::Status MayBring(const kvstore::Principal& who, const std::string& name);

}  // namespace carrel::http_api
