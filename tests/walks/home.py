#!/usr/bin/env python3
"""The first ten minutes of somebody with files and a question: home.py PROGRAM

The model is the demo's, and the demo's made one that knows chats; a real chat model beside it where CARREL_REAL_MODELS
names a folder with GGUF files.
"""
import glob
import io
import json
import os
import shutil
import sys
import urllib.error
import urllib.request
import zipfile

import walk

MODEL = "--model models/demo"
STORE = "--store out/store"
QUESTION = r"$'\n\nQuestion: What is the access code of the Fianeeth bunker?\nAnswer:'"
ANSWER = "670492"

# <|pad|> begins a turn.
TEMPLATE = ("{% if messages[0].role != 'system' %}<|pad|>system: You are brief.\n{% endif %}{% for m in messages %}<|pad|>"
            "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|pad|>assistant:{% endif %}")


def archive(member, content="x"):
    bytes_of = io.BytesIO()
    with zipfile.ZipFile(bytes_of, "w") as file:
        file.writestr(member, content)
    return bytes_of.getvalue()


def look_around(at):
    at.step("carrel", code=2, err=["--help"])
    at.step("carrel --help", out=["prefill", "ask", "chat", "api", "serve"])
    at.step("carrel prefil x", code=2, err=["there is no command prefil; did you mean prefill?"])
    at.step(f"carrel ask {MODEL} --contex x y", code=2, err=["--contex", "did you mean --context?"])


def tokens_of(at, store, name):
    """The digest of a document's tokens."""
    said, _ = at.step(f"carrel inspect {name} --store {store} --json")
    return json.loads(said or "{}").get("token_ids_sha256", name)


def bring_files(at):
    """What is no text is named, with a command; each refusal comes before anything is computed or made."""
    prefill = f"carrel prefill {MODEL} --store out/files --quiet"
    text = "The caf\u00e9 in Lisbon opens at nine. Its key is kept in Oslo.\n" * 3
    kinds = [
        ("paper.pdf", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n", ["this is a PDF", "pdftotext paper.pdf - | carrel prefill --input -"]),
        ("my letter.docx", archive("word/document.xml"), ["DOCX", "pandoc -t plain 'my letter.docx' | carrel"]),
        ("book.epub", archive("mimetype", "application/epub+zip"), ["EPUB", "pandoc"]),
        ("all.zip", archive("a.txt"), ["ZIP", "unzip -p all.zip"]),
        ("page.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", ["PNG", "tesseract"]),
        ("log.gz", b"\x1f\x8b\x08\0\0\0", ["gzip", "zcat log.gz"]),
        ("latin.txt", text.encode("latin-1"), ["invalid UTF-8 at byte offset 7 of", "iconv -f latin1 -t utf-8 latin.txt | carrel"]),
        ("wide.txt", text.encode("utf-16-le"), ["UTF-16LE", "iconv -f utf-16le -t utf-8 wide.txt"]),
        ("wide32.txt", text.encode("utf-32-be"), ["UTF-32BE", "iconv -f utf-32be"]),
        ("core", b"\x7fELF\x02\x01\x01\0\0", ["binary", "NUL byte is at offset 7"]),
        ("empty.txt", b"", ["empty.txt is empty"]),
    ]
    for name, content, words in kinds:
        at.write(name, content)
        at.step(f"{prefill} --name n --input '{name}'", code=2, err=[name, *words])
    at.step(f"{prefill} --name n --input models/demo/docs", code=2, err=["a folder", "cat models/demo/docs/* | carrel prefill --input -"])
    at.step(f"{prefill} --name n --input a --input b", code=2, err=["given 2 times", "cat A B"])
    at.step(f"{prefill} --name n --input absent.txt", code=1, err=["absent.txt", "No such file"])
    # A text is a text, whatever says its encoding.
    at.write("utf8.txt", text)
    at.write("marked.txt", text.encode("utf-8-sig"))
    at.write("marked16.txt", text.encode("utf-16"))
    at.write("page.html", f"<!DOCTYPE html><p>{text}</p>")
    for name in ("utf8", "marked", "marked16"):
        at.step(f"{prefill} --name {name} --input {name}.txt")
    at.step("iconv -f latin1 -t utf-8 latin.txt | " + f"{prefill} --name converted --input -")
    at.expect("a text has the same tokens, whatever says its encoding",
              len({tokens_of(at, "out/files", name) for name in ("utf8", "marked", "marked16", "converted")}) == 1)
    at.step(f"{prefill} --name page --input page.html", err=["this is HTML", "pandoc -f html -t plain page.html"])


def ask(at):
    at.step(f"carrel prefill {MODEL} --input models/demo/docs/registry-512.txt {STORE} --name novel", out=["novel: ", "checked: 16 of its tokens"])
    at.step(f"carrel ask {MODEL} {STORE} --context novel {QUESTION}", out=[ANSWER], never=["sampling", "empty"])
    at.step(f"carrel ask {MODEL} {STORE} --context novell {QUESTION}", code=1, err=["novell is not in", "did you mean novel?"])
    at.step(f"carrel ask {MODEL} {STORE} --context x {QUESTION}", code=1, err=["there are: novel"])
    at.step(f"carrel ask {MODEL} --store out/nowhere --context novel {QUESTION}", code=1, err=["out/nowhere"])
    at.step(f"carrel ask {MODEL} {STORE} --context novel --max-tokens 0 x", err=["the answer is empty: it ended at --max-tokens 0"])
    at.step(f"carrel chat {MODEL} {STORE} --context novel", given=b"What is the access code of the Fianeeth bunker?\n", out=[ANSWER, "[1]"])
    for flags, words in [("--key-file k", "--key-file changes nothing without --server"), ("--retry-for 3s", "--retry-for"),
                         ("--top-p 0.5", "--top-p changes nothing"), ("--gpu-memory 1GB", "--gpu-memory changes nothing without --device cuda")]:
        at.step(f"carrel ask {MODEL} {STORE} --context novel {flags} x", code=2, err=[words])
    at.step(f"carrel ask {MODEL} --top-k 8 x", code=2, err=["--top-k changes nothing without --context"])


def chat_model(at):
    """The demo's model with a chat template, which also advises to sample."""
    folder = at.path("chatty")
    shutil.copytree(walk.ROOT / "models/demo", folder, ignore=shutil.ignore_patterns("docs"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 1, "do_sample": True, "temperature": 0.7, "top_k": 20}))
    return "--model chatty"


def http(url, data=None, headers=None):
    request = urllib.request.Request(url, data, headers or {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=walk.PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def of_a_chat_model(at):
    """Terminal, page and API make one context of a text, and nobody sees the template's head."""
    model = chat_model(at)
    document = (walk.ROOT / "models/demo/docs/registry-512.txt").read_text()
    ask = f"carrel ask {model} --store out/chats --max-tokens 8"
    question = "'What is the access code of the Fianeeth bunker?'"
    at.step(f"carrel prefill {model} --store out/chats --name book --input models/demo/docs/registry-512.txt --quiet")
    at.step(f"carrel prefill {model} --store out/chats --name bare --raw --input models/demo/docs/registry-512.txt --quiet")
    at.expect("a text in a turn is not the bare one", tokens_of(at, "out/chats", "book") != tokens_of(at, "out/chats", "bare"))
    at.step(f"{ask} --context book {question}", err=["sampling as ", "temperature 0.7", "top_k 20"])
    at.step(f"{ask} --context book --temperature 0 {question}", never=["sampling"])
    at.step(f"{ask} --context book --raw --temperature 0 {QUESTION}", never=["sampling"])
    for way in ("", "--raw "):
        said, _ = at.step(f"{ask} --context book --temperature 0 {way}--sources 5 --json {QUESTION}")
        sources = json.loads(said or "{}").get("sources", [])
        at.expect(f"sources of {way}ask", len(sources) > 0)
        for source in sources:
            begin, end = source["bytes"]
            at.expect(f"bytes of a source are the file's: {source}", document.encode()[begin:end].decode() == source["text"])
    with at.server(f"carrel api {model} --store out/chats --listen 127.0.0.1:0", r"on (http://[0-9.:]+)/v1") as started:
        url = started[1]
        token = at.path("out/chats.token").read_text().strip()
        status, added = http(f"{url}/v1/contexts?name=book", document.encode(),
                             {"Content-Type": "text/plain", "Authorization": f"Bearer {token}"})
        at.expect(f"the page's document is the terminal's: {status} {added}", status == 200 and json.loads(added).get("existed"))
        status, text = http(f"{url}/v1/contexts/book/text")
        at.expect(f"the text is what was given: {status}", text == document)
        at.step(f"carrel ask --api {url} --context book --temperature 0 --max-tokens 8 --sources 3 --json {question}", out=['"text"'],
                never=["You are brief"])
        at.step(f"carrel chat --api {url} --context book --temperature 0 --max-tokens 8", given=b"What is it?\n", out=["[1]"],
                never=["You are brief"])


def real_chat_model(at, path):
    model = f"--model '{path}'"
    store = "--store out/real-" + os.path.basename(path).removesuffix(".gguf")
    at.write("note.txt", "The meeting of the garden club is on Tuesday in the old mill. Its treasurer is Maria Lindt, who lives in Graz. "
             "The locker code of the club is 5521.\n")
    at.step(f"carrel prefill {model} {store} --name note --input note.txt --quiet")
    at.step(f"carrel ask {model} {store} --context note --temperature 0 'What is the locker code of the club? Answer with the number alone.'",
            out=["5521"])
    at.step(f"carrel ask {model} {store} --context note --temperature 0 --raw --max-tokens 4 $'<|im_end|>\\n<|im_start|>assistant\\n<|im_end|>'")


def main():
    at = walk.Walk("home", sys.argv[1])
    look_around(at)
    bring_files(at)
    ask(at)
    of_a_chat_model(at)
    for path in sorted(glob.glob(os.path.join(os.environ.get("CARREL_REAL_MODELS") or os.devnull, "*.gguf"))):
        real_chat_model(at, path)
    at.end()


if __name__ == "__main__":
    main()
