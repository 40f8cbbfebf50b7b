"""What got lost on the way: groups that differ from those that train, records on their way."""

from __future__ import annotations

from opd_core.analysis.detectors.finding import Finding, RunFacts
from opd_core.analysis.detectors.history import History
from opd_core.tracking.shipper import SinkReport

BIAS_Z = 4.0
"""Not 3: z is looked at after every train step, for lengths, rewards and data sources."""
LOST_SHARE = 0.05
"""Of all groups: fewer cannot move what trains by much."""
LAG_S = 60.0
"""A sink that works has a record within seconds; a shorter outage is made up for unseen."""


def survivors_biased(history: History, facts: RunFacts) -> Finding | None:
    """Groups that are dropped differ from those that train, and there are many of them."""
    if not history.recent:
        return None
    metrics = history.recent[-1].metrics
    z, started = metrics.get("survivors/bias_z"), history.groups.total()
    lost = started - history.groups["completed"]
    if z is None or not z >= BIAS_Z or not 0 < LOST_SHARE * started <= lost:
        return None
    causes = ", ".join(f"{n} {cause}" for cause, n in history.lost.most_common(3))
    return Finding(
        "survivors_biased",
        history.train_step,
        "warning",
        f"{lost} of {started} groups ({lost / started:.0%}) did not train by train step "
        f"{history.train_step} ({causes}), and differ from the others by z = {z:.1f}"
        + _means(history),
        "the student trains on another kind of answers than it gives",
        "if task.filter_func drops them on purpose (e.g. groups of equal reward) nothing is to be "
        "done; else loosen it, raise sampling.max_new_tokens, or the teacher's request_timeout_s "
        "and max_retry_per_sample if long answers fail in scoring",
    )


def _means(history: History) -> str:
    told = []
    for what in ("response_tokens_mean", "reward_mean"):
        for outcome in ("filtered", "failed"):
            name, kept = f"survivors/{outcome}_{what}", f"rollout/{what}"
            found = history.latest(name, kept, count=1)
            if found:
                m = found[0].metrics
                told.append(f"{name} {m[name]:.3g} against {m[kept]:.3g} of the kept")
    return f": {', '.join(told)} in their last train step" if told else ""


def tracker_lagging(
    name: str, sink: SinkReport, train_step: int, limit_s: float = LAG_S
) -> Finding | None:
    """A sink does not get the journal's records any more."""
    lag = sink.lag
    if lag.seconds < limit_s:
        return None
    why = f"; its last error: {sink.last_error}" if sink.last_error else ""
    return Finding(
        "tracker_lagging",
        train_step,
        "warning",
        f"{name} lacks {lag.records} records, the oldest for {lag.seconds:.0f} s{why}",
        f"{name} is away or too slow; nothing is lost, metrics.jsonl holds every record",
        "look after the server of tracking.mlflow_uri; what has not arrived by the run's end is "
        "brought there by `opd sync RUN`",
    )
