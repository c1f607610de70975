"""The error type whose message is shown to the user as it is."""


class ForkError(Exception):
    """A fault the user can act on: one sentence that names the thing and the way out."""
