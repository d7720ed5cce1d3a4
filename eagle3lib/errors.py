"""The one exception that is meant for the user's eyes."""


class UserError(Exception):
    """Wrong input or settings: one line that names the file, line or key, and the remedy."""
