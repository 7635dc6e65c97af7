#!/usr/bin/env python3
"""Checks the links of the repository's Markdown pages: each file that a link names is there, and so is each heading.

Links to other hosts are not followed. Prints what is wrong; the exit status is 0 if nothing is.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^)\s]+)\)")


def lines(page):
    """The lines outside of code blocks, with their numbers."""
    code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            code = not code
        elif not code:
            yield number, line


def anchors(page):
    """The names that a renderer gives the headings of a page."""
    found = set()
    for _number, line in lines(page):
        if heading := re.match(r"#+ +(.*)", line):
            name = re.sub(r"[^\w\- ]", "", heading[1].lower()).strip().replace(" ", "-")
            # A heading that occurs again has a number behind its name.
            again = sum(1 for other in found if re.fullmatch(re.escape(name) + r"(-\d+)?", other))
            found.add(f"{name}-{again}" if again else name)
    return found


def main():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    pages, wrong, checked = [ROOT / name for name in listed.split()], [], 0
    for page in pages:
        for number, line in lines(page):
            for link in LINK.findall(re.sub(r"`[^`]*`", "", line)):
                if re.match(r"[a-z]+:", link):
                    continue
                checked += 1
                name, _, anchor = link.partition("#")
                target = (page.parent / name).resolve() if name else page
                where = f"{page.relative_to(ROOT)}:{number}: {link}"
                if not target.exists():
                    wrong.append(f"{where}: there is no such file")
                elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                    wrong.append(f"{where}: there is no such heading")
    print("\n".join([*wrong, f"{checked} links of {len(pages)} pages, {len(wrong)} wrong"]))
    return 1 if wrong or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
