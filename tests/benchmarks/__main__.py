"""``make bench [ONLY=name]``: runs the benchmarks and prints what they measured."""

from __future__ import annotations

import sys

from opd_core.quiet import apply_defaults
from tests.benchmarks import (
    answers,
    logprobs,
    packing,
    pipeline,
    sampling,
    scaling,
    scoring,
    whole_step,
)

BENCHMARKS = {
    "answers": answers.run,
    "logprobs": logprobs.run,
    "packing": packing.run,
    "pipeline": pipeline.run,
    "sampling": sampling.run,
    "scaling": scaling.run,
    "scoring": scoring.run,
    "whole_step": whole_step.run,
}


def main() -> None:
    apply_defaults()
    for name in sys.argv[1:] or BENCHMARKS:
        print(f"== {name}", flush=True)
        for line in BENCHMARKS[name]():
            print(f"   {line}", flush=True)


if __name__ == "__main__":
    main()
