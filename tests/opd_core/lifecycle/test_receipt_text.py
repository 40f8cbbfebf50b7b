"""Receipts for people: a clean one says so, and nothing that is left goes unnamed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opd_core.lifecycle.gpu_memory import NOT_TOLD
from opd_core.lifecycle.receipt_text import left_over, receipt_markdown, receipt_text
from opd_core.lifecycle.records import (
    ChildEnd,
    DeviceState,
    PortState,
    Receipt,
    ScratchState,
    Survivor,
)

CLEAN = Receipt(
    run_id="tiny-1",
    cause="completed",
    clean=True,
    seconds=3.21,
    children=(
        ChildEnd("ray-head", "ray", 41, 1000.0, 1100.25, "SIGTERM", 0),
        ChildEnd("teacher-32b", "sglang", 4242, 1000.0, 1003.0, "exited", -11),
        ChildEnd("teacher-32b", "sglang", 43, 1005.0, 1099.0, "SIGKILL", -9),
        ChildEnd("student-0", "sglang", 44, 1005.0, None, "SIGKILL", None),
    ),
    survivors=(),
    ports=(PortState(30000, True),),
    scratch=(ScratchState("/scratch/ray", True),),
    devices=(DeviceState("GPU-aa", 4, 12, True),),
)
LEFT = replace(
    CLEAN,
    cause="owner died",
    clean=False,
    survivors=(Survivor(13, "python3"), Survivor(14, "sglang::scheduler")),
    ports=(PortState(30000, True), PortState(30001, False)),
    scratch=(ScratchState("/scratch/ray", True), ScratchState("/scratch/two words", False)),
    devices=(
        DeviceState("GPU-aa", 4, 12, True),
        DeviceState("GPU-bb", 4, 9000, False),
        DeviceState("GPU-cc", 7, NOT_TOLD, False),
    ),
)
EVERYTHING = (
    "process 13 (python3)",
    "process 14 (sglang::scheduler)",
    "port 30001",
    "folder /scratch/two words",
    "memory of GPU-bb (4 MiB before, 9000 MiB after)",
    "memory of GPU-cc (7 MiB before, not told after)",
)


def test_a_clean_receipt_says_so_and_shows_every_proof() -> None:
    assert receipt_text(CLEAN).splitlines() == [
        "run tiny-1 ended: completed",
        "clean: nothing is left (teardown took 3.2 s)",
        "",
        "name         kind    pid   lived s  ended      code",
        "ray-head     ray     41    100.2    SIGTERM    0",
        "teacher-32b  sglang  4242  3.0      by itself  -11",
        "teacher-32b  sglang  43    94.0     SIGKILL    -9",
        "student-0    sglang  44    ?        unseen     ?",
        "",
        "found     what",
        "free      ports 30000",
        "removed   /scratch/ray",
        "released  memory of GPU-aa (4 MiB before, 12 MiB after)",
    ]


def test_markdown_shows_the_same_as_tables() -> None:
    lines = receipt_markdown(CLEAN).splitlines()
    assert lines[:7] == [
        "**run tiny-1 ended: completed**",
        "",
        "clean: nothing is left (teardown took 3.2 s)",
        "",
        "| name | kind | pid | lived s | ended | code |",
        "| --- | --- | --- | --- | --- | --- |",
        "| ray-head | ray | 41 | 100.2 | SIGTERM | 0 |",
    ]
    assert lines[-5:] == [
        "| found | what |",
        "| --- | --- |",
        "| free | ports 30000 |",
        "| removed | /scratch/ray |",
        "| released | memory of GPU-aa (4 MiB before, 12 MiB after) |",
    ]


def test_one_sentence_names_everything_that_is_left() -> None:
    assert left_over(CLEAN) == ""
    assert left_over(LEFT) == "teardown of tiny-1 was not clean; left: " + ", ".join(EVERYTHING)


def test_text_and_markdown_name_everything_that_is_left() -> None:
    text, markdown = receipt_text(LEFT), receipt_markdown(LEFT)
    assert "clean: nothing" not in text + markdown
    assert left_over(LEFT) in markdown
    assert left_over(LEFT) in " ".join(text.split())
    rows = [
        ("STILL RUNNING", "process 13 (python3)"),
        ("STILL RUNNING", "process 14 (sglang::scheduler)"),
        ("IN USE", "port 30001"),
        ("free", "ports 30000"),
        ("removed", "/scratch/ray"),
        ("STILL THERE", "/scratch/two words"),
        ("released", "memory of GPU-aa (4 MiB before, 12 MiB after)"),
        ("IN USE", "memory of GPU-bb (4 MiB before, 9000 MiB after)"),
        ("IN USE", "memory of GPU-cc (7 MiB before, not told after)"),
    ]
    assert text.splitlines()[-9:] == [f"{found:<13}  {what}" for found, what in rows]
    assert markdown.splitlines()[-9:] == [f"| {found} | {what} |" for found, what in rows]


def test_an_ending_of_which_nothing_is_known_is_not_called_clean() -> None:
    said = left_over(replace(CLEAN, clean=False))
    assert said == ("teardown of tiny-1 was not clean; left: unknown, the ledger could not be read")


def test_a_run_that_started_nothing_has_no_tables() -> None:
    nothing = replace(CLEAN, children=(), ports=(), scratch=(), devices=())
    assert receipt_text(nothing).count("\n") == 1
    assert "|" not in receipt_markdown(nothing)


def test_no_line_is_too_wide_for_a_terminal() -> None:
    path = "/scratch/" + "very-long-name/" * 20
    (child, *_) = CLEAN.children
    wide = replace(
        LEFT,
        children=(child, replace(child, name="n" * 128)),
        scratch=(ScratchState(path, False),),
    )
    lines = receipt_text(wide).splitlines()
    assert max(map(len, lines)) == 100
    assert path in "".join(line.strip() for line in lines)
    assert sum(line.endswith("SIGTERM  0") for line in lines) == 2, "a child has one line"


@pytest.mark.parametrize("name", ["a|b", "*a*", "<b>", "a_b_c", "[a](b)", "`a`", "a\nb"])
def test_markdown_shows_a_name_as_it_is(name: str) -> None:
    stuck = replace(LEFT, survivors=(Survivor(1, name),))
    (row,) = [line for line in receipt_markdown(stuck).splitlines() if "RUNNING" in line]
    shown = row.removeprefix("| STILL RUNNING | process 1 (").removesuffix(") |")
    assert all(shown[at - 1] == "\\" for at, char in enumerate(shown) if char in "|*<>_[]`")
    assert shown.replace("\\", "") == name.replace("\n", " ")
