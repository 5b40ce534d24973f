"""The exception of every call that FlashKernel refuses."""


class Error(ValueError):
    """A call that FlashKernel refused. The text names the op, the argument, what was expected and
    what came."""

    __module__ = "flashkernel"  # where users find it, and tracebacks say so
