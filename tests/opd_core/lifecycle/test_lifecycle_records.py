"""Orders, receipts and errors: what is refused, and that they survive a journey."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opd_core.lifecycle import errors
from opd_core.lifecycle.errors import ChildDied, LifecycleError
from opd_core.lifecycle.records import (
    ChildEnd,
    ChildSpec,
    PortState,
    Receipt,
    ScratchState,
    Survivor,
    read_receipt,
    write_receipt,
)

Order = Callable[..., ChildSpec]


def test_an_order_survives_the_wire(order: Order, tmp_path: Path) -> None:
    spec = order("teacher", env={"A": "b"}, ports=(1, 2), scratch=(tmp_path,), ledger_argv=("x",))
    assert ChildSpec.from_wire(json.loads(json.dumps(spec.to_wire()))) == spec


def test_the_ledger_shows_the_program_alone_unless_told_what_to_show(order: Order) -> None:
    assert order("a", argv=("/bin/server", "--key", "k")).to_ledger()["argv"] == ["server"]
    shown = order("a", argv=("/bin/server", "--key", "k"), ledger_argv=("server", "--key", "***"))
    assert shown.to_ledger()["argv"] == ["server", "--key", "***"]
    assert "env" not in shown.to_ledger()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"name": "a/b"}, "child name"),
        ({"name": ""}, "child name"),
        ({"argv": ()}, "at least a program"),
        ({"stop_signal": "SIGHUP"}, "SIGINT or SIGTERM"),
        ({"grace_s": -1.0}, "0 or more"),
        ({"grace_s": float("nan")}, "0 or more"),
        ({"log": Path("relative.log")}, "absolute"),
        ({"scratch": (Path("/a/../b"),)}, "absolute"),
        ({"ports": (0,)}, "1 to 65535"),
        ({"env": {"OPD_RUN_ID": "x"}}, "OPD_RUN_ID"),
    ],
)
def test_an_order_that_cannot_be_carried_out_is_refused(
    fields: dict[str, Any], expected: str, order: Order
) -> None:
    with pytest.raises(LifecycleError, match=expected):
        order(**{"name": "teacher", **fields})


def test_a_receipt_survives_the_disk(tmp_path: Path) -> None:
    receipt = Receipt(
        run_id="run-1",
        cause="owner died",
        clean=False,
        seconds=1.5,
        children=(ChildEnd("teacher", "sglang", 12, 1.0, None, "SIGKILL", None),),
        survivors=(Survivor(13, "python3"),),
        ports=(PortState(30000, False),),
        scratch=(ScratchState("/scratch", True),),
    )
    assert read_receipt(tmp_path) is None
    write_receipt(tmp_path, receipt)
    assert read_receipt(tmp_path) == receipt
    assert [path.name for path in tmp_path.iterdir()] == ["receipt.json"]


def test_every_error_survives_pickling() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, LifecycleError) and kind is not ChildDied
    ]
    assert len(kinds) >= 7
    examples = [kind("what came; what to do") for kind in kinds]
    examples.append(ChildDied("teacher", -9, "/logs/teacher.log", "killed"))
    for example in examples:
        copy = pickle.loads(pickle.dumps(example))
        assert type(copy) is type(example)
        assert str(copy) == str(example)
    assert copy.returncode == -9
