from .. import Error


class NotSupported(Error, NotImplementedError):
    """A feature that the library whose names a module of `flashkernel.compat` has offers, and this
    module does not. The text names the function, the argument, what was expected and what came."""

    __module__ = "flashkernel.compat"  # where users find it, and tracebacks say so
