"""A server that serves the page and answers it as a test wants: refusals that a real one gives at bad times only."""
import json
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ALL = ["list", "open", "import", "delete"]


def error(message, **more):
    return {"error": {"message": message, "type": "", "param": None, "code": None, **more}}


class Stub(ThreadingHTTPServer):
    """Documents are read by `read` alone. `replies` are taken first: by "METHOD /path", each a list of
    (status, body, headers), used up one by one; status 0: the connection ends."""

    daemon_threads = True

    def __init__(self, page, headers):
        super().__init__(("127.0.0.1", 0), Handler)
        self.page, self.page_headers = page, headers
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self.lock = threading.Condition()
        self.token, self.rights, self.key, self.takes = "", ALL, None, True
        self.documents, self.replies, self.requests = {}, {}, []
        self.sources, self.texts = [], {}
        self.most_queued, self.at_once = 0, 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def asked(self, what):
        """The requests of this kind so far: what they presented, and their bodies."""
        with self.lock:
            return [(key, body) for kind, key, body in self.requests if kind == what]

    def add(self, name, text="Some text.", **more):
        with self.lock:
            self.texts[name] = text
            self.documents[name] = {
                "object": "context", "name": name, "state": "ready", "progress": 1, "tokens": 1000, "bytes": 1 << 20,
                "content_id": name, "index": "flat", "created": len(self.documents), "usable": True, **more}
            self.lock.notify_all()

    def change(self, name, **more):
        with self.lock:
            self.documents[name].update(more)
            self.lock.notify_all()

    def ready(self, name):
        self.change(name, state="ready", progress=1)

    def rights_of(self, key):
        return ALL if self.token and key == self.token else self.rights


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def send(self, status, body, headers=()):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        if "Content-Type" not in dict(headers):
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def begin_stream(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def event(self, value):
        self.wfile.write(f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def handle_one(self):
        url = urllib.parse.urlsplit(self.path)
        kind = f"{self.command} {url.path}"
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        query = dict(urllib.parse.parse_qsl(url.query))
        if url.path == "/":
            return self.send(200, self.server.page, self.server.page_headers)
        with self.server.lock:
            self.server.requests.append((kind, key, body))
            replies = self.server.replies.get(kind)
            reply = replies.pop(0) if replies else None
        if reply and reply[0] == 0:
            self.close_connection = True
            return None
        if reply:
            return self.send(*reply)
        rights = self.server.rights_of(key)
        wanted = {"POST /v1/contexts": "import"}.get(kind, "delete" if self.command == "DELETE" else "list")
        if wanted not in rights:
            return self.send(403, error(f"no key was presented: it lacks the right {wanted}"))
        return self.route(url.path, kind, query, rights)

    do_GET = do_HEAD = do_POST = do_DELETE = handle_one

    def route(self, path, kind, query, rights):
        server = self.server
        if kind == "GET /v1/models":
            model = {"id": "stub", "object": "model", "carrel": {"chat": True}}
            return self.send(200, {"data": [model], "carrel": {
                "rights": rights, "key": server.key, "takes_documents": server.takes}})
        if kind == "GET /v1/contexts":
            with server.lock:
                return self.send(200, {"data": list(server.documents.values())})
        if kind == "POST /v1/contexts":
            return self.take_in(query["name"])
        if kind == "POST /v1/chat/completions":
            return self.answer()
        name = urllib.parse.unquote(path.split("/")[3])
        if name not in server.documents:
            return self.send(404, error(f'no context "{name}"'))
        if path.endswith("/events"):
            return self.follow(name)
        if path.endswith("/text"):
            return self.send(200, server.texts[name].encode(), {"Content-Type": "text/plain; charset=utf-8"})
        with server.lock:
            del server.documents[name]
            server.lock.notify_all()
        return self.send(200, {"name": name, "deleted": True})

    def take_in(self, name):
        if name in self.server.documents:
            return self.send(409, error(f"name={name} is another document's"))
        self.server.add(name, state="queued", progress=0)
        with self.server.lock:
            busy = [item for item in self.server.documents.values() if item["state"] in ("queued", "prefilling")]
            self.server.most_queued = max(self.server.most_queued, len(busy))
            return self.send(202, {**self.server.documents[name], "existed": False})

    def follow(self, name):
        self.begin_stream()
        told = None
        with self.server.lock:
            self.server.at_once += 1
        try:
            until = time.monotonic() + 120
            while time.monotonic() < until:
                with self.server.lock:
                    item = dict(self.server.documents.get(name) or {"name": name, "state": "failed", "error": {"message": "cancelled"}})
                    if item == told:
                        self.server.lock.wait(0.2)
                        continue
                told = item
                self.event(item)
                if item["state"] in ("ready", "failed"):
                    return self.event("[DONE]")
        except OSError:
            pass  # the page went
        finally:
            with self.server.lock:
                self.server.at_once -= 1

    def answer(self):
        self.begin_stream()
        self.event({"choices": [{"delta": {"content": "An answer."}}]})
        figures = {"context": "", "prompt_ms": 1, "ms_per_token": 1, "rows_read": 1, "context_tokens": 1000}
        body = json.loads(self.server.requests[-1][2])
        if "context" in body:
            figures.update(context=body["context"], sources=self.server.sources)
        self.event({"choices": [{"delta": {}, "finish_reason": "stop"}], "carrel": figures})
        self.event("[DONE]")
