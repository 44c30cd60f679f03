"""A browser by the WebDriver protocol, which is JSON over HTTP; of Python's standard library alone."""
import base64
import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
ENTER, TAB, ESCAPE, BACKSPACE = "\ue007", "\ue004", "\ue00c", "\ue003"


class Browser:
    """A headless Chromium. Elements are named by CSS selectors."""

    def __init__(self, driver, browser):
        self.process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                self.root = f"http://127.0.0.1:{found[1]}"
                break
        else:
            raise RuntimeError(f"{driver} ended")
        arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900"]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")
        options = {"binary": browser, "args": arguments}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self.call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self.root += "/session/" + made["sessionId"]

    def close(self):
        try:
            self.call("DELETE", "", None)
        finally:
            self.process.terminate()
            self.process.wait()

    def call(self, method, path, body):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.root + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=180) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"].split("\n")[0]) from None

    def open(self, url):
        self.call("POST", "/url", {"url": url})

    def reload(self):
        self.call("POST", "/refresh", {})

    def run(self, script, *arguments):
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def find(self, selector):
        return self.call("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]

    def click(self, selector):
        self.call("POST", f"/element/{self.find(selector)}/click", {})

    def type(self, selector, text):
        self.call("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def keys(self, text):
        """To whatever has the focus."""
        actions = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def accept(self):
        """The question that the page asks."""
        self.call("POST", "/alert/accept", {})

    def text(self, selector):
        """What is seen of the first such element; none: empty."""
        return self.run("const e = document.querySelector(arguments[0]); return e ? e.innerText : ''", selector)

    def count(self, selector):
        return self.run("return document.querySelectorAll(arguments[0]).length", selector)

    def wait(self, what, condition, seconds=180):
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                raise AssertionError(f"{what}: not within {seconds} s; the page says: {self.text('body')!r}; "
                                     f"the console: {self.said()}")
            time.sleep(0.02)

    def said(self):
        """What the console got since the last call: broken policies and errors of the script are there."""
        return [entry["message"] for entry in self.call("POST", "/se/log", {"type": "browser"})]

    def look(self, width, height, dark, path):
        """A picture of the page as it is on such a screen."""
        self.devtools("Emulation.setDeviceMetricsOverride",
                      {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700})
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", {"features": [scheme]})
        picture = self.call("GET", "/screenshot", None)
        with open(path, "wb") as file:
            file.write(base64.b64decode(picture))

    def devtools(self, command, parameters):
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})
