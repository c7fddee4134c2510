"""What is being worked on, in one line of a terminal that is rewritten in place.

Nothing is written if stderr is not a terminal, as in a log or a notebook, or if the environment
variable ``REMAT_OPT_PROGRESS`` is ``0``. Code that does long work announces it with ``doing``; no
decision depends on it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from remat_opt.units import format_seconds

#: If set to 0, nothing is written.
VARIABLE = "REMAT_OPT_PROGRESS"

#: Seconds after which work counts as long, and between two looks at the clock.
_AT_FIRST, _EVERY = 0.5, 0.5
_CLEAR = "\r\x1b[K"
_MOST_WIDTH = 78

#: What is being done, and since when, outermost first.
_work: list[tuple[str, float]] = []
_lock = threading.Lock()


def is_on() -> bool:
    """Whether progress is shown."""
    return os.environ.get(VARIABLE, "") != "0" and sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Shows what is being done, with the seconds since it began, while this is open.

    Work inside other work is shown after it.

    Args:
      what: a few words, such as ``compiling step for h200``.
    """
    if not is_on():
        yield
        return
    mine = (what, time.perf_counter())
    with _lock:
        _work.append(mine)
    over = threading.Event()
    teller = threading.Thread(target=_tell, args=(mine, over), daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
        with _lock:
            _work.remove(mine)
        if not _work:
            _write(_CLEAR)


def _tell(mine: tuple[str, float], over: threading.Event) -> None:
    """Keeps rewriting the line, as long as no other work has begun inside."""
    wait = _AT_FIRST
    while not over.wait(wait):
        wait = _EVERY
        with _lock:
            if _work[-1] is mine:
                said = ": ".join(["remat_opt", *(what for what, _ in _work)])
                said += f", {format_seconds(time.perf_counter() - mine[1])}"
                _write(_CLEAR + said[:_MOST_WIDTH])


def _write(text: str) -> None:
    # A terminal that has gone away must not end the work.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
