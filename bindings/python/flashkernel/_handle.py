"""What the library made for Python and Python must give back: who closes it, when, and who may use
it at a time."""

import os
import threading
import weakref

from ._error import Error


class Owner:
    """Stands for memory of this process. A copy would name memory that the original frees, and
    another process has none of it."""

    __slots__ = ()
    _instead = "load or open it again where it is needed"

    def __reduce_ex__(self, protocol):
        raise Error(
            f"{type(self).__name__}: cannot be copied or pickled, as it stands for memory of this "
            f"process; {self._instead}"
        )


class Handle(Owner):
    """A pointer that is closed once, when nothing holds this object any more. C functions take the
    object in the pointer's place, and so keep it open while they run.

    Where Python collects a cycle, a destructor may still call what has been closed already: the
    library then gets NULL, and refuses it; so it does for a part (`within`) of what is closed."""

    __slots__ = ("_pointer", "_close", "_within")

    def __init__(self, pointer: int, close=None, within: "Handle | None" = None):
        self._pointer, self._close, self._within = pointer, close, within

    @property
    def _as_parameter_(self) -> int | None:
        if self._within is not None and self._within._as_parameter_ is None:
            return None
        return self._pointer

    def __del__(self):
        pointer, self._pointer = self._pointer, None
        if self._close is not None:
            self._close(pointer)


class Turns:
    """Lets one thread at a time work with something, and once at a time: a signal handler or a
    destructor that comes in between is refused, since what was begun would go on with the state
    that it left behind."""

    def __init__(self):
        self._lock = threading.RLock()
        self._at_work = False
        self._left_behind = False
        _turns.add(self)

    def take(self, call: str, work, *arguments):
        with self._lock:
            if self._left_behind:
                raise Error(
                    f"{call}: another thread was using the model when this process was forked from "
                    "its own; load the model again here"
                )
            if self._at_work:
                raise Error(
                    f"{call}: the model is in the middle of a call of this thread, which a signal "
                    "handler or a destructor interrupts; wait until that has returned"
                )
            try:
                self._at_work = True
                return work(*arguments)
            finally:
                self._at_work = False

    def _after_fork(self):
        """Threads other than the one that forked are not in the new process: what one of them was
        at stays half done."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock, self._left_behind = threading.RLock(), True


_turns: "weakref.WeakSet[Turns]" = weakref.WeakSet()


def _after_fork() -> None:
    for turns in list(_turns):
        turns._after_fork()


os.register_at_fork(after_in_child=_after_fork)
