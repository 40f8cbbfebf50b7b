"""What importing the tracking modules costs a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("mlflow", "torch", "tensorboard", "tensorflow", "ray", "pandas", "numpy")


def loaded_after(code: str) -> set[str]:
    """Which of the heavy libraries a fresh interpreter holds after ``code``."""
    script = f"{code}\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(child.stdout.split())


@pytest.mark.parametrize(
    "module",
    ["journal", "shipper", "sink", "names", "mlflow_sink", "mlflow_check", "tensorboard_sink"],
)
def test_importing_a_module_imports_no_heavy_library(module: str) -> None:
    assert loaded_after(f"import opd_core.tracking.{module}") == set()


def test_writing_event_files_needs_neither_torch_nor_tensorflow_nor_mlflow() -> None:
    code = (
        "import tempfile, pathlib\n"
        "from opd_core.tracking.tensorboard_sink import TensorBoardSink\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    TensorBoardSink(pathlib.Path(folder)).close()\n"
    )
    assert loaded_after(code) & {"torch", "tensorflow", "mlflow"} == set()
    assert "tensorboard" in loaded_after(code)
