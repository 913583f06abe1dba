"""Clean public-domain children's books into `kvasir_lab/text/`: one paragraph a line, headings marked `## `.

Usage: python -m kvasir_lab.prepare_text FOLDER   (files named `<ebook number>-<anything>.txt.gz` or `.txt`, UTF-8)

Front matter (dedications, prefaces, contents) is dropped, hard line breaks are joined, typographic quotes and dashes
become ASCII, notes and picture captions go. The output is deterministic, so running it again changes nothing.
"""

from __future__ import annotations

import bz2
import gzip
import re
import sys
from pathlib import Path

OUT = Path(__file__).resolve().parent / "text"

# ebook number -> (file name, title of the first story or chapter, first words of its text)
BOOKS = {
    11: ("alice-in-wonderland", "Down the Rabbit-Hole", "Alice was beginning to get"),
    55: ("wizard-of-oz", "The Cyclone", "Dorothy lived in the midst"),
    12: ("through-the-looking-glass", "Looking-Glass House", "One thing was certain, that the"),
    486: ("ozma-of-oz", "The Girl in the Chicken Coop", "The wind blew hard and joggled"),
    500: ("pinocchio", "The Piece of Wood", "Centuries ago there lived"),
    503: ("blue-fairy-book", "The Bronze Ring", "Once upon a time in a certain country"),
    540: ("red-fairy-book", "The Twelve Dancing Princesses", "ONCE upon a time there lived in the village"),
    640: ("yellow-fairy-book", "The Cat and the Mouse in Partnership", "A cat had made acquaintance"),
    641: ("violet-fairy-book", "A Tale of the Tontlawald", "Long, long ago there stood"),
    1597: ("andersens-fairy-tales", "The Emperor's New Clothes", "Many years ago, there was an Emperor"),
    2435: ("crimson-fairy-book", "Lovely Ilonka", "There was once a king's son"),
    2781: ("just-so-stories", "How the Whale Got His Throat", "IN the sea, once upon a time"),
    3027: ("orange-fairy-book", "The Story of the Hero Makoma", "Once upon a time, at the town of Senna"),
    3282: ("brown-fairy-book", "What the Rose Did to the Cypress", "Once upon a time a great king of the East"),
    3454: ("lilac-fairy-book", "The Shifty Lad", "In the land of Erin there dwelt"),
    5615: ("pink-fairy-book", "The Cat's Elopement", "Once upon a time there lived a cat"),
    6746: ("grey-fairy-book", "Donkey Skin", "There was once upon a time a king"),
    7277: ("green-fairy-book", "The Blue Bird", "Once upon a time there lived a King"),
    27826: ("olive-fairy-book", "Madschun", "Once upon a time there lived, in a small cottage"),
}
SMALL_WORDS = {
    "a",
    "an",
    "and",
    "as",
    "at",
    "but",
    "by",
    "for",
    "from",
    "how",
    "in",
    "into",
    "of",
    "on",
    "or",
    "that",
    "the",
    "to",
    "who",
    "with",
}
ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "–": "-", "\u00a0": " ", "\ufeff": ""})
CHAPTER = re.compile(r"^(chapter\s+)?([0-9]+|[ivxlc]+)\s*[.:]?\s*", re.IGNORECASE)
NOTE = re.compile(
    r"^[\[(*{]|^(translated|adapted|from the) |^from '|^by the comte|line-art|illustration|hrchen$|^chorus$",
    re.IGNORECASE,
)


def heading(text: str, lines: int) -> str | None:
    """The title if this paragraph is one: a single short line in capitals or title case that ends no sentence."""
    if lines > 2 or len(text) > 75 or re.search(r"^['\"]|[,;:\"]$|[a-z]['.!?]$|--", text):
        return None
    text = re.sub(r"\s*([\[(]\d+[\])]|\(?From the \w+\)?)$", "", text).strip(" .")
    if re.fullmatch(r"(chapter\s+)?([0-9]+|[ivxlc]+)", text, re.IGNORECASE):
        return ""
    title = CHAPTER.sub("", text) if re.match(r"^(chapter|[0-9]+\.|[IVXLC]+\.)", text, re.IGNORECASE) else text
    words = re.findall(r"[A-Za-z][A-Za-z'-]*", title)
    if not words or not (title.isupper() or all(w[0].isupper() for w in words if w.lower() not in SMALL_WORDS)):
        return None
    if not title.isupper():
        return title
    lowered = title.lower()
    return re.sub(r"[a-z][a-z']*", lambda m: m[0] if m[0] in SMALL_WORDS and m.start() else m[0].capitalize(), lowered)


def paragraphs(text: str) -> list[str]:
    out: list[str] = []
    for block in re.split(r"\n\s*\n", text.translate(ASCII).replace("\r", "")):
        lines = [line for line in block.split("\n") if line.strip()]
        if not lines:
            continue
        joined = re.sub(r"\s+", " ", " ".join(lines)).strip().replace("_", "")
        joined = re.sub(r"\s*\[\d+\]", "", joined)
        verse = len(lines) > 1 and all(line.startswith("  ") for line in lines)
        if NOTE.search(joined[:40]):
            continue
        title = None if verse else heading(joined, len(lines))
        if title is not None:
            if title:
                out.append("## " + title)
        elif len(joined) > 1 and re.search(r"[a-z]", joined):
            out.append(joined)
    return out


def is_credit(text: str) -> bool:
    """A story's source, such as "Grimm." or "L'Oiseau Bleu. Par Mme. d'Aulnoy.": short, and no sentence."""
    words = re.findall(r"[A-Za-z][A-Za-z'-]*", text)
    return len(text) < 60 and not re.search(r"['\"!?]$", text) and sum(w[0].islower() for w in words) <= len(words) / 3


def clean(text: str, title: str, start: str) -> str:
    body = paragraphs(text)
    first = next((i for i, p in enumerate(body) if p.startswith(start)), None)
    if first is None:
        raise SystemExit(f"cannot find the first words '{start}'; another edition of this book?")
    body = ["## " + title, *body[first:]]
    before_heading = [after.startswith("## ") for after in body[1:]] + [True]
    kept = [
        p for p, last in zip(body, before_heading, strict=True) if not (last and (p.startswith("## ") or is_credit(p)))
    ]
    return "\n".join(re.sub(r"^([A-Z])([A-Z]{1,4}) ", lambda m: m[1] + m[2].lower() + " ", p) for p in kept) + "\n"


def main(folder: str) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for number, (name, title, start) in BOOKS.items():
        found = sorted(Path(folder).glob(f"{number}-*.txt*"))
        if not found:
            raise SystemExit(f"no file '{number}-*.txt.gz' in {folder}")
        data = found[0].read_bytes()
        text = (gzip.decompress(data) if found[0].suffix == ".gz" else data).decode("utf-8")
        cleaned = clean(text, title, start).encode()
        (OUT / f"{name}.txt.bz2").write_bytes(bz2.compress(cleaned))
        print(f"{name}: {len(cleaned):,} bytes, {cleaned.count(b'## ')} headings")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
