"""Text from outside: the characters allowed on the wire, and the one function that makes any text safe to display."""

from __future__ import annotations

from prime_protocol import limits

INVISIBLE = (
    (0x00, 0x1F),  # control characters: ESC controls terminals, LF forges log lines
    (0x7F, 0x9F),  # C1 control characters: 0x9B is ESC [
    (0xAD, 0xAD),
    (0x34F, 0x34F),
    (0x61C, 0x61C),
    (0x115F, 0x1160),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x200B, 0x200F),  # zero width, writing direction
    (0x2028, 0x202E),  # line and paragraph separators, writing direction
    (0x2060, 0x206F),
    (0x3164, 0x3164),
    (0xFE00, 0xFE0F),
    (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFFB),
    (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A),
    (0xE0000, 0xE0FFF),
)
"""Code points, first and last, that no name or text may contain: controls, separators, and Unicode's default ignorables.
The list is fixed here rather than taken from a table: a valid name stays valid under any version of Unicode."""
_INVISIBLE_CLASS = "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in INVISIBLE)
VISIBLE = f"^[^{_INVISIBLE_CLASS}]*$"
"""Pattern of text without them, for Python and Rust."""


def printable(text: str, chars_max: int = limits.DETAIL_CHARS_MAX) -> str:
    r"""Return at most `chars_max` characters of foreign text, with unsafe ones replaced by `?`.

    Unsafe characters can control a terminal, forge a line or hide. All text from outside passes here before a terminal,
    a log, a metric's label or a page shows it. Beyond INVISIBLE, it replaces what Python calls not printable:
    surrogates, unassigned and private code points, and spaces other than U+0020.

    Example: printable("a\x1b[2Jb") is "a?[2Jb".
    """
    text = text[:chars_max]
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char.isprintable() and not _is_invisible(ord(char)) else "?" for char in text)


def _is_invisible(code: int) -> bool:
    return any(first <= code <= last for first, last in INVISIBLE)


def number_of(count: int, one: str) -> str:
    """Return a number with its noun.

    Example: number_of(2_000, "bundle") == "2,000 bundles".
    """
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"
