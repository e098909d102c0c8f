"""Build the site of this version into build/site: make site.

The pages are those of docs/ and some of the root of the repository; mkdocs.yml has the navigation.
Versions lie beside each other, a folder for each minor version, so that a published site keeps the
earlier ones: build/site may hold them already.
"""

import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from opencode_a2a import __version__

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
PAGES = BUILD / "pages"
HTML = BUILD / "html"
SITE = BUILD / "site"
VERSION = ".".join(__version__.split(".")[:2])
OF_THE_ROOT = {
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Pages that lie outside of docs/, and what they are called on the site."""
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
NEWEST = """\
<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={0}/">
<title>opencode-a2a</title>
<a href="{0}/">The documentation of version {0}</a>
"""


class Page(NamedTuple):
    """A page of the navigation."""

    section: str
    title: str
    path: str


def configuration() -> dict[str, Any]:
    """Return what mkdocs.yml says, for this version."""
    said = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    places = {"docs_dir": PAGES.name, "site_dir": HTML.name}
    return said | places | {"site_url": f"{said['site_url']}{VERSION}/"}


def navigation() -> Iterator[Page]:
    for section in configuration()["nav"]:
        for name, pages in section.items():
            yield from (Page(name, *item) for page in pages for item in page.items())


def folder(page: Page) -> str:
    """Return where a page lies on the site."""
    name = page.path.removesuffix(".md")
    return "" if name == "index" else f"{name}/"


def shown_files() -> list[Path]:
    """Return the files of deploy/ that people read, which the site shows on a page of its own."""
    files = (path for path in (ROOT / "deploy").rglob("*") if path.suffix != ".json")
    return sorted((file for file in files if file.is_file()), key=lambda file: file.parts)


def label(file: Path) -> str:
    """Return the anchor of a file on that page."""
    return re.sub(r"[^a-z0-9]+", "-", str(file.relative_to(ROOT / "deploy")).lower())


def files_page() -> str:
    """Return the page of files, as they are in the repository."""
    kinds = {".yaml": "yaml", ".yml": "yaml", ".service": "ini"}
    parts = [
        "# Files to deploy\n\nThe files of `deploy/`, as [Deployment](deployment.md) uses them.\n"
    ]
    for file in shown_files():
        name, kind = file.relative_to(ROOT), kinds.get(file.suffix, "dockerfile")
        parts.append(f"## `{name}` {{ #{label(file)} }}\n\n```{kind}\n{file.read_text()}```\n")
    return "\n".join(parts)


def relinked(text: str, place: Path) -> str:
    """Return a page whose links hold on the site: to other pages, or else to the repository."""
    source = configuration()["extra"]["social"][0]["link"]
    shown_at = {file: f"#{label(file)}" for file in shown_files()}
    shown_at |= {file.parent: anchor for file, anchor in reversed(shown_at.items())}

    def lead(match: re.Match[str]) -> str:
        begin, target, anchor, end = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        file = (place / target).resolve()
        path = str(file.relative_to(ROOT))
        if file.parent == ROOT / "docs":
            target = file.name
        elif file in shown_at:
            target, anchor = "files.md", shown_at[file]
        elif name := OF_THE_ROOT.get(path):
            target = name
        else:
            target = f"{source}/{'tree' if file.is_dir() else 'blob'}/v{__version__}/{path}"
        return f"{begin}{target}{anchor or ''}{end}"

    return LINK.sub(lead, text)


def collect() -> None:
    """Write the pages as the generator gets them."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for file in (ROOT / "docs").iterdir():
        if file.suffix == ".md":
            (PAGES / file.name).write_text(relinked(file.read_text(), file.parent))
        else:
            shutil.copy(file, PAGES)
    (PAGES / "files.md").write_text(files_page())
    for name, page in OF_THE_ROOT.items():
        (PAGES / page).write_text(relinked((ROOT / name).read_text(), ROOT))


def for_language_models() -> tuple[str, str]:
    """Return llms.txt, a list of the pages, and llms-full.txt, the pages without the reference."""
    settings = configuration()
    short = [f"# {settings['site_name']}\n\n> {settings['site_description']}\n"]
    full: list[str] = []
    section = None
    for page in navigation():
        if page.section != section:
            section = page.section
            short.append(f"\n## {section}\n\n")
        short.append(f"- [{page.title}]({settings['site_url']}{folder(page)}index.md)\n")
        if section in ("Start", "Use", "Run") and page.path != "files.md":
            full.append((PAGES / page.path).read_text())
    return "".join(short), "\n\n".join(full)


def dead_links(site: Path) -> list[str]:
    """Return the links within a site that lead nowhere, with their pages."""
    pages = {path: path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
    found: list[str] = []
    for page, text in pages.items():
        for link in re.findall(r'(?:href|src)=["\']?([^"\' >]+)', text):
            path, _, anchor = html.unescape(link).partition("#")
            if re.match(r"[a-z]+:|//", path):
                continue
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            known = target.is_file() and (not anchor or f'id="{anchor}"' in pages.get(target, ""))
            if not known:
                found.append(f"{page.relative_to(site)}: {link}")
    return found


def publish() -> None:
    """Put this version beside the others, and write what belongs to all of them."""
    target = SITE / VERSION
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(HTML, target)
    for page in navigation():
        # A program that reads the site gets the text of a page beside it.
        shutil.copy(PAGES / page.path, target / folder(page) / "index.md")
    short, full = for_language_models()
    (target / "llms.txt").write_text(short)
    (target / "llms-full.txt").write_text(full)
    numbers = sorted(
        (path.name for path in SITE.iterdir() if re.fullmatch(r"\d+\.\d+", path.name)),
        key=lambda name: [int(number) for number in name.split(".")],
        reverse=True,
    )
    listed = [
        {"version": one, "title": one, "aliases": ["latest"] if one == numbers[0] else []}
        for one in numbers
    ]
    (SITE / "versions.json").write_text(json.dumps(listed, indent=2) + "\n")
    (SITE / "index.html").write_text(NEWEST.format(numbers[0]))
    shutil.copy(SITE / numbers[0] / "llms.txt", SITE / "llms.txt")


def main() -> None:
    """Collect, build, publish."""
    collect()
    shutil.rmtree(HTML, ignore_errors=True)
    generator = Path(sys.executable).parent / "zensical"
    (BUILD / "mkdocs.yml").write_text(yaml.safe_dump(configuration(), sort_keys=False))
    done = subprocess.run(  # noqa: S603 - our own
        [generator, "build", "--strict", "--config-file", BUILD / "mkdocs.yml"], check=False
    )
    if done.returncode:
        sys.exit(done.returncode)
    if dead := dead_links(HTML):
        sys.exit("These links lead nowhere:\n  " + "\n  ".join(dead))
    publish()
    print(f"Read it with: python3 -m http.server --directory {SITE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
