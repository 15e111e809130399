"""The one sanitizer: what it lets through, and that every format has the values whole and safe to print."""

import json
import sys

import msgpack
import pytest
import yaml

from state.dump import render
from state.printable import encodable, printable, printable_json, printable_lines

CODES = [
    *range(0x20),
    *range(0x7F, 0xA0),
    *range(0x200B, 0x2010),
    *range(0x2028, 0x202F),
    *range(0x2060, 0x206A),
    0xFEFF,
    0xE0001,
    *range(0xD800, 0xE000, 0x101),
]
HOSTILE = "".join(f"a{chr(code)}" for code in CODES)


@pytest.mark.parametrize("code", CODES)
def test_what_steers_or_hides_becomes_a_visible_escape(code: int) -> None:
    text = printable(f"a{chr(code)}b")
    assert text.isprintable()
    assert text[:2] == "a\\"
    assert text.encode().isascii()


def test_what_people_write_stays() -> None:
    for text in ("", "a b", "µs, ümlaut, 日本語, `'\"", "\\x1b", "12 %"):
        assert printable(text) == text


def test_a_long_value_is_cut_with_how_much_is_missing() -> None:
    assert printable("x" * 10, 10) == "x" * 10
    assert printable("x" * 13, 10) == "xxxxxxxxxx…(+3 characters)"
    assert printable_lines("abc\ndefg", 3) == "abc\ndef…(+1 characters)"


def test_lines_keep_their_ends_and_nothing_else() -> None:
    assert printable_lines("a\x1b\nb\r\n") == "a\\x1b\nb\\r\n"


@pytest.mark.parametrize("code", CODES)
def test_a_json_text_keeps_its_value(code: int) -> None:
    value = {f"k{chr(code)}": [f"v{chr(code)}"]}
    text = printable_json(json.dumps(value, ensure_ascii=False, indent=1))
    assert text.replace("\n", "").isprintable()
    assert json.loads(text) == encodable(value)


def test_a_lone_surrogate_is_a_text_of_its_own_in_what_must_be_utf_8() -> None:
    assert encodable({"a\udc80": ["\ud800", 1, None, ("x",)]}) == {"a\\udc80": ["\\ud800", 1, None, ["x"]]}


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_a_text_format_is_safe_to_print_and_has_the_whole_value(form: str) -> None:
    whole = "".join(char for char in HOSTILE if not 0xD800 <= ord(char) < 0xE000) * 500
    text = render({"k\x1b\u202e": whole, "n": [1]}, form).decode()
    assert text.replace("\n", "").isprintable()
    read = json.loads(text) if form == "json" else yaml.load(text, Loader=yaml.CSafeLoader)
    assert read == {"k\x1b\u202e": whole, "n": [1]}


@pytest.mark.parametrize("form", ["json", "yaml", "msgpack"])
def test_a_name_that_is_no_utf_8_does_not_take_the_document_with_it(form: str) -> None:
    body = render({"comm": "x\udc80", "n": 1}, form)
    read = msgpack.unpackb(body) if form == "msgpack" else yaml.load(body, Loader=yaml.CSafeLoader)
    assert read == {"comm": "x\\udc80", "n": 1}


def test_no_character_of_unicode_is_passed_that_is_not_printable() -> None:
    text = printable("".join(map(chr, range(sys.maxunicode + 1))))
    assert text.isprintable()
