"""The page of a plan, as markup; ``test_plan_page_in_browser`` looks at it as people do."""

import html.parser
import json
import re

import pytest

from remat_opt.view import page, plan_page
from tests.view.plans import (
    MEASURED,
    MIB,
    RESIDENT,
    decision,
    loop_value,
    named,
    plan,
    timeline,
)

VOID = {"br", "meta", "link", "input"}


class Read(html.parser.HTMLParser):
    """Checks that elements nest, and gathers words and scripts."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self.feed(markup)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            if self.elements[-1][1].get("type") == "application/json":
                self.data += data
        elif self.open and self.open[-1] != "style":
            self.words.append(data)


def layers(count):
    return plan(
        decisions=[
            decision(root=n, what=f"sum in Block_{n}", module=f"Net/Block_{n}", bytes=n * MIB)
            for n in range(count)
        ]
    )


def test_it_says_all_without_a_script():
    read = Read(plan_page.html(layers(3)))
    words = " ".join(read.words)
    for said in (
        *("Plan of loss for h200", "Asked for: least memory", "3.00 MiB", "Memory over time"),
        *("With this plan", "The unchanged function", "At the peak: 3.00 MiB"),
        *("sum in Block_2, 8x8 float32", "Net/Block_2 · train.py:3 (loss)"),
        "Dropping it would free 2.00 MiB",
        *("Region 1", "About this plan", "remat_opt 0.1.0"),
    ):
        assert said in words, said


def test_nothing_is_loaded_and_nothing_has_an_identifier():
    markup = page.document("plan", plan_page.html(layers(3)))
    read = Read(markup)
    for tag, attributes in read.elements:
        assert "id" not in attributes
        for key in ("src", "href", "action"):
            assert (attributes.get(key) or "data:,").startswith("data:"), (tag, attributes)
    assert "@import" not in markup
    assert "url(" not in markup


def test_texts_are_never_markup():
    evil = "</script><script>alert(1)</script><b>"
    given = plan(function=evil, decisions=[decision(what=evil, module=evil, source=evil)])
    read = Read(plan_page.html(given))
    assert [tag for tag, _ in read.elements].count("script") == 2
    assert evil in json.loads(read.data)["texts"][0]


def test_the_data_hold_each_text_once():
    data = json.loads(Read(plan_page.html(layers(3))).data)
    assert len(set(data["texts"])) == len(data["texts"])
    value = data["values"][2]
    assert data["texts"][value[1]] == "sum in Block_2, 8x8 float32"
    assert value[8] == 2 * MIB


def test_a_notebook_has_the_largest_values_and_says_so():
    read = Read(plan_page.html(layers(50), most=10))
    assert [value[0] for value in json.loads(read.data)["values"]] == list(range(40, 50))
    assert "The 10 largest of 50 values;" in " ".join(" ".join(read.words).split())


def test_ten_thousand_values_stay_small():
    markup = plan_page.html(layers(10_000), most=100_000)
    assert len(json.loads(Read(markup).data)["values"]) == 10_000
    assert len(markup) < 1_500_000
    # Static rows and nodes are capped.
    assert markup.count("<tr") < 60
    assert markup.count("<details") < 500


def test_what_was_compiled():
    given = plan(measured=MEASURED, as_compiled=[MIB, 3 * MIB], budget_bytes=2 * MIB)
    words = " ".join(Read(plan_page.html(given)).words)
    assert "as compiled" in words
    assert "3.25 MiB" in words
    assert "The budget is not met: compiled, the plan needs 3.25 MiB" in words
    assert 'verify="compile" chooses by what the compiler says.' in words


def test_a_plan_of_nothing():
    nothing = dict.fromkeys(plan()["predicted"], 0)
    empty = {"timeline": timeline([]), "plain_timeline": timeline([]), "pins": []}
    given = plan(stages=[], predicted={**nothing, **empty}, notes=["nothing to plan."])
    words = " ".join(Read(plan_page.html(given)).words)
    assert "nothing to plan." in words
    assert "Memory over time" not in words


@pytest.mark.parametrize("theme", ["prefers-color-scheme", "data-jp-theme-light", "vscode-dark"])
def test_it_follows_light_and_dark(theme):
    assert theme in plan_page.html(plan())


def test_colours_of_the_page_are_those_of_the_pictures():
    from remat_opt.view.memory_chart import COLORS
    from remat_opt.view.plan_words import KINDS
    from remat_opt.view.plan_words import RESIDENT as RESIDENT_KINDS

    style = plan_page.html(plan(predicted={"pins": [{"name": named(), "role": "", "bytes": 1}]}))
    for kind in (*KINDS, *RESIDENT_KINDS.values()):
        assert re.search(rf"--ro-{kind.replace(' ', '-')}: {COLORS[kind]};", style)


def test_what_a_step_has_all_the_time_is_in_picture_legend_and_data():
    read = Read(plan_page.html(plan(decisions=[decision()], resident=RESIDENT, as_compiled=[MIB])))
    words = " ".join(read.words)
    assert "3.50 MiB held throughout, up to 3.00 MiB of temporaries above" in words
    assert "optimizer state" in words
    data = json.loads(read.data)
    assert [label for _, label in data["kinds"]][:3] == ["parameters", "optimizer state", "inputs"]
    chart = data["charts"][0]
    assert len(chart["bands"]) == len(data["kinds"])
    assert data["texts"][chart["arrays"][1][0]] == "optimizer state"
    # The line lies on top of what is held throughout.
    assert chart["compiled"] == [[4 * MIB + MIB // 2]]


def test_values_inside_loops_and_regions_inside_regions_are_there():
    inner = {"roots": [0], "kept": [], "checkpointed": True, "inside": []}
    outer = {**inner, "inside": [inner]}
    given = plan(
        decisions=[decision(what="scan")], loop_values=[loop_value(what="tanh")], stages=[outer]
    )
    words = " ".join(Read(plan_page.html(given)).words)
    for said in ("Region 1.1", "inside the scan", "iterations 1 to 4 of 6 · train.py:3 (loss)"):
        assert said in words, said
