#!/usr/bin/env python3
"""The page of `carrel api` in a real browser, as people use it: page_test.py CARREL [--pictures FOLDER]

Ends with 77, for ctest to skip it, where Debian's chromium and chromium-driver are not installed (./run test page).
"""
import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

from stub_test import StubTest
from webdriver import ENTER, ESCAPE, TAB, Browser

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DOCUMENTS = os.path.join(ROOT, "models/demo/docs")
QUESTION, ANSWER = "What is the badge number of Waiskav Stialwio?", "965107"  # of registry-8k
WIDTHS = {1280: 900, 390: 844}


class Server:
    def __init__(self, carrel, store, *more):
        self.command = [carrel, "api", "--model", os.path.join(ROOT, "models/demo"), "--store", store,
                        "--model-name", "demo", *more, "--listen"]
        self.address = "127.0.0.1:0"
        self.start()

    def start(self):
        self.process = subprocess.Popen(self.command + [self.address], stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r"a page for people on http://([0-9.:]+)(/\S*)$", line.strip()):
                self.address, self.fragment = found[1], found[2]
                return
        raise RuntimeError("carrel api ended")

    def stop(self):
        ended = self.process.poll()
        self.process.send_signal(signal.SIGTERM)
        said = self.process.communicate()[1]
        assert ended is None, f"carrel api had ended with {ended}: {said}"


class PageTest:
    def __init__(self, browser, server, folder, pictures):
        self.browser, self.server, self.folder, self.pictures = browser, server, folder, pictures

    def picture(self, name):
        """On both screens, light and dark; nothing may stand beyond an edge."""
        for width, height in WIDTHS.items():
            for dark in (False, True):
                path = os.path.join(self.pictures or self.folder, f"{name}-{width}-{'dark' if dark else 'light'}.png")
                self.browser.look(width, height, dark, path)
                wide = self.browser.run("return document.documentElement.scrollWidth")
                assert wide <= width, f"{name}: {wide} pixels wide on a screen of {width}"
        self.browser.devtools("Emulation.clearDeviceMetricsOverride", {})
        self.browser.devtools("Emulation.setEmulatedMedia", {"features": []})

    def file(self, name, content):
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
        return path

    def document(self, name, times=1):
        with open(os.path.join(DOCUMENTS, name), "rb") as file:
            return times * (file.read() + b"\n")

    def state(self, name):
        return self.browser.run(
            "const row = document.querySelector(`#documents li[data-name='${arguments[0]}']`);"
            "return row ? row.dataset.state : ''", name)

    def wait_for(self, name, state, seconds=180):
        self.browser.wait(f"{name} is {state}", lambda: self.state(name) == state, seconds)

    def running(self):
        return self.browser.count("article.running") > 0

    def ask(self, question):
        self.browser.type("#question", question + ENTER)

    def last(self, part):
        return self.browser.text(f"article:last-of-type .{part}")

    # ---- what people do, in order

    def empty(self):
        self.browser.open(f"http://{self.server.address}{self.server.fragment}")
        self.browser.wait("the model's name", lambda: self.browser.text("#model") == "demo")
        self.browser.wait("a hint", lambda: "Add a document" in self.browser.text("#empty"))
        self.picture("empty")

    def upload(self):
        self.browser.type("#file", self.file("registry.8k ä.txt", self.document("registry-8k.txt")))
        name = "registry.8k-a.txt"
        self.browser.wait("progress", lambda: self.state(name) in ("prefilling", "ready"))
        self.browser.wait("a share", lambda: re.search(r"\d+% read", self.browser.text("#documents")))
        self.picture("reading")
        self.ask(QUESTION)  # it waits
        self.wait_for(name, "ready")
        self.browser.wait("an answer", lambda: self.browser.count("article") == 1 and not self.running())
        assert self.last("answer") == ANSWER, self.last("answer")
        said = self.browser.text("#documents")
        assert "7,70" in said and "MiB" in said, said
        self.browser.wait("it is chosen", lambda: "Asks " + name in self.browser.text("#about"))
        self.name = name

    def ask_and_see(self):
        self.ask(QUESTION)
        self.browser.wait("an answer", lambda: self.browser.count("article") == 2 and not self.running())
        assert self.last("answer") == ANSWER, self.last("answer")
        figures = self.last("figures")
        assert re.search(r"\d+ of 7,70\d rows read per token", figures) and "ms per token" in figures, figures
        assert self.last("error") == ""
        assert self.browser.run("return document.activeElement.id") == "question"
        self.picture("answered")

    def sources(self):
        """What the answer rests on, in the document's text, by mouse and by keys."""
        listed = self.browser.count("article:last-of-type .sources button")
        assert 1 <= listed <= 3, listed
        first = self.last("sources li:first-child .passage")
        assert "Waiskav Stialwio" in first and ANSWER in first, first
        self.browser.click("article:last-of-type .sources button")
        self.browser.wait("the text", lambda: self.browser.run("return document.getElementById('reading').open"))
        here = self.browser.text("#reading mark.here")
        assert "Waiskav Stialwio" in here and ANSWER in here, here
        assert self.browser.count("#reading mark") == listed
        seen = self.browser.run(
            "const mark = document.querySelector('#reading mark.here').getBoundingClientRect();"
            "const text = document.getElementById('reading-text').getBoundingClientRect();"
            "return mark.top >= text.top && mark.bottom <= text.bottom")
        assert seen, "the source is not in view"
        whole = self.browser.run("return document.getElementById('reading-text').textContent")
        assert whole.strip() == self.document("registry-8k.txt").decode().strip(), whole[:200]
        self.picture("sources")
        if listed > 1:
            self.browser.click("#reading-next")
            self.browser.wait("the next one", lambda: self.browser.text("#reading-place").startswith("source 2"))
        self.browser.keys(ESCAPE)
        self.browser.wait("it is closed", lambda: not self.browser.run("return document.getElementById('reading').open"))
        assert self.last("error") == ""

    def text_stays_text(self):
        self.ask("<b>bold</b><script>document.title = 'taken'</script>")
        self.browser.wait("an answer", lambda: self.browser.count("article") == 3 and not self.running())
        assert self.last("question").startswith("<b>bold</b>"), self.last("question")
        assert self.browser.count("article b, article script") == 0
        assert self.browser.run("return document.title") == "Carrel"

    def cancel(self):
        """An answer that does not end by itself, by the key and by the button."""
        self.browser.click("#documents li[data-state='none'] .pick")  # of the model alone
        self.browser.wait("none is chosen", lambda: "No document" in self.browser.text("#about"))
        self.browser.click("#documents li[data-state='ready'] .pick")
        self.browser.wait("it is chosen", lambda: "Asks" in self.browser.text("#about"))
        for way in ("key", "button"):
            for _ in range(10):  # on a fast machine one may have ended when it is seen
                before = self.browser.count("article")
                self.ask("The river The river The river The river The river The river")
                self.browser.wait("some of an answer", lambda: self.browser.count("article") > before and
                                  len(self.last("answer")) > 0)
                if self.running():
                    break
            if way == "key":
                self.browser.keys(ESCAPE)
            else:
                self.browser.click("#cancel")
            self.browser.wait("it ends", lambda: not self.running())
            assert self.last("error") == "Cancelled.", self.last("error")

    def drop_and_cancel(self):
        """A file is dropped, and its reading cancelled."""
        text = self.document("registry-8k.txt", 4).decode()
        self.browser.run(
            "const files = new DataTransfer(); files.items.add(new File([arguments[0]], 'long.txt'));"
            "document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true}))",
            text)
        self.wait_for("long.txt", "prefilling")
        self.browser.click("#documents li[data-name='long.txt'] .remove")
        self.browser.wait("it is gone", lambda: self.state("long.txt") == "")
        assert self.browser.text("#trouble") == "", self.browser.text("#trouble")

    def errors(self):
        self.browser.type("#file", self.file("picture.txt", b"\x89PNG\xff\xfe"))
        self.wait_for("picture.txt", "refused")
        assert len(self.browser.text("#documents li[data-name='picture.txt'] .error")) > 10
        self.browser.type("#file", self.file(self.name, b"Another text."))
        self.browser.wait("that the name is taken", lambda: self.browser.count("#documents li[data-state='taken']") == 1)
        self.picture("refused")
        self.browser.click("#documents li[data-state='taken'] .remove")
        self.browser.click("#documents li[data-state='refused'] .remove")
        self.server.stop()
        self.ask(QUESTION)
        self.browser.wait("that nobody answers", lambda: "does not answer" in self.last("error"))
        self.browser.type("#file", self.file("short.txt", b"A short text."))
        self.browser.wait("that it waits", lambda: "does not answer" in self.browser.text("#documents li[data-state='waiting']"))
        self.server.start()
        self.bring_token()
        self.ask(QUESTION)
        self.browser.wait("an answer again", lambda: self.last("answer") == ANSWER)
        self.wait_for("short.txt", "ready")
        self.browser.click("#documents li[data-name='short.txt'] .remove")
        self.browser.accept()
        self.browser.wait("it is gone", lambda: self.state("short.txt") == "")

    def bring_token(self):
        """That a server printed which started anew."""
        self.browser.run("location.hash = arguments[0] + '&' + state.chosen", self.server.fragment.lstrip("/"))

    def reload(self):
        """In the middle of an answer, and of a document."""
        turns = self.browser.count("article")
        self.browser.type("#file", self.file("more.txt", self.document("registry-8k.txt", 2)))
        self.wait_for("more.txt", "prefilling")
        self.ask("Who?")
        self.browser.reload()
        self.browser.wait("the turns", lambda: self.browser.count("article") == turns + 1)
        if self.last("answer") == "":
            assert "loaded anew" in self.last("error"), self.last("error")
        self.browser.wait("the document", lambda: self.state("more.txt") in ("prefilling", "ready"))
        self.wait_for("more.txt", "ready")
        assert "Asks " + self.name in self.browser.text("#about"), self.browser.text("#about")
        self.picture("two")

    def keyboard(self):
        """From the top of the page to an answer by keys alone."""
        self.browser.run("document.activeElement.blur(); window.scrollTo(0, 0)")
        self.browser.open(f"http://{self.server.address}/")
        self.browser.wait("the documents", lambda: self.browser.count("#documents .pick") == 3)
        seen = []
        for _ in range(12):
            self.browser.keys(TAB)
            seen.append(self.browser.run("return document.activeElement.dataset.focus || document.activeElement.id"))
            if seen[-1] == f"pick {self.name}":
                self.browser.keys(ENTER)
                break
        assert seen[-1] == f"pick {self.name}", seen
        assert self.browser.run("return document.activeElement.id") == "question"
        turns = self.browser.count("article")
        self.browser.keys(QUESTION + ENTER)
        self.browser.wait("an answer", lambda: self.browser.count("article") > turns and not self.running())
        assert self.last("answer") == ANSWER, self.last("answer")

    def delete(self):
        self.browser.click("#documents li[data-name='more.txt'] .remove")
        self.browser.accept()
        self.browser.wait("it is gone", lambda: self.state("more.txt") == "")
        self.browser.reload()
        self.browser.wait("the other", lambda: self.state(self.name) == "ready")
        assert self.state("more.txt") == ""

    def key(self):
        """A server that wants one."""
        made = json.loads(subprocess.check_output([self.server.command[0], "keys", "new", "a", "--json"]))
        keys = self.file("keys.json", json.dumps({"keys": [made["entry"]]}).encode())
        server = Server(self.server.command[0], os.path.join(self.folder, "another"), "--keys", keys)
        try:
            self.browser.open(f"http://{server.address}/")
            self.browser.run("sessionStorage.clear()")
            self.browser.reload()
            self.browser.wait("that a key is wanted", lambda: "wants a key" in self.browser.text("#key"))
            self.browser.type("#key-text", made["key"] + ENTER)
            self.browser.wait("the model", lambda: self.browser.text("#model") == "demo")
            assert self.browser.text("#trouble") == "", self.browser.text("#trouble")
            assert self.browser.run("return document.getElementById('key').hidden")
        finally:
            server.stop()

    def console(self):
        """Nothing broke the policy, and nothing failed that was not meant to."""
        meant = ("the server responded with a status of", "net::ERR_CONNECTION_REFUSED", "net::ERR_EMPTY_RESPONSE")
        said = [line for line in self.browser.said() if not any(text in line for text in meant)]
        assert not said, said


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("carrel")
    parser.add_argument("--pictures", help="keep what the page looks like in this folder")
    arguments = parser.parse_args()
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or chromium is None:
        print("skipped: no chromedriver and chromium; ./run test page installs them")
        return 77
    if arguments.pictures:
        os.makedirs(arguments.pictures, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(arguments.carrel, os.path.join(folder, "store"))
        try:
            browser = Browser(driver, chromium)
            try:
                test = PageTest(browser, server, folder, arguments.pictures)
                with urllib.request.urlopen(f"http://{server.address}/") as page:
                    headers = {name: page.headers[name] for name in ("Content-Type", "Content-Security-Policy")}
                    stubbed = StubTest(browser, page.read(), headers, test.picture, test.file)
                for step in (test.empty, test.upload, test.ask_and_see, test.sources, test.text_stays_text, test.cancel,
                             test.drop_and_cancel, test.errors, test.reload, test.keyboard, test.delete, test.key,
                             *stubbed.steps(), test.console):
                    start = time.monotonic()
                    step()
                    print(f"{step.__name__}: right, {time.monotonic() - start:.1f} s", flush=True)
            finally:
                browser.close()
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
