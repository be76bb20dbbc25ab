"""The Markdown pages of the project: their blocks of code, headings, links and inline code."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^( *)(`{3,}|~{3,})[ \t]*(\w*)[^\n`]*$")
HEADING = re.compile(r"^(#{1,6}) +(.*?)(?: +#+)?$")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE_LINK = re.compile(r"^ {0,3}\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
HTML_LINK = re.compile(r"<(?:img|a|source)\b[^>]*?\b(?:src|href|srcset)=\"([^\"]+)\"")
HTML_ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """In the order in which a newcomer reads: README, then docs, then examples."""
    found = [ROOT / "README.md", ROOT / "README_zh.md", *sorted((ROOT / "docs").glob("*.md"))]
    found += [*sorted((ROOT / "examples").glob("*.md")), ROOT / "CONTRIBUTING.md"]
    return [path for path in found if path.is_file()]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[Block]:
    """Every fenced block of a page; an unclosed one is an error."""
    found, opening, body = [], None, []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if opening is None:
            if fence:
                opening, body = (number, fence), []
        elif fence and fence[2].startswith(opening[1][2]) and not fence[3]:
            found.append(Block(name(path), opening[0], opening[1][3], "\n".join(body) + "\n"))
            opening = None
        else:
            body.append(line.removeprefix(opening[1][1]))
    assert opening is None, f"{name(path)}:{opening and opening[0]}: the block is never closed"
    return found


def all_blocks(*languages: str) -> list[Block]:
    return [block for path in pages() for block in blocks(path) if block.language in languages]


def prose(path: Path) -> str:
    """The page without its fenced blocks."""
    lines, fence = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        match = FENCE.match(line)
        if fence:
            fence = "" if match and match[2].startswith(fence) and not match[3] else fence
        elif match:
            fence = match[2]
        else:
            lines.append(line)
    return "\n".join(lines)


def without_code(text: str) -> str:
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text, flags=re.DOTALL)


def inline_code(path: Path) -> list[str]:
    return [match[2].strip() for match in re.finditer(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", prose(path))]


def links(path: Path) -> list[str]:
    """Targets of links and images, in Markdown and in HTML."""
    text = without_code(prose(path))
    targets = [match[3] for match in LINK.finditer(text)]
    # [![badge](image)](target): the image is inside the text of the link
    targets += [inner[3] for match in LINK.finditer(text) for inner in LINK.finditer(match[2])]
    return targets + REFERENCE_LINK.findall(text) + HTML_LINK.findall(text)


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub makes them, and of HTML anchors."""
    found, counts = set(HTML_ANCHOR.findall(prose(path))), {}
    for line in prose(path).splitlines():
        heading = HEADING.match(line)
        if heading:
            made = slug(heading[2])
            count = counts[made] = counts.get(made, -1) + 1
            found.add(f"{made}-{count}" if count else made)
    return found


def slug(heading: str) -> str:
    """Lower case, without punctuation, blanks as hyphens; letters of every script stay."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[`*]", "", text).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
