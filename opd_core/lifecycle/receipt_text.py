"""A receipt for people: in a terminal, as markdown, and in one sentence."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from .gpu_memory import NOT_TOLD
from .records import ChildEnd, DeviceState, Receipt

_WIDTH = 100
_NAME_WIDTH = 44
_CHILD_COLUMNS = ("name", "kind", "pid", "lived s", "ended", "code")
_PROOF_COLUMNS = ("found", "what")

Row = tuple[str, ...]


def receipt_text(receipt: Receipt) -> str:
    """Return the receipt as plain text, no line longer than 100 characters."""
    lines = [*_wrapped(_heading(receipt)), *_wrapped(_verdict(receipt))]
    if receipt.children:
        rows = [tuple(_shortened(cell) for cell in row) for row in _child_rows(receipt)]
        lines += ["", *_aligned([_CHILD_COLUMNS, *rows])]
    if proof := _proof_rows(receipt):
        lines += ["", *_aligned([_PROOF_COLUMNS, *proof])]
    return "\n".join(lines)


def receipt_markdown(receipt: Receipt) -> str:
    """Return the receipt as a heading line, the verdict, and up to two markdown tables."""
    parts = [f"**{_escaped(_heading(receipt))}**", _escaped(_verdict(receipt))]
    if receipt.children:
        parts.append(_table([_CHILD_COLUMNS, *_child_rows(receipt)]))
    if proof := _proof_rows(receipt):
        parts.append(_table([_PROOF_COLUMNS, *proof]))
    return "\n\n".join(parts)


def left_over(receipt: Receipt) -> str:
    """Return one sentence that names all that is left of a run; "" if nothing is."""
    if receipt.clean:
        return ""
    left = [f"process {each.pid} ({each.executable})" for each in receipt.survivors]
    left += [f"port {each.port}" for each in receipt.ports if not each.free]
    left += [f"folder {each.path}" for each in receipt.scratch if not each.removed]
    left += [_memory(each) for each in receipt.devices if not each.released]
    what = ", ".join(left) or "unknown, the ledger could not be read"
    return f"teardown of {receipt.run_id} was not clean; left: {what}"


def _heading(receipt: Receipt) -> str:
    return f"run {receipt.run_id} ended: {receipt.cause}"


def _verdict(receipt: Receipt) -> str:
    said = left_over(receipt) or "clean: nothing is left"
    return f"{said} (teardown took {receipt.seconds:.1f} s)"


def _child_rows(receipt: Receipt) -> list[Row]:
    return [
        (
            child.name,
            child.kind,
            str(child.pid),
            "?" if child.ended_at is None else f"{child.ended_at - child.started_at:.1f}",
            _how(child),
            "?" if child.returncode is None else str(child.returncode),
        )
        for child in receipt.children
    ]


def _how(child: ChildEnd) -> str:
    if child.returncode is None:
        return "unseen"
    return "by itself" if child.how == "exited" else child.how


def _proof_rows(receipt: Receipt) -> list[Row]:
    rows: list[Row] = []
    rows += [("STILL RUNNING", f"process {s.pid} ({s.executable})") for s in receipt.survivors]
    rows += [("IN USE", f"port {p.port}") for p in receipt.ports if not p.free]
    if free := [str(p.port) for p in receipt.ports if p.free]:
        rows.append(("free", f"ports {', '.join(free)}"))
    rows += [("removed" if s.removed else "STILL THERE", s.path) for s in receipt.scratch]
    rows += [("released" if d.released else "IN USE", _memory(d)) for d in receipt.devices]
    return rows


def _memory(state: DeviceState) -> str:
    after = "not told" if state.after_mib == NOT_TOLD else f"{state.after_mib} MiB"
    return f"memory of {state.device} ({state.before_mib} MiB before, {after} after)"


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _shortened(cell: str) -> str:
    return cell if len(cell) <= _NAME_WIDTH else cell[: _NAME_WIDTH - 1] + "…"


def _aligned(rows: Sequence[Row]) -> list[str]:
    """Columns side by side; only the last one may need more than one line."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    indent = " " * sum(width + 2 for width in widths)
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
        lines += _wrapped("  ".join([*cells, row[-1]]), indent)
    return lines


def _table(rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join("---" for _ in rows[0]) + " |")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Text that markdown shows as it is, on one line."""
    text = " ".join(text.split())
    return "".join(f"\\{char}" if char in "\\`*_<>[]|#" else char for char in text)
