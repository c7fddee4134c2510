import dataclasses
import re
import xml.etree.ElementTree as ET

import pytest

from remat_opt.view import page, report
from remat_opt.view.report import Table

MIB = 1024**2


def table(**changes) -> Table:
    fields = {
        "title": "Two values",
        "headings": ("value", "bytes"),
        "rows": (("a", "1 B"), ("<b> & 'c'", "12 KiB")),
        "align": "lr",
        "footer": "and no more",
    }
    return Table(**{**fields, **changes})


def parsed(markup: str) -> ET.Element:
    return ET.fromstring(markup)


def words(element: ET.Element) -> list[str]:
    return [text.strip() for text in element.itertext() if text.strip()]


def local(element: ET.Element, name: str) -> list[ET.Element]:
    return [found for found in element.iter() if found.tag.rpartition("}")[2] == name]


def test_sentences_are_broken_where_words_are_cut() -> None:
    table = Table(
        headings=("name", "what can be done"),
        rows=(("a_very_long_name_of_a_module", "one two three four five six"), ("b", "seven")),
        align="ll",
        prose=True,
    )
    assert table.text(60).splitlines()[2:] == [
        "a_very_long_name_of_a_module  one two three four five six",
        "b                             seven",
    ]
    assert table.text(50).splitlines()[2:] == [
        "a_very_lon...of_a_module  one two three four five",
        "                          six",
        "b                         seven",
    ]


def test_table_as_text():
    assert table().text() == (
        "Two values\n"
        "value       bytes\n"
        "---------  ------\n"
        "a             1 B\n"
        "<b> & 'c'  12 KiB\n"
        "and no more"
    )


def test_table_without_title_footer_and_rows():
    assert table(title="", footer="", rows=()).text() == "value  bytes\n-----  -----"


def test_table_as_html_holds_the_same_words_escaped():
    markup = table().html()
    assert "&lt;b&gt; &amp; &#x27;c&#x27;" in markup
    assert words(parsed(f"<div>{markup}</div>")) == [
        *("Two values", "value", "bytes", "a", "1 B", "<b> & 'c'", "12 KiB", "and no more")
    ]


def test_table_refuses_ragged_rows():
    message = "The table 'Two values' has 2 headings, 2 alignments and rows of [1] cells."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        table(rows=(("a",),))


def test_facts():
    facts = [("peak", "1 MiB"), ("regions", "<3>")]
    assert report.facts_text(facts) == "peak     1 MiB\nregions  <3>"
    assert words(parsed(report.facts_html(facts))) == ["peak", "1 MiB", "regions", "<3>"]


def test_a_table_fits_into_a_narrow_terminal():
    wide = table(rows=(("a/very/long/path/of/modules/in/a/net", "1 B"),), footer="")
    lines = wide.text(30).split("\n")
    assert max(map(len, lines)) == 30
    assert lines[-1] == "a/very/lon...s/in/a/net    1 B"
    assert wide.text() == wide.text(200)


def test_columns_of_words_keep_some_of_them():
    lines = table(rows=(("a" * 40, "1 B"),), footer="").text(5).split("\n")
    assert lines[-1].split()[0] == "aaaa...aaaaa"


def test_titles_of_values_lose_their_extents_first():
    one = table(rows=(("relu of Net/Block_3, 64x112x112x96 float32", "1 B"),), footer="")
    assert one.text(32).split("\n")[-1] == "relu of Net/Block_3...       1 B"
    assert one.text(24).split("\n")[-1] == "relu of...Block_3    1 B"
    # Only extents: what else follows a comma tells one label from another.
    other = table(rows=(("dots_saveable, per block", "1 B"),), footer="")
    assert other.text(25).split("\n")[-1] == "dots_sa...er block    1 B"


def test_spare_columns_go_before_words_are_cut():
    wide = table(
        headings=("label", "bytes", "time", "to plan"),
        rows=(("dots_saveable, per block", "1 B", "2 s", "3 ms"),),
        align="lrrr",
        footer="what goes below is broken",
        spare=("to plan", "time"),
    )
    assert wide.text(50) == wide.text() == dataclasses.replace(wide, spare=()).text()
    assert wide.text(40).split("\n")[1].split() == ["label", "bytes", "time"]
    narrow = wide.text(31)
    assert narrow == (
        "Two values\n"
        "label                     bytes\n"
        "------------------------  -----\n"
        "dots_saveable, per block    1 B\n"
        "what goes below is broken"
    )
    assert wide.text(20).split("\n")[-2:] == ["what goes below is", "broken"]
    assert "to plan" in wide.html()


def test_long_facts_are_broken():
    assert report.facts_text([("note", "one two three four five six seven")], 30) == (
        "note  one two three four five\n      six seven"
    )


def test_markup_has_no_identifiers_that_could_clash_on_a_page():
    assert " id=" not in table().html()


def test_a_page_is_a_document_that_follows_light_and_dark():
    document = page.document("a < b", report.section("t", "<p>x</p>", ""))
    assert document.startswith("<!DOCTYPE html>")
    assert "<title>a &lt; b</title>" in document
    assert "color-scheme:light dark" in document
    assert document.count("<p>x</p>") == 1
