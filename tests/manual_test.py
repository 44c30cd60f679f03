"""The manual pages and the completion of tools/package/manual: manual_test.py PROGRAM

Every flag and name of the lab that the program's help tells stands in its page, and bash completes commands, flags,
names of the lab and files.
"""
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def complete(script, *words):
    """What bash offers for the last of the words."""
    quoted = " ".join(f"'{word}'" for word in words)
    program = f"""source '{script}'; COMP_WORDS=({quoted}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _carrel
printf '%s\\n' "${{COMPREPLY[@]}}" """
    done = subprocess.run(["bash", "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split()


def expect(what, good):
    if not good:
        sys.exit("manual_test: " + what)


def check_pages(program, folder):
    pages = sorted((folder / "man1").iterdir())
    expect(f"{len(pages)} pages", len(pages) > 15)
    for page in pages:
        words = [] if page.stem == "carrel" else page.stem.split("-")[1:]
        help_text = subprocess.run([program, *words, "--help"], stdout=subprocess.PIPE, text=True,
                                   check=True).stdout
        text = page.read_text(encoding="utf-8").replace("\\-", "-")
        for flag in re.findall(r"^  (?:-\w,)?(--[a-z-]+)", help_text, re.MULTILINE):
            expect(f"{page.name} lacks {flag}", flag in text)
        if "--lab " in help_text:
            names = subprocess.run([program, *words, "--lab", "help"], stdout=subprocess.PIPE, text=True,
                                   check=True).stdout
            for name in re.findall(r"^  ([a-z-]+)", names, re.MULTILINE):
                expect(f"{page.name} lacks --lab {name}", f"--lab {name}" in text)


def check_completion(script):
    expect("no commands", {"prefill", "ask", "serve"} <= set(complete(script, "carrel", "")))
    expect("no command of keys", {"new", "check"} <= set(complete(script, "carrel", "keys", "")))
    expect("ask --fid", complete(script, "carrel", "ask", "--fid") == ["--fidelity"])
    expect("ask --lab pre", complete(script, "carrel", "ask", "--lab", "pre") == ["prefetch"])
    expect("serve has no --fidelity", complete(script, "carrel", "serve", "--fid") == [])
    expect("files", complete(script, "carrel", "ask", "--model", str(script)) == [str(script)])


def main():
    program = sys.argv[1]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        subprocess.run([ROOT / "tools/package/manual", program, folder], check=True)
        check_pages(program, folder)
        check_completion(folder / "completions" / "carrel")
    return 0


if __name__ == "__main__":
    sys.exit(main())
