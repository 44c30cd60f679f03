"""What the page does when its server refuses, waits, or allows little: on a stub (stub.py), so that each comes when it is wanted."""
import os

from stub import Stub, error
from webdriver import BACKSPACE, ENTER, TAB

CHOSEN = "#documents li.chosen"


class StubTest:
    def __init__(self, browser, page, headers, look, file):
        self.browser, self.page, self.headers, self.picture, self.file = browser, page, headers, look, file
        self.stub = None

    def steps(self):
        return [self.address, self.without_token, self.reader, self.many, self.refusals, self.taken, self.removed, self.cut_off,
                self.waits,
                self.choosing, self.sources, self.small_screen, self.keys_alone, self.broken_storage]

    # ---- what the tests say of the page

    def open(self, fragment="", documents=()):
        """A new server and an empty tab."""
        self.stub = Stub(self.page, self.headers)
        for name in documents:
            self.stub.add(name)
        self.go(fragment)
        self.shows(len(documents))

    def go(self, fragment):
        self.browser.open("about:blank")
        self.browser.open(f"http://{self.stub.address}/{fragment}")
        self.browser.wait("the model", lambda: self.browser.text("#model") == "stub")

    def shows(self, documents):
        rows = documents + 1 if documents else 0
        self.browser.wait(f"{documents} documents", lambda: self.browser.count("#documents li") == rows)

    def row(self, name, part=""):
        return f"#documents li[data-name='{name}'] {part}"

    def wait_row(self, name, state):
        found = f"#documents li[data-name='{name}'][data-state='{state}']"
        self.browser.wait(f"{name} is {state}", lambda: self.browser.count(found) == 1)

    def add(self, *names, content=b"Some text."):
        self.browser.type("#file", "\n".join(self.file(name, content) for name in names))

    def ask(self, question):
        articles = self.browser.count("article")
        self.browser.type("#question", question + ENTER)
        self.browser.wait("the turn", lambda: self.browser.count("article") == articles + 1)

    def answered(self):
        self.browser.wait("the answer", lambda: self.browser.count("article.running") == 0)
        return self.browser.text("article:last-of-type .answer")

    def last(self, part):
        return self.browser.text(f"article:last-of-type .{part}")

    def hash(self):
        return self.browser.run("return location.hash")

    def visible(self, selector):
        return self.browser.run(
            "const e = document.querySelector(arguments[0]); const r = e.getBoundingClientRect();"
            "return r.width > 0 && r.top >= 0 && r.bottom <= innerHeight && e.checkVisibility()", selector)

    # ---- the address and the token

    def address(self):
        self.open("#token=first", ["a.txt", "b.txt"])
        assert self.hash() == "", self.hash()
        assert {key for key, _ in self.stub.asked("GET /v1/contexts")} == {"first"}
        self.browser.reload()  # the tab keeps it
        self.shows(2)
        assert {key for key, _ in self.stub.asked("GET /v1/models")} == {"first"}
        for fragment, chosen, token in (
                ("#%", "", "first"), ("#%E0%A4%A&token=second", "", "second"), ("#b.txt&token=third", "b.txt", "third"),
                ("#token=a%2Fb&b.txt&more=1", "b.txt", "a/b"), ("#b%2Etxt&later", "b.txt", "a/b"), ("#&&=&token=&a.txt", "a.txt", "a/b"),
                ("#token=%0A", "", "a/b"), ("#token=%E2%82%AC", "", "a/b"), ("#a.txt&token=%", "a.txt", "a/b")):
            before = len(self.stub.asked("GET /v1/contexts"))
            self.go(fragment)
            self.shows(2)
            assert self.browser.run("return state.chosen || ''") == chosen, fragment
            assert self.hash() == ("#" + chosen if chosen else ""), (fragment, self.hash())
            assert self.stub.asked("GET /v1/contexts")[before][0] == token, fragment
        # Typed into the address of a page that is open.
        self.browser.run("location.hash = '#b.txt'")
        self.browser.wait("b.txt", lambda: self.browser.text(CHOSEN + " .name") == "b.txt")
        self.browser.run("location.hash = '#a.txt&token=typed'")
        self.browser.wait("a.txt", lambda: self.browser.text(CHOSEN + " .name") == "a.txt")
        self.browser.wait("the token", lambda: self.stub.asked("GET /v1/contexts")[-1][0] == "typed")
        assert self.hash() == "#a.txt", self.hash()
        self.ask("Who?")
        assert self.answered() == "An answer."
        assert self.stub.asked("POST /v1/chat/completions")[-1][0] == "typed"

    def without_token(self):
        self.open("", ["a.txt"])
        self.browser.run("sessionStorage.clear()")
        self.stub.token, self.stub.rights = "right", ["list", "open"]
        self.go("#a.txt")
        self.shows(1)
        assert "without the token" in self.browser.text("#token"), self.browser.text("#token")
        assert not self.browser.run("return document.getElementById('drop').checkVisibility()")
        assert not self.browser.run("return document.querySelector('#documents .remove:not([hidden])') !== null")
        self.ask("Who?")
        assert self.answered() == "An answer."
        self.browser.run(
            "const files = new DataTransfer(); files.items.add(new File(['x'], 'dropped.txt'));"
            "document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true}))")
        self.browser.wait("what is missing", lambda: "added without the token" in self.browser.text("#trouble"))
        self.picture("no-token")
        self.browser.type("#token-text", "wrong" + ENTER)
        self.browser.wait("that it is wrong", lambda: "not this server's" in self.browser.text("#token"))
        self.browser.type("#token-text", "http://127.0.0.1:1/" + ENTER)
        self.browser.wait("that it is none", lambda: "neither a key" in self.browser.text("#trouble"))
        self.browser.run("document.getElementById('token-text').value = ''")
        self.browser.type("#token-text", f"  http://{self.stub.address}/#a.txt&token=right " + ENTER)
        self.browser.wait("room for documents", lambda: self.browser.run("return document.getElementById('drop').checkVisibility()"))
        self.add("new.txt")
        self.wait_row("new.txt", "queued")
        # The server starts anew, with another token.
        self.stub.token = "another"
        self.add("newer.txt")
        self.wait_row("newer.txt", "refused")
        assert "not this server's" in self.browser.text(self.row("newer.txt", ".about"))
        self.browser.type("#token-text", "another" + ENTER)
        self.wait_row("newer.txt", "queued")

    def reader(self):
        """A key that may ask, and no more."""
        self.open("#token=key-of-reader", ["a.txt"])
        self.stub.rights, self.stub.key = ["list", "open"], "reader"
        self.go("#a.txt")
        self.shows(1)
        assert "The key reader may not add documents" in self.browser.text("#closed"), self.browser.text("#closed")
        assert not self.browser.run("return document.getElementById('token').checkVisibility()")
        self.stub.rights, self.stub.key, self.stub.takes = ["list", "open", "import", "delete"], None, False  # --read-only
        self.browser.reload()
        self.browser.wait("why", lambda: "takes no documents" in self.browser.text("#closed"))
        assert not self.browser.run("return document.querySelector('#documents .remove:not([hidden])') !== null")
        self.stub.takes = True  # but there is no store
        self.stub.replies["GET /v1/contexts"] = [(409, error("there is no store"), {})]
        self.browser.reload()
        self.browser.wait("why", lambda: self.browser.text("#closed") == "there is no store")
        assert self.browser.text("#trouble") == "", self.browser.text("#trouble")
        self.stub.replies["GET /v1/models"] = [(401, error("the key is not valid here"), {})]
        self.browser.reload()
        self.browser.wait("another key", lambda: "not valid here" in self.browser.text("#key"))

    # ---- files

    def many(self):
        """Twenty at once: they keep their endings, wait in the page, and leave a connection for questions."""
        self.open("", ["old.txt"])
        self.stub.replies["POST /v1/contexts"] = [(429, error("8 documents wait already"), {"Retry-After": "5"})]
        names = [f"file-{i}.cc" for i in range(16)] + ["page.h", "page.cc", "page.html", "\u0434\u043e\u043a\u043b\u0430\u0434.txt"]
        self.add(*names)
        self.browser.wait("that it is tried again", lambda: "tries again in 5 s" in self.browser.text("#documents"))
        self.browser.wait("8 on the server", lambda: len(self.stub.documents) == 9)
        assert self.browser.count("#documents li[data-state='waiting']") == 12
        self.picture("many")
        self.browser.click(self.row("old.txt", ".pick"))
        self.ask("Who?")
        assert self.answered() == "An answer."
        assert self.stub.at_once == 1, f"{self.stub.at_once} streams of events"
        while busy := [name for name, item in self.stub.documents.items() if item["state"] != "ready"]:
            self.stub.ready(busy[0])
            self.wait_row(busy[0], "ready")
        self.browser.wait("all", lambda: len(self.stub.documents) == 21)
        assert self.stub.most_queued == 8, self.stub.most_queued
        assert {"page.h", "page.cc", "page.html"} <= set(self.stub.documents)
        latin = [name for name in self.stub.documents if name not in names and name != "old.txt"]
        assert len(latin) == 1 and latin[0].startswith("document-") and latin[0].endswith(".txt"), latin

    def refusals(self):
        """Each file says what became of it, in the server's words, and can be tried again."""
        self.open()
        table = [("doc.pdf", 400, "this is a PDF: convert it: pdftotext", "this is a PDF: convert it: pdftotext"),
                 ("large.txt", 413, "the body has 20 bytes", "Too large for this server: the body has 20 bytes"),
                 ("odd.docx", 415, "this is a DOCX", "Not a text that this server reads: this is a DOCX"),
                 ("quota.txt", 429, "the quota is used up", "The server has enough to do: the quota is used up"),
                 ("full.txt", 507, "no space left", "The server's disk is full: no space left"),
                 ("closed.txt", 409, "documents are taken in by another process", "documents are taken in by another process")]
        self.stub.replies["POST /v1/contexts"] = [(status, error(said), {}) for _, status, said, _ in table]
        self.add(*(name for name, *_ in table), "good.txt")
        for name, _, _, words in table:
            self.wait_row(name, "refused")
            assert self.browser.text(self.row(name, ".about")) == words, self.browser.text(self.row(name, ".about"))
        self.wait_row("good.txt", "queued")
        self.picture("refusals")
        self.browser.click(self.row("full.txt", ".again"))
        self.wait_row("full.txt", "queued")
        self.browser.click(self.row("doc.pdf", ".remove"))
        self.browser.wait("it is gone", lambda: self.browser.count(self.row("doc.pdf")) == 0)
        # The server takes a file in, and fails to read it.
        self.stub.change("good.txt", state="failed", error={"message": "the disk broke"})
        self.wait_row("good.txt", "failed")
        assert self.browser.text(self.row("good.txt", ".about")) == "the disk broke"
        self.stub.documents.pop("good.txt")
        self.browser.click(self.row("good.txt", ".again"))
        self.wait_row("good.txt", "queued")
        assert self.browser.count(self.row("large.txt")) == 1  # nothing else took its error away

    def taken(self):
        """The name is another text's."""
        self.open("", ["same.txt"])
        self.add("same.txt", content=b"Another text.")
        self.wait_row("same.txt", "taken")
        self.wait_row("same.txt", "ready")
        assert self.browser.run("return document.querySelector('[data-state=taken] .other').value") == "same-2.txt"
        self.picture("taken")
        self.browser.type("[data-state=taken] .other", "/" + ENTER)
        self.browser.wait("what a name has", lambda: "A name has" in self.browser.text("[data-state=taken] .about"))
        self.browser.type("[data-state=taken] .other", BACKSPACE + ENTER)
        self.wait_row("same-2.txt", "queued")
        self.add("same.txt", content=b"A third text.")
        self.wait_row("same.txt", "taken")
        self.browser.click("#documents li[data-state='taken'] .replace")
        self.browser.accept()
        self.wait_row("same.txt", "queued")
        assert self.stub.asked("POST /v1/contexts")[-1][1] == b"A third text."
        assert len(self.stub.asked("DELETE /v1/contexts/same.txt")) == 1
        assert self.browser.count("#documents li[data-state='taken']") == 0
        # The same text under another name: alone it is chosen, among many its row says so.
        known = (409, error('name=x: the same text is context "same-2.txt" already', code="context_exists"), {})
        self.stub.replies["POST /v1/contexts"] = [known, known]
        self.add("copy.txt")
        self.browser.wait("it is chosen", lambda: self.browser.text(CHOSEN + " .name") == "same-2.txt")
        assert self.browser.text("#note") == "copy.txt is here already, as same-2.txt.", self.browser.text("#note")
        self.add("copy.txt", "new.txt")
        self.wait_row("copy.txt", "same")
        self.wait_row("new.txt", "queued")

    def removed(self):
        """A file that waits in the page, and one whose server is away for a while."""
        self.open()
        self.stub.replies["POST /v1/contexts"] = [(503, error("it starts"), {"Retry-After": "60"})]
        self.add("one.txt", "two.txt")
        self.browser.wait("it waits", lambda: "tries again in 60 s" in self.browser.text("#documents"))
        self.browser.click(self.row("one.txt", ".remove"))
        self.browser.run("queue.until = 0; pump()")  # the minute is over
        self.wait_row("two.txt", "queued")
        assert list(self.stub.documents) == ["two.txt"], self.stub.documents

    def cut_off(self):
        """A server that ends the connection, but lives; and a file that is none."""
        self.open()
        self.stub.replies["POST /v1/contexts"] = 20 * [(0, b"", {})]  # a browser tries again
        self.add("large.txt")
        self.wait_row("large.txt", "refused")
        said = self.browser.text(self.row("large.txt", ".about"))
        assert said == "The server ended the connection while 10 B were sent: is the file larger than it takes?", said
        self.stub.replies.clear()
        self.drop("folder")
        self.wait_row("folder-sub-b.txt", "queued")
        self.wait_row("folder-a.txt", "queued")
        assert sorted(self.stub.documents) == ["folder-a.txt", "folder-sub-b.txt"], sorted(self.stub.documents)

    def drop(self, folder):
        """A folder, as a window manager does it."""
        for name in ("a.txt", "sub/b.txt", ".hidden"):
            path = self.file(os.path.join(folder, name), b"Some text.")
        root = path[:path.index(folder) + len(folder)]
        for kind in ("dragEnter", "dragOver", "drop"):
            self.browser.devtools("Input.dispatchDragEvent", {
                "type": kind, "x": 600, "y": 300, "data": {"items": [], "files": [root], "dragOperationsMask": 1}})

    # ---- questions

    def waits(self):
        self.open("", ["ready.txt"])
        self.add("long.txt")
        self.wait_row("long.txt", "queued")
        self.browser.click(self.row("long.txt", ".pick"))
        self.stub.change("long.txt", state="prefilling", progress=0.14, tokens=7703)
        self.ask("Who?")
        self.browser.wait("that it waits", lambda: "Waits until long.txt is read: 7,703 tokens, 14% read" in self.last("waits"))
        self.stub.change("long.txt", progress=0.5)
        self.browser.wait("what is left", lambda: "tokens/s, about" in self.last("waits") and "left" in self.last("waits"))
        self.picture("waiting")
        assert not self.stub.asked("POST /v1/chat/completions")
        self.browser.type("#question", "Another?" + ENTER)
        self.browser.wait("that one is asked", lambda: "One question at a time" in self.browser.text("#note"))
        self.browser.run("document.getElementById('question').value = ''")
        # The server has still enough to do when it is read.
        self.stub.replies["POST /v1/chat/completions"] = [
            (503, error("long.txt is read: 99%"), {"Retry-After": "5"}), (429, error("8 wait"), {"Retry-After": "1"})]
        self.stub.ready("long.txt")
        self.browser.wait("that it asks again", lambda: "99% (asks again in 5 s)" in self.last("waits"))
        assert self.answered() == "An answer."
        assert self.last("waits") == "" and self.last("error") == "" and self.last("from") == "From long.txt"
        assert len(self.stub.asked("POST /v1/chat/completions")) == 3
        assert self.browser.text("#said") == "An answer.", self.browser.text("#said")
        assert self.browser.run("return document.getElementById('said').getAttribute('aria-live')") == "polite"
        # Without a time to wait it is an error, and one that waits can be cancelled.
        self.stub.replies["POST /v1/chat/completions"] = [(503, error("no room"), {}), (429, error("busy"), {"Retry-After": "60"})]
        self.ask("Who?")
        self.answered()
        assert self.last("error") == "The server is not ready for it: no room", self.last("error")
        self.ask("Who?")
        self.browser.wait("that it waits", lambda: "asks again in 60 s" in self.last("waits"))
        self.browser.click("#cancel")
        self.answered()
        assert self.last("error") == "Cancelled."

    def choosing(self):
        self.open("", ["a.txt", "b.txt"])
        none = "#documents li[data-state='none']"
        assert self.browser.text(CHOSEN + " .name") == "No document"
        self.ask("Who?")
        self.answered()
        assert "From no document" in self.last("from") and self.browser.count("article:last-of-type .alone") == 1
        assert b'"context"' not in self.stub.asked("POST /v1/chat/completions")[-1][1]
        for _ in range(3):
            self.browser.click(self.row("a.txt", ".pick"))
            assert self.browser.text(CHOSEN + " .name") == "a.txt"
            assert "Asks a.txt" in self.browser.text("#about")
        self.add("c.txt")
        self.wait_row("c.txt", "queued")
        self.stub.ready("c.txt")
        self.wait_row("c.txt", "ready")
        assert self.browser.text(CHOSEN + " .name") == "a.txt"  # it stays chosen
        self.ask("Who?")
        self.answered()
        assert self.last("from") == "From a.txt" and self.browser.count("article:last-of-type .alone") == 0
        self.browser.click(none + " .pick")
        assert self.browser.text(CHOSEN + " .name") == "No document"
        self.picture("choosing")
        # What is not here is not answered from nothing.
        self.stub.replies["POST /v1/chat/completions"] = [(404, error('no context "gone.txt"'), {})]
        self.go("#gone.txt")
        self.shows(3)
        assert "gone.txt is not here" in self.browser.text("#about"), self.browser.text("#about")
        self.ask("Who?")
        self.answered()
        assert self.last("error") == 'no context "gone.txt"', self.last("error")

    def sources(self):
        """Noise is left out, and a passage is shown where its words are, whatever the offsets say."""
        self.open("", [])
        self.stub.add("a.txt", "The head. \u00e4 The first passage. The second passage.")
        self.stub.sources = [{"text": "The second passage.", "bytes": [3, 22], "share": 0.9}, {"text": "noise", "bytes": [0, 5], "share": 0.02},
                             {"text": "The first passage.", "bytes": [13, 31], "share": 0.03}]
        self.go("#a.txt")
        self.ask("Who?")
        self.answered()
        listed = [self.browser.text(f"article:last-of-type .sources li:nth-child({i})") for i in (1, 2)]
        assert self.browser.count("article:last-of-type .sources li") == 2 and "first passage" in listed[1], listed
        for place, words in ((1, "The second passage."), (2, "The first passage.")):
            self.browser.click(f"article:last-of-type .sources li:nth-child({place}) button")
            self.browser.wait("the passage", lambda: self.browser.text("#reading mark.here") == words)
            self.browser.click("#reading-close")

    # ---- screens and keys

    def small_screen(self):
        self.open("#file-3.h", [f"file-{i}.h" for i in range(17)])
        self.browser.devtools("Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True})
        try:
            self.browser.reload()
            self.browser.wait("the list", lambda: "17 documents" in self.browser.text("#fold"))
            assert self.visible("#question") and not self.browser.run("return document.getElementById('documents').checkVisibility()")
            assert "file-3.h" in self.browser.text("#fold")
            self.browser.click("#fold")
            assert self.visible("#question") and self.visible(CHOSEN)
            self.browser.click(self.row("file-5.h", ".pick"))
            self.browser.wait("it folds", lambda: not self.browser.run("return document.getElementById('documents').checkVisibility()"))
            for _ in range(6):
                self.ask("Who?")
                self.answered()
            assert self.visible("#question")
        finally:
            self.browser.devtools("Emulation.clearDeviceMetricsOverride", {})

    def keys_alone(self):
        """To the question past seventeen documents."""
        self.open("#file-3.h", [f"file-{i}.h" for i in range(17)])
        self.browser.keys(TAB)
        assert self.browser.run("return document.activeElement.id") == "skip"
        self.browser.keys(ENTER)
        assert self.browser.run("return document.activeElement.id") == "question"
        assert self.hash() == "#file-3.h", self.hash()
        self.browser.keys("Who?" + ENTER)
        assert self.answered() == "An answer."

    def broken_storage(self):
        """What another page of this address left there does not stop this one."""
        self.open("", ["a.txt"])
        for left in ("{", "[1, null]", '{"a": 1}', '[{"question": "old"}]'):
            self.browser.run("sessionStorage.setItem('turns', arguments[0])", left)
            self.browser.reload()
            self.shows(1)
