"""The full probe of a teacher's endpoint: can one distil from it?

    report = await probe(endpoint, backend, tokenizer)

run.py          the order of the checks, and the report
checks.py       what an answer must look like: one small function and one verdict for each promise
asking.py       raw requests; nothing is sent that could end a server
load.py         latency and throughput at growing concurrency
connections.py  what the server does with an idle connection and with a slow request
text.py         the token sequences that are sent
"""

from opd_core.serving.probe.checks import Check, Verdict
from opd_core.serving.probe.load import Level
from opd_core.serving.probe.run import ProbeReport, probe

__all__ = ["Check", "Level", "ProbeReport", "Verdict", "probe"]
