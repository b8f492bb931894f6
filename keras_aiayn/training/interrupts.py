"""Who acts on a Ctrl-C for a while."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_to(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Hands every Ctrl-C to a function, where Python would raise `KeyboardInterrupt`.

    Args:
        handler: gets the number of the signal and the frame that it interrupts.
    """
    try:
        before = signal.signal(signal.SIGINT, handler)
    except ValueError:  # not in the main thread, which is the one that is interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
