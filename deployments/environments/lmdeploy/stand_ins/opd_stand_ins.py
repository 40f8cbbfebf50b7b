"""What LMDeploy needs on a machine without CUDA, set up when Python starts in its environment.

LMDeploy's engine runs on CUDA only. Here its class is replaced, so that LMDeploy's command line,
HTTP layer, checks, RPC and engine process run as they are; the numbers come from transformers.
"""

from __future__ import annotations

from types import ModuleType

from opd_import_hooks import around_import


def _replace_engine(module: ModuleType) -> None:
    from opd_cpu_engine import CpuEngine

    module.Engine = CpuEngine  # type: ignore[attr-defined]


around_import("lmdeploy.pytorch.engine", after=_replace_engine)
