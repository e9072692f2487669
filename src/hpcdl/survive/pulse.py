"""Was this process frozen? A thread of it that does nothing else would have been frozen too.

Floor 5.
"""

from __future__ import annotations

import math
import os
import threading
import time

TRUE = ("1", "true", "yes", "enabled")
"""What Open MPI takes for that."""
BEAT_S = 0.2


def setting(name: str, default: str = "0") -> str:
    """A parameter of Open MPI, as mpiexec --mca or the user's environment has it."""
    return os.environ.get(f"OMPI_MCA_mpi_ft_{name}", default)


def given_up_s() -> float:
    """After how many seconds of silence Open MPI's detector has surely given a rank up; never, if it is off."""
    if setting("detector").lower() not in TRUE:
        return math.inf
    return float(setting("detector_timeout", "10")) + 2 * float(setting("detector_period", "3"))


class Pulse:
    """Beats five times a second, and remembers how long it has not."""

    def __init__(self) -> None:
        self._last, self._longest = time.monotonic(), 0.0
        threading.Thread(target=self._beat, name="hpcdl pulse", daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            now = time.monotonic()
            self._longest, self._last = max(self._longest, now - self._last), now

    def pause(self) -> float:
        """The longest pause in seconds since it was last asked, or the one from which this process just wakes."""
        longest, self._longest = max(self._longest, time.monotonic() - self._last), 0.0
        return longest
