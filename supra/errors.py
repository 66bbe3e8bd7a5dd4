"""The two kinds of failure a user can meet, each naming the thing, the reason and the mend."""


class SupraError(Exception):
    """A failure of the run (full disk, NaN loss, lost file): the command exits with 1."""

    exit_code = 1

    def __init__(self, thing: str, reason: str, mend: str) -> None:
        self.thing, self.reason, self.mend = thing, reason, mend
        super().__init__(f"{thing}: {reason}. {mend}")


class UserError(SupraError):
    """A mistake in what was asked for (wrong file, unknown name, bad value): the command exits with 2."""

    exit_code = 2
