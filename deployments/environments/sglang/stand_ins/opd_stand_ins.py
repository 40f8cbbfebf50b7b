"""What SGLang needs on a machine without CUDA, set up when Python starts in its environment.

The torchvision on package indexes may be built for CUDA; beside a CPU-only torch its compiled
operators are missing, and its own import fails where it describes two of them. Declaring these
two is enough: scoring calls no operator of torchvision.
"""

from __future__ import annotations

from typing import Any

from opd_import_hooks import around_import

_declared: list[object] = []  # the declarations last as long as their library object


def _declare_operators() -> None:
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


around_import("torchvision", before=_declare_operators)
