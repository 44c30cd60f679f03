#!/usr/bin/env python3
"""A team's operator: keys, certificates, settings, backups: team.py PROGRAM

Commands of docs/runbook.md are run as they stand there.
"""
import json
import stat
import sys

import walk

MODEL = "--model models/demo"
DOCUMENT = "--input models/demo/docs/registry-512.txt"


def runbook(holds):
    """The block of docs/runbook.md with this text."""
    return next(block for _, block in walk.blocks("docs/runbook.md") if holds in block)


def make_keys(at):
    entries = []
    for name, rights in (("operator", "list,open,import,delete,admin"), ("reader", "list,open")):
        said, _ = at.step(f"carrel keys new {name} --rights {rights} --out {name}.key --json", never=["\"key\""])
        entries.append(json.loads(said or '{"entry": {}}')["entry"])
        at.expect(f"{name}.key is its owner's alone", stat.S_IMODE(at.path(f"{name}.key").stat().st_mode) == 0o600)
    at.step("carrel keys new reader --out reader.key", code=1, err=["reader.key", "exists"])
    at.step("carrel keys new other --out other.key", err=["other.key", '"sha256"'], never=["The line above"])
    at.write("keys.json", json.dumps({"keys": entries}))
    at.step("carrel keys check keys.json", out=["operator", "list open import delete admin", "reader"])
    at.write("list.json", json.dumps(entries))
    at.step("carrel keys check list.json", code=2)


def settings(at):
    """A misspelt one does not start, wherever it stands; nor does a flag that changes nothing."""
    at.write("bad.toml", '[serve]\nstore = "out/served"\nmax-sesions = 3\n')
    at.step("carrel serve --config bad.toml", code=2, err=["bad.toml", "max-sesions", "did you mean max-sessions?"])
    serve = "carrel serve --store out/served --listen unix:out/s"
    at.step(serve, code=2, err=["CARREL_SERVE_MAX_SESIONS", "did you mean CARREL_SERVE_MAX_SESSIONS?"],
            environment={"CARREL_SERVE_MAX_SESIONS": "3"})
    at.step(f"{serve} --tls-cert server.pem --tls-key server.key", code=2, err=["--tls-cert changes nothing"])
    at.step(f"{serve} --tls-key server.key", code=2, err=["--tls-key changes nothing without --tls-cert"])
    at.step("carrel serve --store out/served --listen 127.0.0.1:0 --socket-mode 0660", code=2, err=["--socket-mode changes nothing"])
    api = f"carrel api {MODEL} --listen 127.0.0.1:0"
    at.step(f"{api} --tls-cert server.pem --tls-key server.key", code=2, err=["--tls-cert changes nothing without --server"])
    at.step(f"{api} --store out/served --keep-tokens 4096", code=2, err=["--keep-tokens changes nothing without --keep-documents"])
    at.step("carrel api --listen 127.0.0.1:0", code=2, err=["--model is required"])
    at.step(api, code=2, err=["CARREL_API_KEEP_DOCUMENT", "did you mean CARREL_API_KEEP_DOCUMENTS?"],
            environment={"CARREL_API_KEEP_DOCUMENT": "3"})
    at.write("api.toml", '[api]\nmodel = "models/demo"\nstore = "out/of-api"\nlisten = ["127.0.0.1:0"]\nmodel-name = "ours"\n')
    at.step(f"carrel prefill {MODEL} {DOCUMENT} --store out/of-api --name a --quiet")
    with at.server("carrel api --config api.toml", r"model ours on http://([0-9.:]+)/v1",
                   {"CARREL_API_SERVICE_HOST": "10.0.0.1", "CARREL_API_PORT": "tcp://10.0.0.1:8080"}) as started:
        at.step(f"curl -s http://{started[1]}/v1/models", out=["ours@a"])


def with_tls(at):
    at.step("export HOST=localhost\n" + runbook("openssl req -x509"))
    at.write("serve.toml", '[serve]\nstore = "out/served"\nlisten = ["127.0.0.1:0"]\nkeys = "keys.json"\ntls-cert = "server.pem"\n'
             'tls-key = "server.key"\naudit-log = "out/audit.jsonl"\n')
    with at.server("carrel serve --config serve.toml", r"ready on 127.0.0.1:(\d+).* [1-9]\d* threads") as started:
        server = f"--server localhost:{started[1]}"
        operator, reader = (f"{server} --tls-ca ca.pem --key-file {name}.key" for name in ("operator", "reader"))
        at.step(f"carrel ls {server}", code=1)
        at.step(f"carrel ls {server} --key-file reader.key", code=1, err=["does the server want TLS? --tls-ca"])
        at.step(f"carrel ls {server} --tls-ca ca.pem", code=1, err=["UNAUTHENTICATED"])
        at.step(f"carrel prefill {MODEL} {DOCUMENT} --store out/work --name novel {reader} --quiet", code=1,
                err=["PERMISSION_DENIED", "import"])
        at.expect("refused before the first layer: there is no context", "novel" not in at.step("carrel ls --store out/work")[0])
        at.step(f"carrel prefill {MODEL} {DOCUMENT} --store out/work --name novel {operator} --quiet", out=["content id"])
        at.step(f"carrel ask {MODEL} {reader} --context nov $'\\n\\nQuestion: x?\\nAnswer:'", code=1, err=["nov is not in", "novel"])
        at.step(f"carrel ask {MODEL} {reader} --context novel "
                "$'\\n\\nQuestion: What is the access code of the Fianeeth bunker?\\nAnswer:'", out=["670492"])
        at.step(f"carrel export novel novel.carrel {operator}", err=[], out=[])
        at.step(f"carrel import novel.carrel --as second {operator}", code=1, err=["novel"])
        at.step(f"carrel rm novel {reader}", code=1, err=["PERMISSION_DENIED", "key reader lacks the right delete"])
        at.step(f"carrel verify --deep {operator}", out=["right"])
        at.step(f"carrel stats {operator}")
    at.expect("the audit log has the denial", "reader" in at.path("out/audit.jsonl").read_text())


def by_the_socket(at):
    with at.server("carrel serve --store out/second --listen unix:out/second.sock --listen 127.0.0.1:0", r"127\.0\.0\.1:(\d+)") as started:
        at.step("carrel import - --server unix:out/second.sock <novel.carrel")
        at.step(f"carrel rm novel --server 127.0.0.1:{started[1]}", code=1, err=["PERMISSION_DENIED", "no key was presented"])
        at.step("carrel inspect nove --server unix:out/second.sock", code=1, err=["did you mean novel?"])
    at.step("carrel audit novel --store out/second --top-k 32 --want-recall 0.5", out=["heads reach recall 0.5"])


def main():
    at = walk.Walk("team", sys.argv[1])
    make_keys(at)
    settings(at)
    with_tls(at)
    by_the_socket(at)
    at.end()


if __name__ == "__main__":
    main()
