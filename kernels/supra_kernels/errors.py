"""The error of a backend that was asked for and cannot do what was asked."""


class BackendError(ValueError):
    """The backend asked for does not exist, cannot run here, or cannot compute this; the message says why."""
