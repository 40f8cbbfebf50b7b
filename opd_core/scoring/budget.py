"""How many rollouts may fail before the teacher has to prove itself again."""

from __future__ import annotations

from collections import deque


class FailureBudget:
    """Counts failures among the last ``window`` scored rollouts."""

    def __init__(self, ratio: float, window: int) -> None:
        self._allowed = ratio * window
        self._last: deque[bool] = deque(maxlen=window)

    @property
    def failures(self) -> int:
        """Failed ones among the last."""
        return sum(self._last)

    def spend(self, *, failed: bool) -> bool:
        """Count one outcome; True when the budget is spent by it, and then it begins anew."""
        self._last.append(failed)
        if failed and self.failures > self._allowed:
            self._last.clear()
            return True
        return False
